"""Files of a checkpoint that are read whole: texts and JSON.

They are untrusted: none of them may block the process or exhaust its memory. A pipe, device or folder in place of a
file is refused before it is read, and so is a file larger than in any checkpoint.
"""

import errno
import gc
import json
import os
import stat
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from oarlock.base.errors import StartupError, shown

MOST_BYTES = 64 << 20  # maximum bytes of a JSON file; the longest known, an index of 100,000 tensors, has 20 MB
# Values take far more memory as Python objects than as text: this many take up to 250 MB. An index of 100,000 tensors
# has as many values.
MOST_VALUES = 500_000
_FIX = "Fetch that file of the checkpoint again."


def is_there(path: Path) -> bool:
    """Return whether the path exists, even as a broken link."""
    return os.path.lexists(path)


def check_file(path: Path, most: int | None = None) -> int:
    """Return the size of the file at `path`, which may be a link to a file.

    Raise `StartupError` for anything else there, and for more than `most` bytes.
    """
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
    """Return the text of a UTF-8 file. Raise `StartupError` if it cannot be read."""
    size = check_file(path, most)
    try:
        with path.open("rb") as file:
            return file.read(size).decode("utf-8")  # a larger count would be allocated first
    except OSError as error:
        _refuse(path, error)
    except UnicodeDecodeError as error:
        raise StartupError(f"{path} cannot be read: byte {error.start} is not UTF-8 text.", _FIX) from None


def read_json(
    path: Path, max_bytes: int = MOST_BYTES, max_values: int = MOST_VALUES, max_names: int = MOST_VALUES
) -> Any:
    """Return the JSON value in a file. Raise `StartupError` if it cannot be read or is invalid.

    Also raise it if an object has the same name twice, or if there are more than `max_values` values, or `max_names`
    names in objects, which take the most memory.
    """
    text = read_text(path, max_bytes)
    for what, count, most in (("values", num_values(text), max_values), ("names", text.count(":"), max_names)):
        if count > most:
            raise StartupError(f"{path} cannot be read: it holds more than {most} {what}.", _FIX)
    try:
        with gc_paused():
            return json.loads(text, object_pairs_hook=with_unique_names)
    except RecursionError:
        raise StartupError(f"{path} cannot be read: its JSON is nested too deeply.", _FIX) from None
    except ValueError as error:
        raise StartupError(f"{path} cannot be read: it is not valid JSON: {error}.", _FIX) from None


def num_values(text: str) -> int:
    """Return an upper bound of the number of values in JSON: each but the first has a separator before it."""
    return 1 + sum(map(text.count, ",[{"))


def read_table(
    path: Path, max_bytes: int = MOST_BYTES, max_values: int = MOST_VALUES, max_names: int = MOST_VALUES
) -> dict[str, Any]:
    """Return the JSON object in a file. Raise `StartupError` like `read_json`, and if it is no object."""
    value = read_json(path, max_bytes, max_values, max_names)
    if not isinstance(value, dict):
        raise StartupError(f"{path} does not hold a JSON object.", _FIX)
    return value


@contextmanager
def gc_paused() -> Generator[None]:
    """Pause Python's search for cycles of garbage while many objects are made that cannot form any.

    Otherwise it walks through all of them again and again, which takes 40 % of the time of a large header. Files that
    may block the thread must not be read meanwhile: other threads would be without the search.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def with_unique_names(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object with these members. Raise `ValueError` if two have the same name."""
    found = dict(pairs)
    if len(found) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it has {shown(twice)} twice")
    return found


def _refuse(path: Path, error: OSError) -> NoReturn:
    fix = "Let this user read it." if isinstance(error, PermissionError) else _FIX
    raise StartupError(f"{path} cannot be read: {error.strerror or error}.", fix) from None


def _kind(mode: int) -> str:
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFDIR: "a folder", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")
