"""Paths that depend on the user of this process: the home directory, `~`, and the directories of caches.

A user need not have a home. Containers often run as a user id that the password database does not know, with HOME unset
or set to a directory that this user cannot write. No other module expands `~` or asks for a home directory.
"""

import os
import pwd
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from oarlock.base.errors import StartupError

_CACHE_FIX = "Set XDG_CACHE_HOME to a directory that this user can write."


def home() -> Path | None:
    """Return the home directory of this user, or None if neither HOME nor the password database names one."""
    found = os.environ.get("HOME") or _home_of(os.getuid())
    return Path(found) if found and os.path.isabs(found) else None


def _home_of(user: int | str) -> str | None:
    try:
        return (pwd.getpwuid(user) if isinstance(user, int) else pwd.getpwnam(user)).pw_dir
    except KeyError:
        return None


def expand(path: str | Path) -> Path:
    """Return `path` with a leading `~` or `~USER` replaced by the home directory.

    Raises `StartupError` if there is no such directory: a folder named `~` in the current directory is never meant.
    """
    text = os.fspath(path)
    if not text.startswith("~"):
        return Path(path)
    user, _, rest = text[1:].partition("/")
    found = _home_of(user) if user else home()
    if not found:
        reason = f"there is no user {user}" if user else f"user {os.getuid()} has no home directory"
        raise StartupError(
            f"{text} cannot be found: {reason}.", "Write the full path; write a name that begins with ~ as ./~NAME."
        )
    return Path(found) / rest


def exists(path: Path) -> bool:
    """Return whether `path` exists. Raises `StartupError` if this user may not look there."""
    try:
        return path.exists()
    except OSError as error:
        fix = "Let this user read it, or name another."
        raise StartupError(f"{path} cannot be read: {error.strerror}.", fix) from None


def cache_home() -> Path:
    """Return the directory of this user's caches: XDG_CACHE_HOME, else ~/.cache, else a private temporary directory.

    The temporary directory is for users without a writable home. Raises `StartupError` if it is not private, because
    files in it are loaded as code.
    """
    if given := os.environ.get("XDG_CACHE_HOME"):
        return expand(given)
    own = home()
    if own is not None and _is_writable(own / ".cache"):
        return own / ".cache"
    return _temporary()


def _is_writable(folder: Path) -> bool:
    """Return whether this user can write to `folder`, or create it."""
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    return os.access(existing, os.W_OK | os.X_OK)


def _temporary() -> Path:
    try:
        folder = Path(tempfile.gettempdir()) / f"oarlock-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise StartupError(f"No cache directory can be used: {error.strerror or error}.", _CACHE_FIX) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise StartupError(f"{folder} cannot hold caches: other users can change it.", _CACHE_FIX)
    return folder


def hub_cache(download_dir: str | None = None) -> Path:
    """Return the directory for models of the hub: `download_dir`, else the directory that `huggingface_hub` uses.

    Raises `StartupError` if nothing names one: models are too large for a temporary directory.
    """
    if download_dir is not None:
        return expand(download_dir)
    variables = os.environ
    if found := variables.get("HF_HUB_CACHE") or variables.get("HUGGINGFACE_HUB_CACHE"):
        return expand(os.path.expandvars(found))
    if found := variables.get("HF_HOME"):
        return expand(os.path.expandvars(found)) / "hub"
    if not variables.get("XDG_CACHE_HOME") and home() is None:
        raise StartupError(
            f"There is no directory for models of the hub: user {os.getuid()} has no home directory.",
            "Set HF_HOME to a directory that this user can write, or name one with --download-dir.",
        )
    root = variables.get("XDG_CACHE_HOME") or f"{home()}/.cache"
    return expand(os.path.expandvars(root)) / "huggingface" / "hub"


def library_caches(variables: Mapping[str, str]) -> dict[str, str]:
    """Return variables for child processes that give libraries a cache which this user can write.

    `variables`: environment of the process. Triton compiles into `~/.triton`, which without a home is a folder named
    `~`.
    """
    if variables.get("TRITON_HOME") or variables.get("TRITON_CACHE_DIR"):
        return {}
    own = home()
    if own is not None and _is_writable(own / ".triton"):
        return {}
    try:
        return {"TRITON_HOME": str(cache_home())}
    except StartupError:  # the code that needs a cache reports the reason
        return {}
