"""Reads and checks the header of one safetensors file, so that a damaged file is named before any rank starts.

Knows the file format. Torch-free; does not read tensors, and does not know which tensors a model wants.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oarlock.workers.errors import StartupError, shown
from oarlock.workers.weights.checkpoint_files import check_file

# The format's own limit: a longer header is a damaged length field, not a big model.
MAX_HEADER_BYTES = 100_000_000
MAX_DIMENSIONS = 64  # of a tensor; torch has as many at most
ITEM_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}
_LFS_MARK = b"version https://git-lfs"
_DOWNLOAD_AGAIN = "Download the file again; it is damaged or incomplete."


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor as its file describes it."""

    dtype: str  # the format's name: BF16, F16, F32, ...
    shape: tuple[int, ...]
    begin: int  # bytes, counted from the end of the header; in a GGUF file from its beginning
    end: int


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Name -> entry of every tensor in the file. Raises `StartupError` naming the file, and the tensor if one is wrong.

    The byte ranges must tile the data section without hole or overlap and end where the file ends: a truncated file,
    trailing junk and a header that lies about a shape are all noticed here, without reading a tensor.
    """
    size = check_file(path)
    try:
        with path.open("rb") as file:
            start = file.read(64)
            if start.startswith(_LFS_MARK):
                raise StartupError(
                    f"{path} is a git-lfs pointer, not the weights.", f"Run `git lfs pull` in {path.parent}."
                )
            if len(start) < 8:
                raise _damaged(path, f"has {size} bytes, too few for a safetensors header")
            length = int.from_bytes(start[:8], "little")
            if length > MAX_HEADER_BYTES or length > size - 8:
                raise _damaged(path, f"announces a header of {length} bytes but holds {size}")
            file.seek(8)
            text = file.read(length)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StartupError(f"{path} cannot be read: {reason}.", "Check the path and its permissions.") from error
    entries = {name: _entry(path, name, fields) for name, fields in _parse(path, text).items()}
    _check_layout(path, entries, data_bytes=size - 8 - length)
    return entries


def _damaged(path: Path, what: str) -> StartupError:
    return StartupError(f"{path} {what}.", _DOWNLOAD_AGAIN)


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name appears twice")
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"has an unreadable header ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "has a header that is not a table of tensors")
    header.pop("__metadata__", None)
    return header


def _entry(path: Path, name: str, fields: Any) -> TensorEntry:
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise _damaged(path, f"describes tensor {shown(name)} without dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise StartupError(
            f"{path}: tensor {shown(name)} has dtype {shown(dtype)}, which is not known here.",
            f"Use a checkpoint in one of {', '.join(ITEM_BYTES)}.",
        )
    if not _are_counts(shape):
        raise _damaged(path, f"gives tensor {shown(name)} the shape {shown(shape)}")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _damaged(path, f"gives tensor {shown(name)} the byte range {shown(offsets)}")
    given, wanted = offsets[1] - offsets[0], ITEM_BYTES[dtype]
    if len(shape) > MAX_DIMENSIONS:
        raise _damaged(path, f"gives tensor {shown(name)} {len(shape)} dimensions, and none has over {MAX_DIMENSIONS}")
    for length in shape:
        wanted *= length
    if given != wanted:
        needs = f"{dtype} {shown(shape)} needs {shown(wanted)}"
        raise _damaged(path, f"gives tensor {shown(name)} {shown(given)} bytes, but {needs}")
    return TensorEntry(dtype, tuple(shape), offsets[0], offsets[1])


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_layout(path: Path, entries: dict[str, TensorEntry], data_bytes: int) -> None:
    for name, entry in entries.items():
        if entry.end > data_bytes:
            raise _damaged(path, f"is truncated: tensor {shown(name)} ends at byte {shown(entry.end)} of {data_bytes}")
    position = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != position:
            raise _damaged(path, f"places tensor {shown(name)} at byte {shown(entry.begin)} where {position} was due")
        position = entry.end
    if position != data_bytes:
        raise _damaged(path, f"holds {data_bytes - position} bytes that belong to no tensor")
