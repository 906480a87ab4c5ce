"""A GGUF model as a checkpoint: its tensors under Hugging Face's names. Torch-free; reads no tensor."""

import os
from pathlib import Path

from oarlock.workers.errors import StartupError
from oarlock.workers.weights.checkpoint import Checkpoint, Located
from oarlock.workers.weights.gguf.block_types import FLOATS, SERVED
from oarlock.workers.weights.gguf.model import GGUFModel
from oarlock.workers.weights.gguf.names import PLAIN, ROPE_FACTORS, Layout, hf_name, layout
from oarlock.workers.weights.gguf.settings import Settings


class GGUFCheckpoint(Checkpoint):
    """`tensors` also has those that no model has a place for, under the names of the file."""

    def __init__(self, directory: Path, tensors: dict[str, Located], layouts: dict[str, Layout]) -> None:
        super().__init__(directory, tensors)
        self._layouts = layouts

    @staticmethod
    def of(directory: Path, model: GGUFModel) -> "GGUFCheckpoint":
        """`directory` is where the model's description lies."""
        settings = Settings(model)
        heads = settings.count(".attention.head_count")
        kv_heads = settings.count(".attention.head_count_kv", heads)
        head_dim = settings.count(".attention.key_length", settings.count(".embedding_length") // heads)
        tensors: dict[str, Located] = {}
        layouts: dict[str, Layout] = {}
        for name, found in model.tensors.items():
            if name in ROPE_FACTORS or name.endswith(".attn_rot_embd"):  # part of the description
                continue
            hf = hf_name(settings.architecture, name) or name
            tensors[hf] = found
            layouts[hf] = layout(settings.architecture, hf, heads, kv_heads, head_dim)
        return GGUFCheckpoint(directory, tensors, layouts)

    @property
    def has_blocks(self) -> bool:
        """Whether a matrix is stored in another form than floating point."""
        return any(found.entry.dtype not in FLOATS for found in self.tensors.values())

    def layout(self, name: str) -> Layout:
        return self._layouts.get(name, PLAIN)


def gguf_file(directory: Path) -> Path | None:
    """The first file of the GGUF model that the description in `directory` is of; None if there is none."""
    links = sorted(directory.glob("*.gguf"))
    if not links:
        return None
    # Only one step: the parts of a model are found by their names beside each other.
    return Path(os.readlink(links[0])) if links[0].is_symlink() else links[0]


def type_not_served(name: str, found: Located) -> StartupError:
    return StartupError(
        f"{found.path}: tensor {name!r} is {found.entry.dtype}, which is not supported.",
        f"Use a file whose tensors are among {', '.join(SERVED)}: most models have one named Q4_K_M or Q8_0.",
    )
