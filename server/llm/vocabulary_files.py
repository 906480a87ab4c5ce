"""Check of the files of a checkpoint without `tokenizer.json`, before transformers converts them to a tokenizer.

They are foreign content, and transformers reads them without limits. Finding the merges of a SentencePiece model takes
time proportional to the squares of its pieces' lengths.
"""

from collections.abc import Iterator
from pathlib import Path

from oarlock.base.errors import StartupError
from oarlock.base.json_files import check_file, is_there, read_json, read_text
from oarlock.server.hub.tiktoken_model import FILE as TIKTOKEN_FILE
from oarlock.server.llm import tokenizer_file

# The largest known files, of vocabularies with 250,000 tokens, have 5 MB.
MAX_BYTES = 32 << 20
MAX_LINE = 4096  # limit in characters
MAX_PIECE_BYTES = 4096
_MAX_WORK = 1 << 28  # limit for the sum of squared piece lengths: Gemma's is 40 million
_TEXTS = frozenset({".txt", ".jinja", ".codes", ".vocab", ".tiktoken"})
_MODELS = frozenset({".model", ".spm"})
_FIX = "Fetch that file of the checkpoint again."


def check_tokenizer(folder: Path) -> None:
    """Raise `StartupError` if the tokenizer in a folder, of any format, has a fault or takes too much to read."""
    file = folder / "tokenizer.json"
    if is_there(file):
        tokenizer_file.load(file)
    else:
        check_vocabulary_files(folder)


def check_vocabulary_files(folder: Path) -> None:
    """Raise `StartupError` for a file that transformers might read and that exceeds the values of all known models."""
    for file in sorted(folder.iterdir()):
        if file.suffix == ".json":
            read_json(file)
        elif file.suffix in _TEXTS or file.name == TIKTOKEN_FILE:
            _check_lines(file)
        elif file.suffix in _MODELS:
            _check_pieces(file)


def _check_lines(file: Path) -> None:
    longest = max(map(len, read_text(file, MAX_BYTES).splitlines()), default=0)
    if longest > MAX_LINE and file.suffix != ".jinja":
        raise StartupError(f"{file} has a line of {longest} characters; at most {MAX_LINE} are allowed.", _FIX)


def _check_pieces(file: Path) -> None:
    check_file(file, MAX_BYTES)
    work = 0
    for length in _piece_lengths(file.read_bytes()):
        if length > MAX_PIECE_BYTES:
            raise StartupError(f"{file} has a token of {length} bytes; at most {MAX_PIECE_BYTES} are allowed.", _FIX)
        work += length * length
        if work > _MAX_WORK:
            raise StartupError(f"{file} has too many long tokens to convert it.", _FIX)


def _piece_lengths(data: bytes) -> Iterator[int]:
    """Yield the length in bytes of each piece of a SentencePiece model: field 1 of each field 1, in protobuf's format.

    A file in another format has no pieces; transformers refuses it.
    """
    for number, start, end in _fields(data, 0, len(data)):
        if number == 1:
            for inner, first, last in _fields(data, start, end):
                if inner == 1:
                    yield last - first


def _fields(data: bytes, at: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and end of each field that has a length; stops at a fault."""
    while at < end:
        key, at = _varint(data, at, end)
        match key & 7:
            case 0:
                _, at = _varint(data, at, end)
            case 1:
                at += 8
            case 5:
                at += 4
            case 2:
                length, at = _varint(data, at, end)
                if length > end - at:
                    return
                yield key >> 3, at, at + length
                at += length
            case _:
                return


def _varint(data: bytes, at: int, end: int) -> tuple[int, int]:
    """Return the number at this offset, and the offset after it."""
    value = shift = 0
    while at < end and shift < 64:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            break
    return value, at
