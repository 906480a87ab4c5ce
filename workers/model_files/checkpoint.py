"""The tensors of a checkpoint by name, from the headers of its safetensors files.

The files are untrusted, and a damaged file is named before any rank starts. Torch-free. The only tensor data read is a
stored output head, to compare it with the embedding.
"""

import json
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from oarlock.base.errors import StartupError, shown
from oarlock.base.json_files import check_file, gc_paused, is_there, num_values, read_json, with_unique_names
from oarlock.workers.model_files.expert_tensors import split_experts
from oarlock.workers.model_files.located import LocatedTensor, TensorEntry
from oarlock.workers.model_files.tensor_names import NO_NAMES, TensorNames

# The format's own limit. A longer header means a damaged length field, not a big model.
MAX_HEADER_BYTES = 100_000_000
MAX_HEADER_VALUES = 2_000_000  # values of a header: 250,000 tensors, as a Python table about 300 MB
MAX_DIMENSIONS = 64  # dimensions of a tensor; torch has the same maximum
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
_FIELDS = frozenset(("dtype", "shape", "data_offsets"))
_LFS_MARK = b"version https://git-lfs"
_DOWNLOAD_AGAIN = "Download the file again; it is damaged or incomplete."


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Return name -> entry of every tensor in the file. Raise `StartupError` naming the file, and the tensor at fault.

    The byte ranges must tile the data section without hole or overlap and end at the end of the file. This detects a
    truncated file, trailing junk and a wrong shape in the header without reading a tensor.
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
    with gc_paused():
        entries = {name: _entry(path, name, fields) for name, fields in _parse(path, text).items()}
    _check_layout(path, entries, data_bytes=size - 8 - length)
    return entries


def _damaged(path: Path, what: str) -> StartupError:
    return StartupError(f"{path} {what}.", _DOWNLOAD_AGAIN)


def _parse(path: Path, data: bytes) -> dict[str, Any]:
    try:
        text = data.decode("utf-8")
        if num_values(text) > MAX_HEADER_VALUES:
            raise ValueError(f"it holds more than {MAX_HEADER_VALUES} values")
        header = json.loads(text, object_pairs_hook=with_unique_names)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"has an unreadable header ({error})") from error
    if not isinstance(header, dict):
        raise _damaged(path, "has a header that is not a table of tensors")
    header.pop("__metadata__", None)
    return header


def _entry(path: Path, name: str, fields: Any) -> TensorEntry:
    if not isinstance(fields, dict) or not fields.keys() >= _FIELDS:
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
            raise _damaged(
                path, f"places tensor {shown(name)} at byte {shown(entry.begin)} where byte {position} was expected"
            )
        position = entry.end
    if position != data_bytes:
        raise _damaged(path, f"holds {data_bytes - position} bytes that belong to no tensor")


SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_LONGEST_NAME = 255  # bytes of a file's name, on all usual file systems


class Checkpoint:
    """The tensors of one model directory. Files are found like in transformers: first a single file, then an index."""

    def __init__(
        self, directory: Path, tensors: dict[str, LocatedTensor], stored_names: Mapping[str, str] | None = None
    ) -> None:
        """`tensors`: by our names. `stored_names`: the names in the files, by our names, if some of them differ."""
        self.directory = directory
        self.tensors = tensors
        self._stored_names = stored_names or {}

    @staticmethod
    @gc_paused()
    def open(directory: Path, names: TensorNames = NO_NAMES) -> "Checkpoint":
        """Read and check every header. `names`: of the family that config.json names.

        Raise `StartupError` naming the file, and the tensor if a tensor is at fault.
        """
        single = directory / SINGLE_FILE
        if is_there(single):
            stored = {name: LocatedTensor(single, entry) for name, entry in read_header(single).items()}
        elif is_there(directory / INDEX_FILE):
            stored = _open_sharded(directory)
        else:
            raise _no_weights(str(directory), {entry.name for entry in directory.iterdir()})
        tensors: dict[str, LocatedTensor] = {}
        stored_names: dict[str, str] = {}
        for name, ours, located in names.tensors(stored):
            if ours in tensors:
                raise StartupError(
                    f"tensor {ours!r} is stored twice, the second time as {name!r} in {located.path.name}.",
                    "Use a checkpoint that holds each tensor once.",
                )
            tensors[ours] = located
            stored_names[ours] = name
        is_renamed = any(ours != name for ours, name in stored_names.items())
        if names.splits_experts:
            tensors = split_experts(tensors)
        return Checkpoint(directory, tensors, stored_names if is_renamed else None)

    def stored_module(self, module: str) -> str:
        """Return the name that the checkpoint has for one of our modules.

        A module without tensors of its own, such as an expert that is part of a larger tensor, has the name of the
        nearest module around it, and its own name inside.
        """
        inside: list[str] = []
        around = module
        while around:
            if around in self._stored_modules:
                return ".".join([self._stored_modules[around], *reversed(inside)])
            around, _, last = around.rpartition(".")
            inside.append(last)
        return module

    @cached_property
    def _stored_modules(self) -> dict[str, str]:
        """Names in the files of our modules and of the modules around them, for as long as the two names end alike."""
        found: dict[str, str] = {}
        for ours, stored in self._stored_names.items():
            mine, theirs = ours.rpartition("."), stored.rpartition(".")
            while mine[2] == theirs[2] and mine[0] and theirs[0] and mine[0] not in found:
                found[mine[0]] = theirs[0]
                mine, theirs = mine[0].rpartition("."), theirs[0].rpartition(".")
        return found

    def find(self, name: str) -> LocatedTensor | None:
        return self.tensors.get(name)


def weight_files(directory: Path, names: Collection[str], model: str) -> list[str]:
    """Return the files of `model`, among `names`, that `Checkpoint.open` reads. `directory` needs only the index."""
    if SINGLE_FILE in names:
        return [SINGLE_FILE]
    if INDEX_FILE in names:
        return sorted(set(_read_index(directory / INDEX_FILE).values()))
    raise _no_weights(model, names)


def _open_sharded(directory: Path) -> dict[str, LocatedTensor]:
    weight_map = _read_index(directory / INDEX_FILE)
    headers = {}
    for file_name in sorted(set(weight_map.values())):
        path = directory / file_name
        if not is_there(path):
            tensor = next(name for name, file in weight_map.items() if file == file_name)
            raise StartupError(
                f"{path} is missing; {INDEX_FILE} lists it as the file of tensor {tensor!r}.",
                "Download the missing shard, or the whole model again.",
            )
        headers[file_name] = read_header(path)
    tensors: dict[str, LocatedTensor] = {}
    for file_name, entries in headers.items():
        for name, entry in entries.items():
            # A tensor that the index does not list still counts: a bias must not be ignored silently.
            if weight_map.get(name, file_name) != file_name:
                continue
            if name in tensors:
                raise StartupError(
                    f"tensor {name!r} is both in {tensors[name].path.name} and in {file_name}.",
                    "Use a checkpoint whose index lists every tensor.",
                )
            tensors[name] = LocatedTensor(directory / file_name, entry)
    for name, file_name in weight_map.items():
        if name not in tensors:
            raise StartupError(
                f"{directory / file_name} does not hold tensor {name!r}, though {INDEX_FILE} lists it there.",
                "Download the shard again; index and files do not belong together.",
            )
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    fix, index = "Download the index again.", read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartupError(f"{path} has no weight_map.", fix)
    for name, file_name in weight_map.items():
        # A checkpoint is untrusted: it may only name files in its own directory.
        if (
            not isinstance(file_name, str)
            or not file_name.isprintable()
            or len(file_name.encode()) > _LONGEST_NAME
            or Path(file_name).name != file_name
            or not file_name.endswith(".safetensors")
        ):
            raise StartupError(
                f"{path} places tensor {name[:200]!r} in {repr(file_name)[:200]}.",
                "Shards must be in the same directory as the index.",
            )
    return weight_map


def _no_weights(where: str, names: Collection[str]) -> StartupError:
    present = sorted(names)
    pickles = [name for name in present if name.endswith((".bin", ".pt", ".pth"))]
    shards = [name for name in present if name.endswith(".safetensors")]
    if shards:
        return StartupError(
            f"{where} has {shards[0]} but neither {SINGLE_FILE} nor {INDEX_FILE}.",
            f"Download {INDEX_FILE} as well, or rename a single file to {SINGLE_FILE}.",
        )
    if any(name.endswith(".gguf") for name in present):
        return StartupError(
            f"{where} has only GGUF weights.",
            "Name one of its GGUF files on this machine: a GGUF file contains its own configuration.",
        )
    if pickles:
        return StartupError(
            f"{where} holds only pickled weights ({pickles[0]}), which can run code and are never read.",
            "Convert them once with transformers' save_pretrained, which writes safetensors.",
        )
    return StartupError(
        f"{where} holds no weights ({SINGLE_FILE} or {INDEX_FILE}).",
        "Download the model's safetensors files, or use --load-format dummy for random weights.",
    )


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_PIECE = 8 << 20  # bytes compared at a time


def head_differs(checkpoint: Checkpoint) -> bool:
    """Return whether both are stored and differ in dtype, shape or bytes."""
    embedding, head = checkpoint.find(EMBEDDING), checkpoint.find(HEAD)
    return embedding is not None and head is not None and tensors_differ(embedding, head)


def tensors_differ(one: LocatedTensor, other: LocatedTensor) -> bool:
    """Return whether two stored tensors differ in dtype, shape or bytes."""
    alike = (one.entry.dtype, one.entry.shape) == (other.entry.dtype, other.entry.shape)
    return not (alike and _same_bytes(one, other))


def _same_bytes(one: LocatedTensor, other: LocatedTensor) -> bool:
    with one.path.open("rb", buffering=0) as a, other.path.open("rb", buffering=0) as b:
        a.seek(8 + int.from_bytes(a.read(8), "little") + one.entry.begin)
        b.seek(8 + int.from_bytes(b.read(8), "little") + other.entry.begin)
        left = one.entry.end - one.entry.begin
        while left:
            size = min(left, _PIECE)
            if a.read(size) != b.read(size):
                return False
            left -= size
    return True
