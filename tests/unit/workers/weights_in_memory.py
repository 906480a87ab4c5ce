"""A `WeightSource` over a plain dict, and a rank whose sums are recorded instead of sent: layers without files or
processes."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.placement import Placement
from oarlock.workers.weights.source import check_slice


class MemoryWeights:
    """Hands out slices of the tensors it was given, and remembers which parts of them."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.taken: dict[str, int] = {}  # name -> elements handed out

    def has(self, name: str) -> bool:
        return name in self.tensors

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return tuple(self.tensors[name].shape) if name in self.tensors else None

    def take(self, name: str, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0) -> None:
        whole = self.tensors[name]
        assert list(whole.shape) == list(shape), f"{name}: {list(whole.shape)} is not {list(shape)}"
        check_slice(name, into, shape, dim, start)
        into.copy_(whole.narrow(dim, start, into.shape[dim]))
        self.taken[name] = self.taken.get(name, 0) + into.numel()

    def finish(self, ignorable: Callable[[str], bool]) -> None:
        left = [name for name in self.tensors if name not in self.taken and not ignorable(name)]
        assert not left, left


class RecordingRank(TensorParallel):
    """A rank of `size` that stands alone: what it would have added to the sum is kept in `sent`."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self.sent: list[Tensor] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        self.sent.append(x.clone())
        return x


def placement(rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32) -> Placement:
    tp = TensorParallel.solo() if size == 1 else RecordingRank(rank, size)
    return Placement(tp, dtype, torch.device("cpu"))


def random_weights(shapes: Mapping[str, Sequence[int]], seed: int = 0) -> dict[str, Tensor]:
    """Normal float32 tensors."""
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(tuple(shape), generator=generator) for name, shape in shapes.items()}
