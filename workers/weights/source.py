"""The protocol by which layers load their weights: from a checkpoint or from dummy weights."""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from oarlock.workers.errors import StartupError


class WeightSource(Protocol):
    """Tensors by name, copied slice by slice."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds `name`: for layers that can read two layouts."""

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """The shape as it is stored; None: the checkpoint does not hold `name`, or any shape would do."""

    def take(self, name: str, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0) -> None:
        """Fill `into` with `name`'s slice [start, start + into.shape[dim]) along `dim`, in `into`'s dtype.

        `shape` is the whole tensor's, as the layer expects it. Raises `StartupError` naming the tensor when it is
        missing or shaped otherwise.
        """

    def finish(self, ignorable: Callable[[str], bool]) -> None:
        """Raise `StartupError` if the checkpoint has a tensor that was not taken and is not `ignorable`."""


def check_slice(name: str, into: Tensor, shape: Sequence[int], dim: int, start: int) -> None:
    """Assert that `into` can hold the slice; for mistakes in our code, with the tensor's name."""
    expected = list(shape)
    expected[dim] = into.shape[dim]
    assert list(into.shape) == expected, f"{name}: a slice of {list(shape)} along {dim} cannot fill {list(into.shape)}"
    assert start >= 0 and start + into.shape[dim] <= shape[dim], f"{name}: slice from {start} leaves {list(shape)}"


def wrong_shape(name: str, where: str, found: Sequence[int], wanted: Sequence[int]) -> StartupError:
    return StartupError(
        f"tensor {name!r} in {where} has shape {list(found)}, but config.json makes it {list(wanted)}.",
        "Use the config.json that belongs to these weights.",
    )
