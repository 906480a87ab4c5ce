"""The low-rank update of one linear layer, as views of stored tensors: nothing is read. Torch-free.

A tensor of an adapter often holds more than one layer needs: the rows of q, k and v for a fused projection, or the
columns of all experts. So each half of a pair names the rows and the columns of its tensor that belong to it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oarlock.base.errors import StartupError, shown
from oarlock.workers.model_files.gguf_model import Tiles
from oarlock.workers.model_files.located import LocatedTensor

OTHER_MODEL = "Use an adapter that was trained on this model."
_FLOATS = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True, slots=True)
class Lines:
    """Some rows, or some columns, of a stored matrix.

    Of each group of `step` lines there are `block`, from line `first` of the group on. GGUF files permute them: see
    `interleaved_heads`, `head_dim` and `tiles` of `GGUFTransform`.
    """

    stored: int  # lines of the stored matrix, a multiple of `step`
    step: int = 1
    first: int = 0
    block: int = 1
    interleaved_heads: int = 0
    head_dim: int = 0
    tiles: Tiles | None = None

    def __len__(self) -> int:
        return self.stored // self.step * self.block

    def every(self, step: int, first: int, block: int = 1) -> "Lines":
        """Return `block` lines, from line `first` on, of each group of `step` of these lines, which must be all."""
        assert self.step == 1 and self.stored % step == 0 and first + block <= step
        return replace(self, step=step, first=first, block=block)

    def numbers(self) -> Sequence[int]:
        """Return the number in the file of each line, in the order of the model."""
        if self.tiles is None and not self.interleaved_heads:
            if self.block == self.step:
                return range(self.stored)
            if self.block == 1 or self.step == self.stored:
                stop = self.stored if self.block == 1 else self.first + self.block
                return range(self.first, stop, self.step if self.block == 1 else 1)
        chosen = (group + self.first + line for group in range(0, self.stored, self.step) for line in range(self.block))
        return [self._in_file(line) for line in chosen]

    def _in_file(self, line: int) -> int:
        if self.tiles is not None:
            return self.tiles.stored(line)[0]
        head, inside = divmod(line, self.head_dim or 1)
        if head >= self.interleaved_heads:
            return line
        half, pair = divmod(inside, self.head_dim // 2)
        return head * self.head_dim + 2 * pair + half


@dataclass(frozen=True, slots=True)
class AdapterMatrix:
    """Half of a pair: rows and columns of a stored matrix, transposed afterwards if `transposed`."""

    name: str  # name in the file, for messages
    located: LocatedTensor  # two dimensions, as stored
    rows: Lines
    columns: Lines
    transposed: bool = False

    @staticmethod
    def whole(name: str, located: LocatedTensor) -> "AdapterMatrix":
        """Return all of a stored matrix."""
        rows, columns = located.entry.shape
        return AdapterMatrix(name, located, Lines(rows), Lines(columns))

    def with_rows(self, rows: Lines) -> "AdapterMatrix":
        """Return the same half with other rows of the stored matrix."""
        return replace(self, rows=rows)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the half itself, not of the stored matrix."""
        found = len(self.rows), len(self.columns)
        return (found[1], found[0]) if self.transposed else found


@dataclass(frozen=True, slots=True)
class AdapterPair:
    """The update of a linear layer, the embedding or the head: `y += scale * B (A x)`.

    The layer is always a module of the model's own, never a fused module: an adapter of `qkv_proj` is three pairs with
    the same A. In a pair of the embedding, x is the one-hot vector of a token, so that A has a column for each token;
    such a pair does not change the head, even if both have the same matrix. Biases are never adapted.
    """

    module: str  # our name, such as `model.layers.0.self_attn.q_proj` or `model.layers.1.mlp.experts.3.down_proj`
    rank: int
    scale: float
    a: AdapterMatrix  # [rank, inputs]
    b: AdapterMatrix  # [outputs, rank]
    expert: int | None = None  # index of the routed expert that the module belongs to


@dataclass(frozen=True, slots=True)
class StoredPair:
    """Both halves of a pair, as they are stored."""

    a: AdapterMatrix
    b: AdapterMatrix
    is_table: bool = False  # they are named as the halves of an embedding


def half_of(path: Path, name: str, located: LocatedTensor) -> AdapterMatrix:
    """Return a whole tensor as half of a pair. Raise `StartupError` unless it is a matrix in floating point."""
    entry = located.entry
    if entry.dtype not in _FLOATS or len(entry.shape) != 2 or 0 in entry.shape:
        raise StartupError(
            f"{path}: tensor {shown(name)} is {entry.dtype} of shape {shown(list(entry.shape))}, and must be a matrix "
            f"in {', '.join(_FLOATS[:-1])} or {_FLOATS[-1]}.",
            "Save or convert the adapter again in 16 or 32 bits.",
        )
    return AdapterMatrix.whole(name, located)


def check_shape(path: Path, half: AdapterMatrix, wanted: tuple[int, int], implied: str) -> None:
    """Raise `StartupError` if a half has another shape than `wanted`. `implied`: the sources of the right shape."""
    if half.shape != wanted:
        raise StartupError(
            f"{path}: tensor {shown(half.name)} has shape {list(half.shape)}, but {implied} imply {list(wanted)}.",
            f"{OTHER_MODEL[:-1]}, with the settings that belong to it.",
        )


def add_pairs(path: Path, pairs: dict[str, AdapterPair], more: Iterable[AdapterPair]) -> None:
    """Add pairs to `pairs`, by their modules. Raise `StartupError` if a module has a pair already."""
    for pair in more:
        if pair.module in pairs:
            raise StartupError(
                f"{path}: tensor {shown(pair.a.name)} adapts {pair.module}, which {shown(pairs[pair.module].a.name)} "
                "adapts already.",
                "Use an adapter that adapts each module once.",
            )
        pairs[pair.module] = pair
