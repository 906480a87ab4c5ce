"""Functions that give a model directory one fault each: in a file, a field, a tensor or a token."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

DEMO = Path(__file__).resolve().parents[4] / "models" / "oarlock-demo"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
DEEP = 100_000
DEEP_JSON = "[" * DEEP + "]" * DEEP
HUGE = 10**400
MANY = "[" + "1, " * 1_000_000 + "1]"
Fault = Callable[[Path], None]


class Case(NamedTuple):
    """A fault, and texts that the one line of cause must hold."""

    make: Fault
    named: tuple[str, ...]


def copy(folder: Path) -> Path:
    """The demo model in `folder`, its weights as a link."""
    folder.mkdir()
    for file in DEMO.iterdir():
        if file.suffix in (".json", ".jinja"):
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / WEIGHTS).symlink_to(DEMO / WEIGHTS)
    return folder


def text(name: str, content: str | bytes) -> Fault:
    """The file `name` holds `content`."""

    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    return make


def fields(name: str, **changes: Any) -> Fault:
    """The JSON object in the file `name` has these fields besides; what begins with `json:` is written as it stands."""

    def make(folder: Path) -> None:
        path = folder / name
        content = (json.loads(path.read_text()) if path.exists() else {}) | changes
        written = json.dumps(content)
        for value in changes.values():
            if isinstance(value, str) and value.startswith("json:"):
                written = written.replace(json.dumps(value), value.removeprefix("json:"))
        path.unlink(missing_ok=True)
        path.write_text(written)

    return make


def config(**changes: Any) -> Fault:
    return fields("config.json", **changes)


def rope(**changes: Any) -> Fault:
    written = json.dumps({"rope_type": "default", "rope_theta": 1e4} | changes)
    return config(rope_parameters=f"json:{written}")


def without_file(name: str, make: Callable[[Path], None]) -> Fault:
    """Something else in the place of the file `name`."""

    def replace(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        make(folder / name)

    return replace


def link(name: str, target: str) -> Fault:
    return without_file(name, lambda path: path.symlink_to(target))


def pipe(name: str) -> Fault:
    return without_file(name, os.mkfifo)


def folder(name: str) -> Fault:
    return without_file(name, Path.mkdir)


def sparse(name: str, size: int) -> Fault:
    """A file of so many zeros, which takes no room on the disk."""

    def make(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(size)

    return without_file(name, make)


def weights(header: Any, data: bytes = b"", *, length: int | None = None) -> Fault:
    """A safetensors file with this header, which announces `length` bytes of it."""
    written = header.encode() if isinstance(header, str) else json.dumps(header).encode()
    announced = len(written) if length is None else length
    return text(WEIGHTS, struct.pack("<Q", announced) + written + data)


def tensor(shape: Any, offsets: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def index(weight_map: Any) -> Fault:
    """An index in the place of the one file of weights."""

    def make(folder: Path) -> None:
        (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return make


def modules(*entries: Any, **files: str) -> Fault:
    """A checkpoint of sentence-transformers. `files`: in the folder `1_Pooling`."""

    def make(path: Path) -> None:
        (path / "modules.json").write_text(json.dumps(entries))
        (path / "1_Pooling").mkdir()
        for name, content in files.items():
            (path / "1_Pooling" / f"{name}.json").write_text(content)

    return make


TRANSFORMER = {"type": "sentence_transformers.models.Transformer", "path": ""}
POOLING = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}


def gguf(*settings: tuple[str, int, bytes], tensors: bytes = b"", num_tensors: int = 0, version: int = 3) -> Fault:
    """A GGUF file in the place of all others: settings as (name, type, bytes)."""

    def make(folder: Path) -> None:
        for file in list(folder.iterdir()):
            file.unlink()
        written = b"".join(
            struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", kind) + data
            for name, kind, data in settings
        )
        head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, len(settings))
        (folder / "model.gguf").write_bytes(head + written + tensors)

    return make


def gguf_text(content: str) -> bytes:
    return struct.pack("<Q", len(content)) + content.encode()


def added_token(**changes: Any) -> Fault:
    """The first special token of tokenizer.json is changed."""

    def make(folder: Path) -> None:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text())
        content["added_tokens"][0] |= changes
        path.write_text(json.dumps(content))

    return make


def tokenizer(**parts: Any) -> Fault:
    """Parts of tokenizer.json are others; functions get the part as it is."""

    def make(folder: Path) -> None:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text())
        content |= {name: part(content.get(name)) if callable(part) else part for name, part in parts.items()}
        path.write_text(json.dumps(content))

    return make


def only_model(kind: str, **settings: Any) -> Fault:
    """The tokenizer is a vocabulary and nothing else."""
    others = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return tokenizer(model={"type": kind, **settings}, added_tokens=[], **others)


def replacing(part: str, inner: str, count: int) -> Fault:
    """A chain of steps, each of which writes a hundred characters for one."""
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 100}
    return tokenizer(**{part: {"type": "Sequence", inner: [step] * count}})


def splitting(pattern: str) -> Fault:
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return tokenizer(pre_tokenizer=split)


def with_token(text: str, number: int = 5000) -> Callable[[Any], Any]:
    """Add a token to the vocabulary of a model."""
    return lambda model: model | {"vocab": model["vocab"] | {text: number}}


def adding(*names: str, **tokens: list[int]) -> dict[str, Any]:
    """A post-processor that puts the special tokens of these names before a text."""
    text, other = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [*({"SpecialToken": {"id": name, "type_id": 0}} for name in names), text],
        "pair": [text, other],
        "special_tokens": {name: {"id": name, "ids": ids, "tokens": [name] * len(ids)} for name, ids in tokens.items()},
    }


def token_id(value: int) -> Fault:
    """A token of tokenizer.json has this id."""

    def make(folder: Path) -> None:
        path = folder / "tokenizer.json"
        content = json.loads(path.read_text())
        vocabulary = content["model"]["vocab"]
        vocabulary[max(vocabulary, key=vocabulary.get)] = value
        path.write_text(json.dumps(content))

    return make


def vocabulary_file(name: str, content: bytes) -> Fault:
    """The vocabulary is in another file than tokenizer.json."""
    return lambda path: ((path / "tokenizer.json").unlink(), text(name, content)(path))
