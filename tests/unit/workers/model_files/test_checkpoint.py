"""Damaged and incomplete checkpoints are refused by name before a tensor is read; whole ones are indexed."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from oarlock.base.errors import StartupError
from oarlock.workers.model_files.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, read_header


def good_file(path: Path) -> Path:
    save_file({"a": torch.arange(12.0).reshape(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}, path)
    return path


def rewrite_header(path: Path, change: Callable[[dict], object]) -> None:
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    text = json.dumps(change(header) or header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def test_a_good_header_is_read(tmp_path: Path) -> None:
    entries = read_header(good_file(tmp_path / "m.safetensors"))
    assert {name: (e.dtype, e.shape, e.end - e.begin) for name, e in entries.items()} == {
        "a": ("F32", (3, 4), 48),
        "b": ("BF16", (5,), 10),
    }


DAMAGE: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "last byte missing": (lambda raw: raw[:-1], "truncated"),
    "second half missing": (lambda raw: raw[: len(raw) // 2], "truncated|header"),
    "data missing": (lambda raw: raw[: 8 + struct.unpack("<Q", raw[:8])[0]], "truncated"),
    "empty": (lambda raw: b"", "0 bytes"),
    "three bytes": (lambda raw: raw[:3], "3 bytes"),
    "absurd header length": (lambda raw: struct.pack("<Q", 1 << 60) + raw[8:], "announces a header"),
    "header longer than the file": (lambda raw: struct.pack("<Q", len(raw)) + raw[8:], "announces a header"),
    "trailing junk": (lambda raw: raw + b"junk", "4 bytes that belong to no tensor"),
    "header not JSON": (lambda raw: raw[:8] + b"}" + raw[9:], "unreadable header"),
    "header not UTF-8": (lambda raw: raw[:8] + b"\xff\xfe" + raw[10:], "unreadable header"),
    "header a list": (lambda raw: struct.pack("<Q", 2) + b"[]", "not a table"),
    "a name twice": (lambda raw: struct.pack("<Q", 13) + b'{"a":1,"a":2}', "twice"),
    "git-lfs pointer": (lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "git-lfs"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named(tmp_path: Path, damage: str) -> None:
    path = good_file(tmp_path / "m.safetensors")
    change, message = DAMAGE[damage]
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(StartupError, match=message) as error:
        read_header(path)
    assert str(path) in error.value.cause and error.value.exit_code == 3 and error.value.fix


LIES: dict[str, tuple[dict, str]] = {
    "shape": ({"shape": [3, 5]}, "48 bytes, but F32"),
    "negative shape": ({"shape": [-3, -4]}, "shape"),
    "shape of booleans": ({"shape": [True, 12]}, "shape"),
    "shape of text": ({"shape": "3,4"}, "shape"),
    "dtype": ({"dtype": "F16"}, "48 bytes, but F16"),
    "unknown dtype": ({"dtype": "Q4_K"}, "not known"),
    "range backwards": ({"data_offsets": [48, 0]}, "byte range"),
    "range beyond the file": ({"data_offsets": [1 << 40, (1 << 40) + 48]}, "truncated"),
    "range over another": ({"data_offsets": [4, 52]}, "where"),
    "range of three": ({"data_offsets": [0, 1, 48]}, "byte range"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_wrong_header_names_file_and_tensor(tmp_path: Path, lie: str) -> None:
    path = good_file(tmp_path / "m.safetensors")
    fields, message = LIES[lie]
    rewrite_header(path, lambda header: header["a"].update(fields))
    with pytest.raises(StartupError, match=message) as error:
        read_header(path)
    assert str(path) in error.value.cause and "'a'" in error.value.cause


NAMES: list[object] = [
    None, True, 0, 1.5, 10**400, "", ".", "..", "a", "/etc/passwd", "../m.safetensors", "x/m.safetensors",
    ".safetensors", "no.safetensors", "a\0b.safetensors", "\ud800.safetensors", "x" * 5000 + ".safetensors",
    "folder.safetensors",    [], ["m.safetensors"], {}, {"m.safetensors": 1},
]  # fmt: skip


@pytest.mark.parametrize("place", ["index", "map", "file"])
def test_invalid_indexes_are_refused_by_name(tmp_path: Path, place: str) -> None:
    (tmp_path / "folder.safetensors").mkdir()
    good_file(tmp_path / "m.safetensors")
    for name in NAMES:
        index = {"index": name, "map": {"weight_map": name}, "file": {"weight_map": {"a": name, "b": "m.safetensors"}}}
        (tmp_path / INDEX_FILE).write_text(json.dumps(index[place]))
        with pytest.raises(StartupError) as error:
            Checkpoint.open(tmp_path)
        assert error.value.exit_code == 3 and len(str(error.value)) < 20_000


@settings(max_examples=150, deadline=None)
@given(data=st.data())
@pytest.mark.slow
def test_any_flipped_byte_is_refused_or_leaves_a_consistent_header(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = good_file(tmp_path_factory.mktemp("flip") / "m.safetensors")
    raw = bytearray(path.read_bytes())
    end = 8 + struct.unpack("<Q", raw[:8])[0]
    raw[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(raw)
    try:
        entries = read_header(path)
    except StartupError as error:
        assert str(path) in error.cause
    else:
        spans = sorted((entry.begin, entry.end) for entry in entries.values())
        assert [span[0] for span in spans] == [0, *(span[1] for span in spans[:-1])]


def sharded(folder: Path) -> Path:
    save_file({"a": torch.zeros(2)}, folder / "model-1.safetensors")
    save_file({"b": torch.zeros(3), "unlisted": torch.zeros(4)}, folder / "model-2.safetensors")
    weight_map = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_shards_are_found_through_the_index_and_unlisted_tensors_count(tmp_path: Path) -> None:
    tensors = Checkpoint.open(sharded(tmp_path)).tensors
    assert {name: found.path.name for name, found in tensors.items()} == {
        "a": "model-1.safetensors",
        "b": "model-2.safetensors",
        "unlisted": "model-2.safetensors",
    }


def test_a_single_file_goes_before_an_index(tmp_path: Path) -> None:
    good_file(sharded(tmp_path) / SINGLE_FILE)
    assert Checkpoint.open(tmp_path).tensors["b"].path.name == SINGLE_FILE


def set_map(folder: Path, weight_map: object) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "shard missing": (lambda f: (f / "model-2.safetensors").unlink(), "model-2.safetensors is missing.*'b'"),
    "shard truncated": (lambda f: (f / "model-2.safetensors").write_bytes(b"12345678"), "model-2.safetensors"),
    "index not JSON": (lambda f: (f / INDEX_FILE).write_text("{"), "index.json cannot be read"),
    "index without map": (lambda f: (f / INDEX_FILE).write_text("{}"), "no weight_map"),
    "index empty": (lambda f: set_map(f, {}), "no weight_map"),
    "index leaves the folder": (lambda f: set_map(f, {"a": "../x.safetensors"}), "'../x.safetensors'"),
    "index names a pickle": (lambda f: set_map(f, {"a": "model.bin"}), "'model.bin'"),
    "index names a number": (lambda f: set_map(f, {"a": 3}), "places tensor 'a' in 3"),
    "index lies": (lambda f: set_map(f, {"a": "model-2.safetensors"}), "model-2.safetensors does not hold tensor 'a'"),
}


@pytest.mark.parametrize("breakage", BROKEN)
def test_a_broken_sharded_checkpoint_is_named(tmp_path: Path, breakage: str) -> None:
    change, message = BROKEN[breakage]
    change(sharded(tmp_path))
    with pytest.raises(StartupError, match=message):
        Checkpoint.open(tmp_path)


def test_a_tensor_in_two_shards_needs_the_index_to_decide(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"a": torch.zeros(2), "unlisted": torch.ones(4)}, tmp_path / "model-1.safetensors")
    with pytest.raises(StartupError, match="'unlisted' is both in"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    ("present", "message"),
    [
        ([], "holds no weights"),
        (["pytorch_model.bin"], "only pickled weights"),
        (["model-00001-of-00002.safetensors"], "neither model.safetensors nor"),
    ],
)
@pytest.mark.slow
def test_a_folder_without_readable_weights_gives_the_reason(tmp_path: Path, present: list[str], message: str) -> None:
    for name in present:
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(StartupError, match=message):
        Checkpoint.open(tmp_path)
