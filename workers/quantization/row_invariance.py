"""Batch invariance of products with a single row: measured at load, and mended by computing the row twice.

Libraries use other kernels for a single row, and some of these add in another order, so that its bits differ from
those it has in a batch. Where they do, `PairedRows` computes a single row together with a copy of itself. Elsewhere
that would only cost time: up to twice as much, where arithmetic is slower than reading the weight.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ROWS = 8
_LARGEST = 8  # of the powers of two by which inputs are scaled

_measured: dict[tuple[Any, ...], bool] = {}


class PairedRows:
    """A product that is never called with a single row: that row is passed twice."""

    def __init__(self, product: Callable[..., Tensor]) -> None:
        self.product = product

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rest = () if residual is None else (residual,)
        if x.shape[0] != 1:
            return self.product(x, *rest)
        return self.product(*(part.expand(2, -1).contiguous() for part in (x, *rest)))[:1]


def needs_second_row(product: Callable[..., Tensor], weight: Tensor, *kind: Any, adds: bool = False) -> bool:
    """Whether `product` gives a single row other bits than in a batch, and two rows the same bits as in a batch.

    `weight` [N, K] is the product's weight (of a gated product, the gate's). Measured once for each size, dtype, number
    of threads and `kind`, which names whatever else decides the kernel. `adds`: it is also called with a residual.
    """
    key = (*kind, weight.dtype, tuple(weight.shape), torch.get_num_threads(), adds)
    if key not in _measured:
        x = _revealing_inputs(weight)
        sums: list[Tensor | None] = [None]
        if adds:
            sums.append(torch.ones((_ROWS, weight.shape[0]), dtype=weight.dtype))
        _measured[key] = any(
            _differs(product, x, residual, 1) and not _differs(product, x, residual, 2) for residual in sums
        )
    return _measured[key]


def _differs(product: Callable[..., Tensor], x: Tensor, residual: Tensor | None, rows: int) -> bool:
    def result(part: slice) -> Tensor:
        return product(x[part]) if residual is None else product(x[part], residual[part])

    whole = result(slice(None))
    cuts = [slice(start, start + rows) for start in range(0, _ROWS, rows)]
    return any(not torch.equal(result(cut), whole[cut]) for cut in cuts)


def _revealing_inputs(weight: Tensor) -> Tensor:
    """Inputs [_ROWS, K] whose results show the order of additions, even when rounded to 16 bits: in each row the terms
    of one output cancel in pairs, so that only rounding errors remain."""
    draw = torch.Generator().manual_seed(0)
    columns = weight.shape[1]
    half = columns // 2
    x = torch.zeros((_ROWS, columns), dtype=weight.dtype)
    for row in range(_ROWS):
        order = torch.randperm(columns, generator=draw)
        one, other = order[:half], order[half : 2 * half]
        scale = torch.exp2(torch.randint(0, _LARGEST + 1, (half,), generator=draw)).to(weight.dtype)
        output = weight[int(torch.randint(weight.shape[0], (), generator=draw))]
        x[row, one], x[row, other] = output[other] * scale, -output[one] * scale
    return x
