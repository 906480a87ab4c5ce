"""GGUF headers: what a good file says; damaged and hostile files, each refused in one line of cause and one of fix."""

import random
import struct
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from oarlock.base.errors import StartupError
from oarlock.workers.gguf_config import hf_config
from oarlock.workers.model_files.gguf_header import read_header
from oarlock.workers.model_files.gguf_model import GGUFModel, shortest

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def setting(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: list[int], kind: int, begin: int) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, begin)


def gguf_bytes(
    settings: list[bytes], tensors: list[bytes], data: bytes = b"", *, version: int = 3, counts: Any = None
) -> bytes:
    num_tensors, num_settings = counts or (len(tensors), len(settings))
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_settings) + b"".join((*settings, *tensors))
    return head + b"\0" * (-len(head) % 32) + data


NAME = setting("general.architecture", STRING, text("llama"))
TOKENS = setting("tokens", ARRAY, struct.pack("<IQ", STRING, 3) + text("a") + text("é") + text(""))
TYPES = setting("types", ARRAY, struct.pack("<IQ3B", U8, 3, 1, 2, 3))
DATA = bytes(range(128))
MATRIX, VECTOR = tensor("w", [8, 2], 0, 0), tensor("v", [4], 0, 64)


@pytest.mark.parametrize("version", [2, 3])
def test_a_header_is_read(tmp_path: Path, version: int) -> None:
    path = tmp_path / "model.gguf"
    yes = setting("yes", BOOL, b"\1")
    path.write_bytes(gguf_bytes([NAME, TOKENS, TYPES, yes], [MATRIX, VECTOR], DATA, version=version))
    header = read_header(path)
    assert header.settings["general.architecture"] == "llama" and header.settings["yes"] is True
    assert header.settings["tokens"] == ["a", "é", ""] and list(header.settings["types"]) == [1, 2, 3]
    matrix, vector = header.tensors["w"], header.tensors["v"]
    assert (matrix.dtype, matrix.shape, vector.shape) == ("F32", (2, 8), (4,))
    assert path.read_bytes()[matrix.begin : vector.end] == DATA[:80]


def test_alignment_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    body = gguf_bytes([setting("general.alignment", U32, struct.pack("<I", 8))], [MATRIX, tensor("v", [4], 0, 72)])
    path.write_bytes(body.rstrip(b"\0") + b"\0" * 200)
    header = read_header(path)
    assert header.tensors["w"].begin % 8 == 0 and header.tensors["v"].begin == header.tensors["w"].begin + 72


GOOD = gguf_bytes([NAME, TOKENS], [MATRIX, VECTOR], DATA)
HUGE = 2**62
HOSTILE = {
    "empty": (b"", "has only 0 bytes"),
    "another format": (b"PK" + GOOD[2:], "does not begin with the magic bytes of GGUF"),
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\n", "git-lfs pointer"),
    "version 1": (gguf_bytes([], [], version=1), "GGUF of version 1"),
    "big-endian": (gguf_bytes([], [], b" " * 8, version=3 << 24), "big-endian"),
    "settings without end": (gguf_bytes([NAME], [], counts=(0, HUGE)), "announces 4611686018427387904 settings"),
    "tensors without end": (gguf_bytes([NAME], [], counts=(HUGE, 1)), "announces 4611686018427387904 tensors"),
    "more settings than there are": (gguf_bytes([NAME], [], counts=(0, 2)), "cannot be one"),
    "a text without end": (gguf_bytes([struct.pack("<Q", HUGE)], []), "ends at byte"),
    "an array without end": (
        gguf_bytes([setting("a", ARRAY, struct.pack("<IQ", U64, HUGE))], []), "ends at byte",
    ),
    "texts without end": (
        gguf_bytes([setting("a", ARRAY, struct.pack("<IQ", STRING, HUGE))], []), "announces 4611686018427387904 texts",
    ),
    "an array of arrays": (
        gguf_bytes([setting("a", ARRAY, struct.pack("<IQ", ARRAY, 1))], []), "array of type 9",
    ),
    "an unknown kind of setting": (gguf_bytes([setting("a", 77, b"")], []), "unknown type 77"),
    "a setting twice": (gguf_bytes([NAME, NAME], []), "twice"),
    "a name of control characters": (gguf_bytes([setting("a\x1b[2J", U8, b"\0")], []), "cannot be one"),
    "a text that is no text": (gguf_bytes([setting("a", STRING, struct.pack("<Q", 2) + b"\xff\xfe")], []), "not UTF-8"),
    "no alignment": (gguf_bytes([setting("general.alignment", U32, struct.pack("<I", 0))], []), "general.alignment"),
    "an odd alignment": (gguf_bytes([setting("general.alignment", U32, struct.pack("<I", 24))], []), "as 24"),
    "an alignment that is a text": (gguf_bytes([setting("general.alignment", STRING, text("8"))], []), "alignment"),
    "a tensor twice": (gguf_bytes([NAME], [MATRIX, MATRIX], DATA), "tensor 'w' twice"),
    "no dimensions": (gguf_bytes([NAME], [tensor("w", [], 0, 0)], DATA), "0 dimensions"),
    "five dimensions": (gguf_bytes([NAME], [tensor("w", [1] * 5, 0, 0)], DATA), "5 dimensions"),
    "a length of nothing": (gguf_bytes([NAME], [tensor("w", [8, 0], 0, 0)], DATA), "the shape [0, 8]"),
    "more than all memory": (gguf_bytes([NAME], [tensor("w", [HUGE, HUGE], 0, 0)], DATA), "the shape"),
    "an unknown type": (gguf_bytes([NAME], [tensor("w", [8, 2], 4, 0)], DATA), "the type 4"),
    "part of a block": (gguf_bytes([NAME], [tensor("w", [40, 2], 8, 0)], DATA), "Q8_0 the shape [2, 40]"),
    "beyond the end": (gguf_bytes([NAME], [tensor("w", [8, 2], 0, 96)], DATA), "truncated: tensor 'w'"),
    "far beyond the end": (gguf_bytes([NAME], [tensor("w", [8, 2], 0, 2**63)], DATA), "truncated"),
    "between two places": (gguf_bytes([NAME], [tensor("w", [8, 2], 0, 4)], DATA), "no multiple of 32"),
    "over another": (gguf_bytes([NAME], [MATRIX, tensor("v", [4], 0, 32)], DATA), "over 'w'"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_two_lines(tmp_path: Path, name: str) -> None:
    data, cause = HOSTILE[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with pytest.raises(StartupError) as caught:
        read_header(path)
    assert cause in caught.value.cause and str(path) in caught.value.cause
    assert len(caught.value.cause) < 400 and "\n" not in str(caught.value) and caught.value.fix


@pytest.mark.slow
def test_damage_anywhere_is_a_clear_error_or_harmless(tmp_path: Path) -> None:
    """Files cut short, and with bytes changed: no other exception, and no memory beyond the file's size."""
    path = tmp_path / "model.gguf"
    draw = random.Random(1)
    tracemalloc.start()
    for number in range(3000):
        data = bytearray(GOOD)
        if number % 3 == 0:
            del data[draw.randrange(len(data)) :]
        for _ in range(number % 4):
            if data:
                data[draw.randrange(len(data))] = draw.choice((0, 1, 9, 0x7F, 0x80, 0xFF))
        path.write_bytes(data)
        try:
            read_header(path)
        except StartupError as error:
            assert error.cause.startswith(str(path))
    assert tracemalloc.get_traced_memory()[1] < 20 << 20
    tracemalloc.stop()


def test_missing_parts_and_wrong_architectures_are_named(tmp_path: Path) -> None:
    part = tmp_path / "big-00002-of-00003.gguf"
    part.write_bytes(GOOD)
    with pytest.raises(StartupError, match=r"big-00001-of-00003.gguf and 1 more is missing"):
        GGUFModel.open(part)
    path = tmp_path / "model.gguf"
    path.write_bytes(GOOD)
    with pytest.raises(StartupError, match=r"no setting 'llama.attention.head_count'"):
        hf_config(GGUFModel.open(path))
    path.write_bytes(gguf_bytes([setting("general.architecture", STRING, text("rwkv7"))], []))
    with pytest.raises(StartupError, match=r"architecture 'rwkv7' is not supported\. `oarlock models --supported`"):
        hf_config(GGUFModel.open(path))


@pytest.mark.parametrize("value", [1e-5, 1e-6, 10000.0, 5e5, 0.1, 1.1902380714238083, 8.0, 1e300, 0.0])
def test_a_number_of_32_bits_round_trips(value: float) -> None:
    try:
        stored = struct.unpack("<f", struct.pack("<f", value))[0]
    except OverflowError:
        stored = value
    assert shortest(stored) == pytest.approx(value, rel=2**-24)
    if len(repr(value)) < 8:
        assert shortest(stored) == value
