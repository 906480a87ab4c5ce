"""Whether a product gives a row by itself the bits that it has among others, found out by trying; and what if not.

Libraries take other kernels for a single row, some of which add in another order. Where they do, a row alone is
computed beside a copy of itself; where they do not, that would only cost time: twice as much, where the processor
computes slower than it reads weights.

Knows products as something to call. Does not know what they compute with.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_ROWS = 8
_LARGEST = 8  # of the powers of two by which inputs are scaled

_verdicts: dict[tuple[Any, ...], bool] = {}


class PairedRows:
    """A product that never sees fewer than two rows."""

    def __init__(self, product: Callable[..., Tensor]) -> None:
        self.product = product

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rest = () if residual is None else (residual,)
        if x.shape[0] != 1:
            return self.product(x, *rest)
        return self.product(*(part.expand(2, -1).contiguous() for part in (x, *rest)))[:1]


def needs_second_row(product: Callable[..., Tensor], weight: Tensor, *kind: Any, adds: bool = False) -> bool:
    """Whether `product` gives a row alone other bits than among others, and to two rows the same.

    `weight` [N, K] is what it multiplies by (of a gated product, the gate). Tried once for each size, dtype, number of
    threads and `kind`, which names whatever else decides the kernel. `adds`: it is called with something to add, too.
    """
    key = (*kind, weight.dtype, tuple(weight.shape), torch.get_num_threads(), adds)
    if key not in _verdicts:
        x = _revealing_inputs(weight)
        sums: list[Tensor | None] = [None]
        if adds:
            sums.append(torch.ones((_ROWS, weight.shape[0]), dtype=weight.dtype))
        _verdicts[key] = any(
            _differs(product, x, residual, 1) and not _differs(product, x, residual, 2) for residual in sums
        )
    return _verdicts[key]


def _differs(product: Callable[..., Tensor], x: Tensor, residual: Tensor | None, rows: int) -> bool:
    def result(part: slice) -> Tensor:
        return product(x[part]) if residual is None else product(x[part], residual[part])

    whole = result(slice(None))
    cuts = [slice(start, start + rows) for start in range(0, _ROWS, rows)]
    return any(not torch.equal(result(cut), whole[cut]) for cut in cuts)


def _revealing_inputs(weight: Tensor) -> Tensor:
    """[rows, K]: each row makes the sum of one output cancel, pair by pair, but for what rounding leaves; so its bits
    show the order of the additions, even where results are rounded to 16 bits afterwards."""
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
