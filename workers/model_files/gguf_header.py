"""Header of one GGUF file, read and checked: its settings, and the types and byte ranges of its tensors.

Knows the file format (versions 2 and 3, little-endian), and nothing of models. Torch-free; reads no tensor. The file is
untrusted: every length is checked against the file's size before memory is allocated.
"""

import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from oarlock.base.errors import StartupError
from oarlock.base.json_files import check_file
from oarlock.workers.model_files.located import TensorEntry


@dataclass(frozen=True, slots=True)
class BlockType:
    """Type that stores `elements` neighbours of a row together in `size` bytes."""

    name: str
    elements: int
    size: int


# ggml's type number -> type. Missing types were removed from the format, or are never stored.
TYPES = {
    number: BlockType(name, elements, size)
    for number, name, elements, size in (
        (0, "F32", 1, 4),
        (1, "F16", 1, 2),
        (2, "Q4_0", 32, 18),
        (3, "Q4_1", 32, 20),
        (6, "Q5_0", 32, 22),
        (7, "Q5_1", 32, 24),
        (8, "Q8_0", 32, 34),
        (10, "Q2_K", 256, 84),
        (11, "Q3_K", 256, 110),
        (12, "Q4_K", 256, 144),
        (13, "Q5_K", 256, 176),
        (14, "Q6_K", 256, 210),
        (16, "IQ2_XXS", 256, 66),
        (17, "IQ2_XS", 256, 74),
        (18, "IQ3_XXS", 256, 98),
        (19, "IQ1_S", 256, 50),
        (20, "IQ4_NL", 32, 18),
        (21, "IQ3_S", 256, 110),
        (22, "IQ2_S", 256, 82),
        (23, "IQ4_XS", 256, 136),
        (24, "I8", 1, 1),
        (25, "I16", 1, 2),
        (26, "I32", 1, 4),
        (27, "I64", 1, 8),
        (28, "F64", 1, 8),
        (29, "IQ1_M", 256, 56),
        (30, "BF16", 1, 2),
        (34, "TQ1_0", 256, 54),
        (35, "TQ2_0", 256, 66),
        (39, "MXFP4", 32, 17),
    )
}
BY_NAME = {kind.name: kind for kind in TYPES.values()}

FLOATS = ("F32", "F16", "BF16")  # the same names as in safetensors files


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Format of the values in blocks: weight = value * scale + offset, one scale for `group` neighbours of a row."""

    group: int
    bits: int  # 4: values are from -8 to 7; 8: from -128 to 127
    has_offsets: bool
    is_float: bool = False  # values are doubled 4-bit floats (e2m1)


GROUP_LAYOUTS = {
    "Q4_0": GroupLayout(32, 4, False),
    "Q4_1": GroupLayout(32, 4, True),
    "Q5_0": GroupLayout(32, 8, False),
    "Q5_1": GroupLayout(32, 8, True),
    "Q8_0": GroupLayout(32, 8, False),
    "Q4_K": GroupLayout(32, 4, True),
    "Q5_K": GroupLayout(32, 8, True),
    "Q6_K": GroupLayout(16, 8, False),
    "MXFP4": GroupLayout(32, 4, False, is_float=True),
}
SERVED = (*FLOATS, *GROUP_LAYOUTS)  # types that can be read


MAGIC = b"GGUF"
_LFS_MARK = b"version https://git-lfs"
# The headers of the largest known vocabularies (262,144 tokens, or 200,000 and their merges) have less than 20 MB. As
# Python objects they take several times this size.
MAX_HEADER_BYTES = 96 << 20
MAX_STRINGS = 2_000_000
MAX_ENTRIES = 200_000  # maximum number of settings, and of tensors
MAX_NAME_BYTES = 65_535
# Limit of a string in a list, which is a token or a merge of two. The longest known tokens are 512 spaces; building a
# tokenizer takes time and memory proportional to the square of a token's length.
MAX_TOKEN_BYTES = 4096
_MOST_DIMENSIONS = 4
_DEFAULT_ALIGNMENT, _MAX_ALIGNMENT = 32, 1 << 20
_READ_AHEAD = 1 << 20
_DOWNLOAD_AGAIN = "Download the file again; it is damaged or incomplete."

_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

# Numeric arrays stay packed: a list of a hundred million small numbers would take gigabytes.
Value = int | float | bool | str | list[str] | array


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Settings and tensor entries of one file."""

    path: Path
    version: int
    settings: dict[str, Value]
    tensors: dict[str, TensorEntry]  # keys are names in the file; `begin` and `end` count from the start of the file


class _Damaged(Exception):
    """Fault of a damaged file, as a phrase to follow the file's name."""


def read_header(path: Path) -> GGUFHeader:
    """Read and check the header. Raise `StartupError` naming the file, and the tensor if a tensor is wrong.

    Shapes are in Hugging Face's order: [outputs, inputs]; the file has the inputs first.
    """
    size = check_file(path)
    try:
        with path.open("rb") as file:
            if file.read(len(_LFS_MARK)) == _LFS_MARK:
                raise StartupError(
                    f"{path} is a git-lfs pointer, not the model.", f"Run `git lfs pull` in {path.parent}."
                )
            file.seek(0)
            return _read(path, _Cursor(file, size))
    except _Damaged as error:
        raise StartupError(f"{path} {error}.", _DOWNLOAD_AGAIN) from None
    except OSError as error:
        reason = error.strerror or str(error)
        raise StartupError(f"{path} cannot be read: {reason}.", "Check the path and its permissions.") from error


class _Cursor:
    """Reader of a file from its start, never beyond its end or `MAX_HEADER_BYTES`."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self.size = size
        self._buffer = b""
        self._at = 0  # position in the buffer
        self._begin = 0  # position of the buffer in the file
        self.strings_left = MAX_STRINGS

    @property
    def position(self) -> int:
        return self._begin + self._at

    def take(self, count: int) -> bytes:
        if count > self.size - self.position:
            raise _Damaged(f"ends at byte {self.size}, within its header, which goes on to {self.position + count}")
        if self.position + count > MAX_HEADER_BYTES:
            raise _Damaged(f"has a header of more than {MAX_HEADER_BYTES} bytes")
        if self._at + count > len(self._buffer):
            self._begin += self._at
            rest = self._buffer[self._at :]
            self._buffer = rest + self._file.read(max(_READ_AHEAD, count - len(rest)))
            self._at = 0
            if len(self._buffer) < count:
                raise _Damaged("was cut short while it was read")
        found = self._buffer[self._at : self._at + count]
        self._at += count
        return found

    def number(self, code: str) -> int | float | bool:
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def count(self, code: str = "Q") -> int:
        return int(self.number(code))

    def text(self, what: str) -> str:
        length = self.count()
        if what == "a token" and length > MAX_TOKEN_BYTES:
            raise _Damaged(f"has a token of {length} bytes, and at most {MAX_TOKEN_BYTES} are read of one")
        self.strings_left -= 1
        if self.strings_left < 0:
            raise _Damaged(f"has more than {MAX_STRINGS} strings in its header")
        try:
            # Some vocabularies have tokens that are not whole characters; such tokens are never output by themselves.
            return self.take(length).decode("utf-8", "replace" if what == "a token" else "strict")
        except UnicodeDecodeError:
            raise _Damaged(f"has {what} that is not UTF-8") from None


def _read(path: Path, cursor: _Cursor) -> GGUFHeader:
    if cursor.size < 24 or cursor.take(4) != MAGIC:
        raise _Damaged(
            "does not begin with the magic bytes of GGUF" if cursor.size >= 24 else f"has only {cursor.size} bytes"
        )
    version = cursor.count("I")
    if version not in (2, 3):
        if version in (2 << 24, 3 << 24):
            raise StartupError(f"{path} is a big-endian GGUF file.", "Use the little-endian file of the same model.")
        raise StartupError(f"{path} is GGUF of version {version}.", "Use a file of version 2 or 3.")
    num_tensors, num_settings = cursor.count(), cursor.count()
    for what, count in (("tensors", num_tensors), ("settings", num_settings)):
        if count > MAX_ENTRIES:
            raise _Damaged(f"announces {count} {what}")
    settings: dict[str, Value] = {}
    for _ in range(num_settings):
        key = _name(cursor, "a setting's name")
        if key in settings:
            raise _Damaged(f"has the setting {key!r} twice")
        settings[key] = _value(cursor, key)
    alignment = settings.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
        raise _Damaged(f"gives general.alignment as {str(alignment)[:80]}")
    described = {}
    for _ in range(num_tensors):
        name = _name(cursor, "a tensor's name")
        if name in described:
            raise _Damaged(f"has tensor {name!r} twice")
        described[name] = _tensor(cursor, name, alignment)
    begin = -(-cursor.position // alignment) * alignment
    tensors = {name: _placed(entry, begin) for name, entry in described.items()}
    _check_layout(tensors, begin, cursor.size)
    return GGUFHeader(path, version, settings, tensors)


def _name(cursor: _Cursor, what: str) -> str:
    start = cursor.position
    name = cursor.text(what)
    if not name or cursor.position - start > MAX_NAME_BYTES or not name.isprintable():
        raise _Damaged(f"has {what} that cannot be one: {name[:40]!r}")
    return name


def _value(cursor: _Cursor, key: str) -> Value:
    kind = cursor.count("I")
    if kind == _STRING:
        return cursor.text(f"a text {key!r}")
    if kind in _NUMBERS:
        return cursor.number(_NUMBERS[kind])
    if kind != _ARRAY:
        raise _Damaged(f"gives the setting {key!r} the unknown type {kind}")
    kind, count = cursor.count("I"), cursor.count()
    if kind == _STRING:
        if count > (cursor.size - cursor.position) // 8:  # each text has a length field of 8 bytes
            raise _Damaged(f"announces {count} texts in {key!r}, more than fit")
        return [cursor.text("a token") for _ in range(count)]
    if kind not in _NUMBERS:
        raise _Damaged(f"has an array of type {kind} in {key!r}")
    code = "B" if _NUMBERS[kind] == "?" else _NUMBERS[kind]
    numbers = array(code)
    numbers.frombytes(cursor.take(count * struct.calcsize(f"<{code}")))
    assert numbers.itemsize == struct.calcsize(f"<{code}"), f"array's {code} has another size here"
    return numbers


def _tensor(cursor: _Cursor, name: str, alignment: int) -> TensorEntry:
    """Read a tensor's entry, with `begin` and `end` counted from the start of the data."""
    dimensions = cursor.count("I")
    if not 1 <= dimensions <= _MOST_DIMENSIONS:
        raise _Damaged(f"gives tensor {name!r} {dimensions} dimensions")
    shape = tuple(cursor.count() for _ in range(dimensions))
    number, begin = cursor.count("I"), cursor.count()
    kind = TYPES.get(number)
    if kind is None:
        raise _Damaged(f"gives tensor {name!r} the type {number}, which is not known here")
    elements = 1
    for length in shape:
        elements *= length
    if elements == 0 or elements * kind.size > 8 * cursor.size * kind.elements or shape[0] % kind.elements:
        raise _Damaged(f"gives tensor {name!r} of {kind.name} the shape {list(reversed(shape))}")
    if begin % alignment:
        raise _Damaged(f"places tensor {name!r} at {begin}, which is no multiple of {alignment}")
    return TensorEntry(kind.name, tuple(reversed(shape)), begin, begin + elements // kind.elements * kind.size)


def _placed(entry: TensorEntry, begin: int) -> TensorEntry:
    return TensorEntry(entry.dtype, entry.shape, begin + entry.begin, begin + entry.end)


def _check_layout(tensors: dict[str, TensorEntry], begin: int, size: int) -> None:
    position, before = begin, ""
    for name, entry in sorted(tensors.items(), key=lambda item: item[1].begin):
        if entry.end > size:
            raise _Damaged(f"is truncated: tensor {name!r} ends at byte {entry.end} of {size}")
        if entry.begin < position:
            raise _Damaged(f"places tensor {name!r} over {before!r}, at byte {entry.begin}")
        position, before = entry.end, name
