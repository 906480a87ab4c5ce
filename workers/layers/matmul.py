"""Products with a constant weight, once it is loaded: plain, or packed once for a kernel of the CPU's.

This is the seam for other weight forms (quantised, hand-written kernels): a layer asks `matmul` or `gated_matmul` for
something to call and does not know which it got. Nothing here knows about ranks.

Why packed: an ordinary `F.linear` with few rows lays the weight out anew at every call. A packed one reads it in the
kernel's own order, and its rows do not depend on how many others share the call: our own kernel's never, oneDNN's as
long as there are at least two. Whether it takes two is found out for each size (`row_invariance.py`).
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from workers.kernels.cpu.avx512_gemm import Avx512GatedMatmul, Avx512Matmul, can_serve
from workers.layers.row_invariance import PairedRows, needs_second_row

_log = logging.getLogger(__name__)

# oneDNN adds up float32 products one after the other along the whole row, which costs up to twice the rounding error
# of a blocked sum. Cutting the row into pieces and adding their sums brings it back. (bfloat16 sums are kept in
# float32 anyway, far below the rounding of the result.)
FLOAT32_BLOCK = 256
_ROWS_HINT = 32  # for the layout that is chosen while packing; any number of rows computes the same


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation function in torch, and by oneDNN's names for a product that applies it before rounding."""

    function: Callable[[Tensor], Tensor]
    attribute: str  # of oneDNN's post-op
    algorithm: str = ""


# by the names that `DecoderSpec.activation` uses
ACTIVATIONS = {
    "silu": Activation(F.silu, "swish"),
    "gelu_tanh": Activation(partial(F.gelu, approximate="tanh"), "gelu", "tanh"),
}


class Matmul(Protocol):
    """`x @ weight.T + bias (+ plus)`."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor: ...


class GatedMatmul(Protocol):
    """`activation(x @ gate.T) * (x @ up.T)`."""

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainMatmul:
    """`F.linear`: every device and dtype, and the judge of the packed form."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight  # [N, K]
        self.bias = bias  # [N]

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if residual is None else y.add_(residual)


class PackedMatmul:
    """oneDNN's own layout, made once. The weight it was made from is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, whole: bool = False) -> None:
        """`whole`: one block whatever the dtype, so that an epilogue sees the complete sum."""
        columns = weight.shape[1]
        block = FLOAT32_BLOCK if weight.dtype == torch.float32 and not whole else columns
        self.bias = bias
        self.starts = list(range(0, columns, block))
        self.ends = [min(start + block, columns) for start in self.starts]
        self.blocks = [_pack(weight[:, start:end]) for start, end in zip(self.starts, self.ends, strict=True)]

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        pointwise = torch.ops.mkldnn._linear_pointwise
        if len(self.blocks) == 1:
            if residual is None:
                return pointwise(x, self.blocks[0], self.bias, "none", [], "")
            return pointwise.binary(x, residual, self.blocks[0], self.bias, "add")
        y = pointwise(x[:, : self.ends[0]], self.blocks[0], self.bias, "none", [], "")
        for start, end, packed in zip(self.starts[1:], self.ends[1:], self.blocks[1:], strict=True):
            y = pointwise.binary(x[:, start:end], y, packed, None, "add")
        return y if residual is None else y.add_(residual)


class PlainGatedMatmul:
    """Gate and up stay stacked: one product, then the activation."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        self.width = weight.shape[0] // 2
        self.both = PlainMatmul(weight, bias)
        self.activation = ACTIVATIONS[activation].function

    def __call__(self, x: Tensor) -> Tensor:
        y = self.both(x)  # [T, 2 * I]
        return self.activation(y[:, : self.width]).mul_(y[:, self.width :])


class PackedGatedMatmul:
    """Two products whose epilogues do the rest: no separate activation or multiplication, and one rounding fewer each.

    Measured against one stacked product and two small operations: as fast or faster at every number of rows. An
    activation of its own would also cost the promise about company: torch computes the last few elements of an array,
    and of each thread's part of it, with another exponential.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        gate, up = weight.chunk(2)
        gate_bias, up_bias = (None, None) if bias is None else (part.clone() for part in bias.chunk(2))
        self.gate = PackedMatmul(gate, gate_bias, whole=True)
        self.up = PackedMatmul(up, up_bias)
        self.activation = ACTIVATIONS[activation]

    def __call__(self, x: Tensor) -> Tensor:
        pointwise, act = torch.ops.mkldnn._linear_pointwise, self.activation
        gate = pointwise(x, self.gate.blocks[0], self.gate.bias, act.attribute, [], act.algorithm)
        if len(self.up.blocks) > 1:
            return gate.mul_(self.up(x))
        return pointwise.binary(x, gate, self.up.blocks[0], self.up.bias, "mul")


def matmul(weight: Tensor, bias: Tensor | None = None, *, float32_output: bool = False) -> Matmul:
    """The best product for this weight; the caller should let go of `weight`.

    `float32_output`: float32 results where sums are float32 anyway, for a caller who would widen them.
    """
    if can_serve(weight):
        return Avx512Matmul(weight, bias, float32_output=float32_output)
    kind = PackedMatmul if can_pack(weight.dtype, weight.device.type) else PlainMatmul
    product = kind(weight, bias)
    return PairedRows(product) if _asks_for_two(product, weight, kind, bias is None, adds=True) else product


def gated_matmul(weight: Tensor, bias: Tensor | None, activation: str) -> GatedMatmul:
    """`weight` [2 * I, K]: gate above up. As `matmul`."""
    if can_serve(weight):
        return Avx512GatedMatmul(weight, bias, activation)
    kind = PackedGatedMatmul if can_pack(weight.dtype, weight.device.type) else PlainGatedMatmul
    product = kind(weight, bias, activation)
    gate = weight[: weight.shape[0] // 2]
    return PairedRows(product) if _asks_for_two(product, gate, kind, bias is None, activation) else product


def holds_weight(product: Matmul) -> bool:
    """Whether it multiplies by the very weight it was made from, without a second form of it."""
    inner = product.product if isinstance(product, PairedRows) else product
    return isinstance(inner, PlainMatmul)


def _asks_for_two(product: Callable[..., Tensor], weight: Tensor, *kind: object, adds: bool = False) -> bool:
    """Elsewhere than on the CPU nothing is promised about a row's bits."""
    return weight.device.type == "cpu" and needs_second_row(product, weight, *kind, adds=adds)


@cache
def can_pack(dtype: torch.dtype, device: str) -> bool:
    """Whether this torch, on this processor, packs weights of `dtype`; found out by doing it once."""
    if device != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    try:
        weight = torch.ones((16, 16), dtype=dtype)
        PackedMatmul(weight, None)(weight, weight)
    except (RuntimeError, AttributeError) as reason:
        _log.info("weights stay unpacked dtype=%s reason=%s", dtype, str(reason).splitlines()[0])
        return False
    return True


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
