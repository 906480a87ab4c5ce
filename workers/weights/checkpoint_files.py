"""Reads the small files of a checkpoint, which are foreign content, so that none of them stops or fills a process.

A pipe, a device and a folder in the place of a file are refused before anything is read of them, as is a file that no
checkpoint has in that size. Torch-free; the server and the workers read by the same rules.
"""

import errno
import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from oarlock.workers.errors import StartupError, shown

MOST_BYTES = 64 << 20  # of a description: the longest known, an index of a hundred thousand tensors, has 20 MB
_FIX = "Fetch that file of the checkpoint again."


def is_there(path: Path) -> bool:
    """Whether the folder has anything of that name, a link to nothing too."""
    return os.path.lexists(path)


def check_file(path: Path, most: int | None = None) -> int:
    """The size of the file at `path`, which may be a link to one. Raises `StartupError` for anything else there, and
    for more than `most` bytes."""
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise StartupError(f"{path} cannot be read: it is {_kind(found.st_mode)}, not a file.", _FIX)
        if not os.access(path, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        _refuse(path, error)
    if most is not None and found.st_size > most:
        raise StartupError(
            f"{path} cannot be read: it has {found.st_size} bytes, and at most {most} are read of such a file.", _FIX
        )
    return found.st_size


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """The text of a file in UTF-8. Raises `StartupError`."""
    check_file(path, most)
    try:
        with path.open("rb") as file:
            return file.read(most).decode("utf-8")
    except OSError as error:
        _refuse(path, error)
    except UnicodeDecodeError as error:
        raise StartupError(f"{path} cannot be read: byte {error.start} is not UTF-8 text.", _FIX) from None


def read_json(path: Path) -> Any:
    """The JSON value in a file. Raises `StartupError`, for the same name twice in one object too."""
    text = read_text(path)
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise StartupError(f"{path} cannot be read: its JSON is nested too deeply.", _FIX) from None
    except ValueError as error:
        raise StartupError(f"{path} cannot be read: it is not valid JSON: {error}.", _FIX) from None


def read_table(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `StartupError`."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise StartupError(f"{path} does not hold a JSON object.", _FIX)
    return value


def _once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for number, name in enumerate(names) if name in names[:number])
        raise ValueError(f"it has {shown(twice)} twice")
    return found


def _refuse(path: Path, error: OSError) -> NoReturn:
    fix = "Let this user read it." if isinstance(error, PermissionError) else _FIX
    raise StartupError(f"{path} cannot be read: {error.strerror or error}.", fix) from None


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
