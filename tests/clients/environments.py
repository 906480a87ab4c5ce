"""Environments of the clients: a separate one for each, made once and kept while its pins stay the same.

Installs exactly the pinned packages and lets no resolver choose. Never installs torch: where a client imports it, this
repository's own is lent through a path entry.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from oarlock.base.paths import cache_home
from tests.clients.matrix import Client, Kind

HERE = Path(__file__).resolve().parent
PINS = HERE / "pins"
CACHE = cache_home() / "oarlock" / "clients"
_STAMP = "made-from"
_LENT = ("torch", "torchgen", "functorch")
_BY_NPM = (Kind.NODE, Kind.COMMAND)
# How npm and pip name a registry that does not answer.
_AWAY = re.compile(
    r"\b(ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH|ERR_SOCKET_TIMEOUT)\b"
    r"|NewConnectionError|NameResolutionError|ConnectTimeoutError|ReadTimeoutError|ProxyError"
)


class NotInstalledError(Exception):
    """A client cannot be tried on this machine; the text names the missing program or registry."""


def bare_python(directory: Path, *, with_pip: bool = True) -> Path:
    """The interpreter of a new, empty environment."""
    venv.EnvBuilder(with_pip=with_pip, clear=True).create(directory)
    return directory / "bin" / "python"


def prepare(client: Client) -> tuple[list[str], bool]:
    """The command that runs this client's scripts, and whether its environment had to be made.

    Raises `NotInstalledError`.
    """
    program = client.package if client.kind is Kind.PROGRAM else "npm" if client.kind in _BY_NPM else None
    if program is not None and shutil.which(program) is None:
        raise NotInstalledError(f"{program} is not installed")
    if client.kind is Kind.PROGRAM:
        return [sys.executable], False
    directory = CACHE / client.name
    wanted = _fingerprint(client)
    stamp = directory / _STAMP
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / f"{client.name}.lock").open("w") as lock:  # another run may be making the same one
        fcntl.flock(lock, fcntl.LOCK_EX)
        fresh = not stamp.is_file() or stamp.read_text() != wanted
        if fresh:
            shutil.rmtree(directory, ignore_errors=True)
            directory.mkdir()
            _make(client, directory)
            stamp.write_text(wanted)
    if client.kind is Kind.NODE:
        return ["node"], fresh
    if client.kind is Kind.COMMAND:
        return [str(directory / "node_modules" / ".bin" / next(iter(_package(client)["bin"])))], fresh
    return [str(directory / "bin" / "python")], fresh


def version(client: Client) -> str:
    """Version of the client as installed, not as asked for."""
    directory = CACHE / client.name
    if client.kind is Kind.PROGRAM:
        printed = subprocess.run([client.package, "--version"], capture_output=True, text=True, check=True).stdout
        return printed.split()[1]
    if client.kind in _BY_NPM:
        return _package(client)["version"]
    question = f"import importlib.metadata as m; print(m.version({client.package!r}))"
    python = directory / "bin" / "python"
    return subprocess.run([python, "-c", question], capture_output=True, text=True, check=True).stdout.strip()


def _package(client: Client) -> dict[str, Any]:
    return json.loads((CACHE / client.name / "node_modules" / client.package / "package.json").read_text())


def _fingerprint(client: Client) -> str:
    pins = (PINS / f"{client.name}.txt").read_bytes() if client.kind is Kind.PYTHON else b""
    parts = (sys.version, str(client.requires), str(client.borrows_torch), hashlib.sha256(pins).hexdigest())
    if client.borrows_torch:
        distribution = importlib.metadata.distribution("torch")
        parts += (
            distribution.version,
            str(distribution.locate_file("")),
        )  # of another checkout's: links to what may go
    return "\n".join(parts) + "\n"


def _make(client: Client, directory: Path) -> None:
    if client.kind in _BY_NPM:
        npm = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error"]
        if client.kind is Kind.NODE:  # a program's script puts the binary of this platform in its place
            npm.append("--ignore-scripts")
        (directory / "package.json").write_text('{"private": true}\n')
        _install([*npm, *client.requires], directory)
        return
    # By this environment's pip, and without compiling what no script imports: both took longer than most scripts do.
    pip = [sys.executable, "-m", "pip", "--python", str(bare_python(directory, with_pip=False))]
    pip += ["--disable-pip-version-check", "install", "-q", "--no-deps", "--no-compile"]
    _install([*pip, "-r", str(PINS / f"{client.name}.txt")], directory)
    if client.borrows_torch:
        lend_torch(directory)


def _install(command: list[str], directory: Path) -> None:
    """Run npm or pip. Raises `NotInstalledError` if the registry does not answer."""
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return
    if _AWAY.search(done.stderr):
        raise NotInstalledError(f"the registry of {'npm' if command[0] == 'npm' else 'PyPI'} does not answer")
    print(done.stderr, file=sys.stderr, flush=True)
    done.check_returncode()


def lend_torch(directory: Path) -> None:
    """Links to this environment's torch, and nothing else of it, on the client's path."""
    lent = directory / "lent"
    lent.mkdir()
    for name in _LENT:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise SystemExit(f"error: {name} is not installed here\nfix: make install")
        package = Path(spec.origin).parent
        (lent / name).symlink_to(package)
    for info in package.parent.glob("torch-*.dist-info"):
        (lent / info.name).symlink_to(info)
    site = next(directory.glob("lib/python*/site-packages"))
    (site / "lent.pth").write_text(f"{lent}\n")
