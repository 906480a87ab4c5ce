"""The tensors of a checkpoint: name -> file and entry, from the headers of its safetensors files.

Torch-free, so that a broken checkpoint is refused before a rank starts. Reads no tensor data.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from oarlock.workers.errors import StartupError
from oarlock.workers.weights.checkpoint_files import is_there, read_json
from oarlock.workers.weights.header import TensorEntry, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
# Two layouts of the same numbers: a checkpoint may hold the fused tensor (left) in place of its parts.
FUSED_TENSORS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
_LONGEST_NAME = 255  # bytes of a file's name, on all usual file systems


@dataclass(frozen=True, slots=True)
class Located:
    """A tensor and the file it is in."""

    path: Path
    entry: TensorEntry


class Checkpoint:
    """The tensors of one model directory. Files are found as transformers finds them: one file first, then an index."""

    def __init__(self, directory: Path, tensors: dict[str, Located]) -> None:
        self.directory = directory
        self.tensors = tensors

    @staticmethod
    def open(directory: Path) -> "Checkpoint":
        """Read and check every header. Raises `StartupError` naming the file, and the tensor where one is at fault."""
        single = directory / SINGLE_FILE
        if is_there(single):
            return Checkpoint(directory, {name: Located(single, e) for name, e in read_header(single).items()})
        if is_there(directory / INDEX_FILE):
            return Checkpoint(directory, _open_sharded(directory))
        raise _no_weights(str(directory), {entry.name for entry in directory.iterdir()})

    def find(self, name: str) -> Located | None:
        return self.tensors.get(name)


def weight_files(directory: Path, names: Collection[str], model: str) -> list[str]:
    """Files of `model`, among `names`, that `Checkpoint.open` reads. `directory` needs no file but the index."""
    if SINGLE_FILE in names:
        return [SINGLE_FILE]
    if INDEX_FILE in names:
        return sorted(set(_read_index(directory / INDEX_FILE).values()))
    raise _no_weights(model, names)


def _open_sharded(directory: Path) -> dict[str, Located]:
    weight_map = _read_index(directory / INDEX_FILE)
    headers = {}
    for file_name in sorted(set(weight_map.values())):
        path = directory / file_name
        if not is_there(path):
            tensor = next(name for name, file in weight_map.items() if file == file_name)
            raise StartupError(
                f"{path} is missing; {INDEX_FILE} says it holds tensor {tensor!r}.",
                "Download the missing shard, or the whole model again.",
            )
        headers[file_name] = read_header(path)
    tensors: dict[str, Located] = {}
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
            tensors[name] = Located(directory / file_name, entry)
    for name, file_name in weight_map.items():
        if name not in tensors:
            raise StartupError(
                f"{directory / file_name} does not hold tensor {name!r}, though {INDEX_FILE} says so.",
                "Download the shard again; index and files do not belong together.",
            )
    return tensors


def _read_index(path: Path) -> dict[str, str]:
    fix, index = "Download the index again.", read_json(path)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise StartupError(f"{path} has no weight_map.", fix)
    for name, file_name in weight_map.items():
        # A checkpoint is untrusted content: it may name files beside itself and nothing else.
        if (
            not isinstance(file_name, str)
            or not file_name.isprintable()
            or len(file_name.encode()) > _LONGEST_NAME
            or Path(file_name).name != file_name
            or not file_name.endswith(".safetensors")
        ):
            raise StartupError(
                f"{path} places tensor {name[:200]!r} in {repr(file_name)[:200]}.", "Shards must lie beside the index."
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
            f"{where} holds GGUF weights and no others.",
            "Name one of its GGUF files on this machine: a file is served with the description that it holds.",
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
