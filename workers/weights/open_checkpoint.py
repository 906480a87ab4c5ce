"""The checkpoint that lies in a directory, in whichever format: safetensors files, or a GGUF model. Torch-free."""

from pathlib import Path

from oarlock.workers.weights.checkpoint import Checkpoint
from oarlock.workers.weights.gguf.checkpoint import GGUFCheckpoint, gguf_file
from oarlock.workers.weights.gguf.model import GGUFModel


def open_checkpoint(directory: Path) -> Checkpoint:
    """Read and check every header. Raises `StartupError` naming the file, and the tensor where one is at fault."""
    path = gguf_file(directory)
    if path is not None and not any(directory.glob("*.safetensors*")):
        return GGUFCheckpoint.of(directory, GGUFModel.open(path))
    return Checkpoint.open(directory)
