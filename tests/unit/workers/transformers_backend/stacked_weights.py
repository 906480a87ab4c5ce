"""The class's own tensors in memory, read as `ConvertedWeights` reads them from a checkpoint."""

from collections.abc import Sequence

from torch import Tensor, nn

from tests.unit.workers.weights_in_memory import MemoryWeights


class StackedWeights(MemoryWeights):
    """A `StackedSource` over a plain dict."""

    def take_expert(
        self, name: str, expert: int, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0
    ) -> None:
        entry = self.tensors[name][expert]
        assert tuple(entry.shape) == tuple(shape), f"{name}: {tuple(entry.shape)} is not {tuple(shape)}"
        into.copy_(entry.narrow(dim, start, into.shape[dim]))
        self.taken[name] = self.taken.get(name, 0) + into.numel()


def weights_of(name: str, module: nn.Module) -> StackedWeights:
    """Return the tensors of `module`, called `name`."""
    return StackedWeights({f"{name}.{key}": tensor for key, tensor in module.state_dict().items()})
