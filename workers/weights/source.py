"""The protocol by which layers load their weights, and the noise that can replace a checkpoint."""

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from oarlock.base.errors import StartupError


class WeightSource(Protocol):
    """Tensors by name, copied slice by slice."""

    def has(self, name: str) -> bool:
        """Return whether the checkpoint holds `name`, for layers that can read two layouts."""

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the stored shape, or None if the checkpoint does not hold `name` or accepts any shape."""

    def take(self, name: str, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0) -> None:
        """Fill `into` with `name`'s slice [start, start + into.shape[dim]) along `dim`, in `into`'s dtype.

        `shape` is the shape of the whole tensor that the layer expects. Raise `StartupError`, naming the tensor, if it
        is missing or has another shape.
        """

    def finish(self, ignorable: Callable[[str], bool]) -> None:
        """Raise `StartupError` if the checkpoint has a tensor that was not taken and is not `ignorable`."""


class PaddedSource:
    """`WeightSource` of gated MLPs that are wider than stored and padded with zeros, for widths that ranks cannot cut
    into equal slices."""

    def __init__(self, weights: WeightSource, padded_width: int, width: int) -> None:
        """Wrap `weights`. `padded_width`: the width that layers ask for. `width`: the stored width."""
        self._weights = weights
        self._padded_width, self._width = padded_width, width

    def has(self, name: str) -> bool:
        return self._weights.has(name)

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        return self._weights.shape_of(name)

    def finish(self, ignorable: Callable[[str], bool]) -> None:
        self._weights.finish(ignorable)

    def take(self, name: str, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0) -> None:
        """See `WeightSource.take`; `shape` may be longer than the stored tensor's shape."""
        stored = self._weights.shape_of(name) or self._of_every_shape(name, shape)
        if len(stored) != len(shape) or (
            all(a >= b for a, b in zip(stored, shape, strict=True)) and start + into.shape[dim] <= stored[dim]
        ):
            return self._weights.take(name, into, shape=shape, dim=dim, start=start)
        lengths = [min(length, into.shape[dimension]) for dimension, length in enumerate(stored)]
        start = min(start, stored[dim])
        lengths[dim] = min(stored[dim] - start, into.shape[dim])
        here = into[tuple(slice(length) for length in lengths)]
        into.zero_()
        return self._weights.take(name, here, shape=stored, dim=dim, start=start)

    def take_groups(
        self, name: str, into: Any, *, shape: Sequence[int], first_row: int = 0, first_input: int = 0
    ) -> None:
        """See `GGUFReader.take_groups`."""
        rows, inputs = self._weights.shape_of(name) or shape
        into.clear()
        rows = max(0, min(rows - first_row, len(into.values)))
        inputs = max(0, min(inputs - first_input, into.values.shape[1]))
        where = {"first_row": first_row, "first_input": first_input} if rows and inputs else {}
        reader: Any = self._weights
        reader.take_groups(name, into.rows(0, rows).inputs(inputs), shape=self._weights.shape_of(name), **where)

    def _of_every_shape(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the stored shape of a tensor from a source that accepts any shape, such as dummy weights."""
        dimension = 1 if ".down_proj." in name else 0
        return tuple(self._width if at == dimension and n == self._padded_width else n for at, n in enumerate(shape))


def check_slice(name: str, into: Tensor, shape: Sequence[int], dim: int, start: int) -> None:
    """Assert that `into` can hold the slice; errors in our code then show the tensor's name."""
    expected = list(shape)
    expected[dim] = into.shape[dim]
    assert list(into.shape) == expected, f"{name}: a slice of {list(shape)} along {dim} cannot fill {list(into.shape)}"
    assert start >= 0 and start + into.shape[dim] <= shape[dim], f"{name}: slice from {start} leaves {list(shape)}"


def wrong_shape(name: str, where: str, found: Sequence[int], wanted: Sequence[int]) -> StartupError:
    return StartupError(
        f"tensor {name!r} in {where} has shape {list(found)}, but config.json implies {list(wanted)}.",
        "Use the config.json that belongs to these weights.",
    )


# Elements come from one pool of normal samples, from an offset derived from the tensor's name: much faster than drawing
# half a billion samples. The length is a prime, so that no two rows of a matrix are equal.
_POOL = 1_048_573
_STD = 0.02


class DummyWeights:
    """`WeightSource` that has every tensor.

    It returns deterministic noise, for tests and benchmarks (`--load-format dummy`). An element depends on the seed,
    its tensor's name and its index in the whole tensor, so the shards of any number of ranks are slices of the same
    model.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        noise = torch.randn(_POOL, generator=torch.Generator().manual_seed(seed)) * _STD
        self._pool = torch.cat((noise, noise))  # twice, so that reading past the end needs no second piece

    def has(self, name: str) -> bool:
        """Return False: only alternative (fused) layouts are asked for, and dummy weights have the ordinary layout."""
        return False

    def shape_of(self, name: str) -> None:
        """Return None: dummy weights have every shape."""

    def take(self, name: str, into: Tensor, *, shape: Sequence[int], dim: int = 0, start: int = 0) -> None:
        check_slice(name, into, shape, dim, start)
        if len(shape) > 2 and math.prod(shape) == shape[dim]:  # one value for each head
            into, shape, dim = into.view(-1), (shape[dim],), 0
        elif len(shape) > 2:  # the taps of a convolution
            into, shape = into.flatten(1), (shape[0], math.prod(shape[1:]))
            assert dim == 0, f"{name}: only rows of it are drawn"
        columns = shape[-1]
        if len(shape) == 1:
            into, dim = into.unsqueeze(0), 1
        assert columns <= _POOL, f"{name}: rows of {columns} elements would repeat"
        first_row, first_column = (start, 0) if dim == 0 else (0, start)
        digest = hashlib.blake2b(f"{self._seed}/{name}".encode(), digest_size=8).digest()
        origin = int.from_bytes(digest, "little") + first_row * columns + first_column
        at_once = max(1, _POOL // columns)
        for row in range(0, into.shape[0], at_once):
            part = into[row : row + at_once]
            part.copy_(self._pool.as_strided(part.shape, (columns, 1), (origin + row * columns) % _POOL))
        if name.endswith("norm.weight"):
            into.add_(1.0)  # norm weights are about one

    def finish(self, ignorable: Callable[[str], bool]) -> None:
        """Do nothing: no tensor can be left over."""
