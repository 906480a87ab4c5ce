"""Matmuls with a constant weight, either plain or packed once for a CPU kernel.

Layers call `matmul` or `gated_matmul` after loading and use the returned objects; other formats of weights (quantised
formats, other kernels) are added here. Nothing here knows about ranks.

Reason for packing: `F.linear` with few rows rearranges the weight at every call, whereas a packed weight is stored in
the kernel's own order. Batch invariance: the bits of a row do not depend on the other rows, with our kernel for any
number of rows and with oneDNN from two rows on. For a single row this is measured for each size (`needs_second_row`).
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.distributed.all_reduce import tree_sum
from oarlock.workers.kernels.cpu.gemm import CppGatedMatmul, CppMatmul, CppPackedMatmul, can_serve
from oarlock.workers.kernels.triton import availability

_ROWS = 8
_LARGEST = 8  # largest exponent of the powers of two that scale the inputs

_measured: dict[tuple[Any, ...], bool] = {}


class PairedRows:
    """A matmul that is never called with a single row: a single row is passed twice.

    Libraries use other kernels for a single row, and some of these add in another order, so that the row's bits differ
    from its bits in a batch. Pairs are used only if needed: they take up to twice the time if arithmetic is slower than
    reading the weight.
    """

    def __init__(self, multiply: Callable[..., Tensor]) -> None:
        self.multiply = multiply

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rest = () if residual is None else (residual,)
        if x.shape[0] != 1:
            return self.multiply(x, *rest)
        return self.multiply(*(part.expand(2, -1).contiguous() for part in (x, *rest)))[:1]


def needs_second_row(multiply: Callable[..., Tensor], weight: Tensor, *kind: Any, adds: bool = False) -> bool:
    """Return whether `multiply` gives one row other bits than in a batch, and two rows the same bits as in a batch.

    `weight` [N, K] is the matmul's weight (the gate's for a gated matmul). The result is measured once for each size,
    dtype, number of threads and `kind`, which names all other conditions that select the kernel. `adds`: the matmul is
    also called with a residual.
    """
    key = (*kind, weight.dtype, tuple(weight.shape), torch.get_num_threads(), adds)
    if key not in _measured:
        x = _revealing_inputs(weight)
        sums: list[Tensor | None] = [None]
        if adds:
            sums.append(torch.ones((_ROWS, weight.shape[0]), dtype=weight.dtype))
        _measured[key] = any(
            _differs(multiply, x, residual, 1) and not _differs(multiply, x, residual, 2) for residual in sums
        )
    return _measured[key]


def _differs(multiply: Callable[..., Tensor], x: Tensor, residual: Tensor | None, rows: int) -> bool:
    def result(part: slice) -> Tensor:
        return multiply(x[part]) if residual is None else multiply(x[part], residual[part])

    whole = result(slice(None))
    cuts = [slice(start, start + rows) for start in range(0, _ROWS, rows)]
    return any(not torch.equal(result(cut), whole[cut]) for cut in cuts)


def _revealing_inputs(weight: Tensor) -> Tensor:
    """Return inputs [_ROWS, K] whose results reveal the order of additions, even if rounded to 16 bits.

    In each row the terms of one output cancel in pairs, so that only rounding errors remain.
    """
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


_log = logging.getLogger(__name__)

# Elements per partial sum in float32. oneDNN adds the products of a whole row one after the other, with up to twice the
# rounding error of a sum in blocks. (bfloat16 products are summed in float32, far more exact than the rounded result.)
FLOAT32_BLOCK = 256
_ROWS_HINT = 32  # rows; affects only the layout of the packed weight, not the results


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation function in torch, and oneDNN's names of it for a matmul that applies it before rounding."""

    function: Callable[[Tensor], Tensor]
    attribute: str  # attribute of oneDNN's post-op
    algorithm: str = ""


# Activations of a gate. Keys are the names that `GatedMLPSpec.activation` uses.
ACTIVATIONS = {
    "silu": Activation(F.silu, "swish"),
    "gelu_tanh": Activation(partial(F.gelu, approximate="tanh"), "gelu", "tanh"),
}
# Activations of an MLP without a gate. Keys are the names that `MLPSpec.activation` uses.
PLAIN_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": ACTIVATIONS["gelu_tanh"].function,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


class Matmul(Protocol):
    """`x @ weight.T + bias (+ residual)`: x [T, K], weight [N, K], residual [T, N] -> [T, N]."""

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor: ...


@runtime_checkable
class ReadableMatmul(Matmul, Protocol):
    """A matmul whose weight can be read row by row in its stored format."""

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows `ids`, int64 [T], of the weight: [T, K]."""


class GatedMatmul(Protocol):
    """`activation(x @ gate.T) * (x @ up.T)`: x [T, K], gate and up [I, K] -> [T, I]."""

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainMatmul:
    """`F.linear`, for every device and dtype; tests compare the packed matmuls with it."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight  # [N, K]
        self.bias = bias  # [N]

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if residual is None else y.add_(residual)


class Float32Matmul:
    """A matmul of 16-bit inputs on a device, without a bias, that returns its float32 sums unrounded."""

    def __init__(self, weight: Tensor, multiply: Callable[..., Tensor] = torch.mm) -> None:
        """Use `multiply(x, y, out_dtype=)`: `torch.mm`, which has this argument only on CUDA."""
        self.weight, self._multiply = weight, multiply  # [N, K]

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = self._multiply(x, self.weight.t(), out_dtype=torch.float32)
        return y if residual is None else y.add_(residual)


class PackedMatmul:
    """A matmul with a weight in oneDNN's own layout. The plain weight is not kept."""

    def __init__(self, weight: Tensor, bias: Tensor | None, *, whole: bool = False) -> None:
        """Pack the weight. `whole`: in one block for every dtype, so that a fused activation gets the complete sum."""
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


class SlicedMatmul:
    """A matmul with its inputs cut into slices, whose results are added as in `tree_sum`, in float32."""

    def __init__(
        self, slices: Sequence[Matmul], bias: Tensor | None, dtype: torch.dtype, *, float32_output: bool = False
    ) -> None:
        """Combine `slices`, a matmul without bias for each slice of the weight. `dtype` is the type of `bias` [N] and
        results."""
        self.slices = slices
        self.bias = bias
        self.dtype = torch.float32 if float32_output else dtype

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        inputs = x.chunk(len(self.slices), 1)
        y = tree_sum([multiply(part).float() for multiply, part in zip(self.slices, inputs, strict=True)])
        for addend in (self.bias, residual):
            if addend is not None:
                y = y + addend.float()
        return y.to(self.dtype)


class ActivatedMatmul:
    """`activation(x @ weight.T + bias)`: [T, K] -> [T, N], rounded once if the matmul returns float32."""

    def __init__(self, multiply: Matmul, activation: str) -> None:
        self.multiply = multiply
        self.activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return activated_rows(self.multiply(x), self.activation, x.dtype)


class ReferenceMatmul(ABC):
    """`x @ weight.T + bias (+ residual)` of a quantised weight with torch's operations: [T, K] -> [T, N]."""

    def __init__(self, dtype: torch.dtype, bias: Tensor | None, *, float32_output: bool = False) -> None:
        """Set `dtype`, the type of x, `bias` [N] and results."""
        self.dtype = torch.float32 if float32_output else dtype
        self.bias = bias

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.sums(x, residual).to(self.dtype)

    def sums(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the result before rounding: float32 [T, N]."""
        y = tree_sum(self.slice_sums(x))
        for addend in (self.bias, residual):
            if addend is not None:
                y = y + addend.float()
        return y

    @abstractmethod
    def slice_sums(self, x: Tensor) -> list[Tensor]:
        """Return the sum of each slice of inputs: float32 [T, N]."""


class ReferenceGatedMatmul:
    """`activation(x @ gate.T) * (x @ up.T)` with torch's operations: [T, K] -> [T, I]."""

    def __init__(self, both: ReferenceMatmul, activation: str) -> None:
        """Use `both`, the matmul of a weight [2 * I, K] with gate above up."""
        self.both = both
        self.activation = ACTIVATIONS[activation].function

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.both.sums(x).chunk(2, 1)
        return (self.activation(gate) * up).to(self.both.dtype)


def gated(activation: str, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return `activation(gate) * up` as a function [T, 2 * I], gate before up -> [T, I]: a Triton kernel if it can
    run."""
    if availability.can_serve(device):
        from oarlock.workers.kernels.triton.elementwise import gated as one_kernel

        return partial(one_kernel, activation=activation)
    return partial(gated_with_torch, activation=activation)


def gated_with_torch(y: Tensor, activation: str) -> Tensor:
    """Compute `gated` with torch's operations, which round twice; tests compare the kernel with it."""
    gate, up = y.chunk(2, -1)
    return ACTIVATIONS[activation].function(gate).mul_(up)


class PlainGatedMatmul:
    """One matmul with gate and up stacked, then the activation."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        self.both = PlainMatmul(weight, bias)
        self.gated = gated(activation, weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        return self.gated(self.both(x))


class PackedGatedMatmul:
    """Two matmuls with fused activation and multiplication (oneDNN post-ops), which also round less often.

    They are at least as fast as one stacked matmul and two small operations at every number of rows. A separate
    activation would not be batch-invariant: torch computes the last few elements of an array, and of each thread's
    part, with another exponential function.
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


def matmul(weight: Tensor, bias: Tensor | None = None, *, float32_output: bool = False, slices: int = 1) -> Matmul:
    """Return the fastest matmul for `weight` [N, K] and `bias` [N]; the caller should not keep `weight`.

    `float32_output`: results stay float32 if the kernel sums in float32 and would round them. `slices`: see
    `LinearWeight.matmul`.
    """
    if can_serve(weight):
        return CppMatmul(weight, bias, float32_output=float32_output, slices=slices)
    # Not cut into slices: these devices do not guarantee equal bits at other numbers of ranks.
    if weight.device.type != "cpu":
        wide = float32_output and bias is None and weight.dtype != torch.float32
        return Float32Matmul(weight) if wide else PlainMatmul(weight, bias)
    if slices > 1:
        parts = [matmul(part) for part in weight.chunk(slices, 1)]
        return SlicedMatmul(parts, bias, weight.dtype, float32_output=float32_output)
    kind = PackedMatmul if can_pack(weight.dtype, weight.device.type) else PlainMatmul
    multiply = kind(weight, bias)
    return PairedRows(multiply) if _needs_pairs(multiply, weight, kind, bias is None, adds=True) else multiply


def gated_matmul(weight: Tensor, bias: Tensor | None, activation: str) -> GatedMatmul:
    """Return the fastest gated matmul for `weight` [2 * I, K] and `bias` [2 * I], with the gate's rows before up's."""
    if can_serve(weight):
        return CppGatedMatmul(weight, bias, activation)
    kind = PackedGatedMatmul if can_pack(weight.dtype, weight.device.type) else PlainGatedMatmul
    multiply = kind(weight, bias, activation)
    gate = weight[: weight.shape[0] // 2]
    return PairedRows(multiply) if _needs_pairs(multiply, gate, kind, bias is None, activation) else multiply


def activated(multiply: Matmul, activation: str) -> Callable[[Tensor], Tensor]:
    """Return `multiply`, whose results should be float32, followed by an activation: [T, K] -> [T, N], in x's dtype."""
    if isinstance(multiply, CppMatmul | CppPackedMatmul):
        return multiply.activated(activation)
    return ActivatedMatmul(multiply, activation)


def activated_rows(y: Tensor, activation: str, dtype: torch.dtype) -> Tensor:
    """Apply an activation to `y` [T, N] of `dtype` or float32 -> `dtype` [T, N]: a Triton kernel if it can run."""
    if availability.can_serve(y.device):
        from oarlock.workers.kernels.triton.elementwise import activated as one_kernel

        return one_kernel(y, activation, dtype)
    return activated_with_torch(y, activation, dtype)


def activated_with_torch(y: Tensor, activation: str, dtype: torch.dtype) -> Tensor:
    """Compute `activated_rows` with torch's operations; tests compare the kernel with it.

    torch computes the last few elements of an array with another exponential function, whose last bits would make a row
    depend on its position and on the number of ranks. Computing in float64 and rounding to float32 hides the
    difference.
    """
    return PLAIN_ACTIVATIONS[activation](y.double()).float().to(dtype)


def holds_weight(multiply: Matmul) -> bool:
    """Return whether the matmul uses the tensor it was created from, without a packed copy."""
    inner = multiply.multiply if isinstance(multiply, PairedRows) else multiply
    return isinstance(inner, PlainMatmul | Float32Matmul)


def _needs_pairs(multiply: Callable[..., Tensor], weight: Tensor, *kind: object, adds: bool = False) -> bool:
    """Return whether a single row must be computed as two to get its bits in a batch. Only the CPU guarantees these
    bits."""
    return weight.device.type == "cpu" and needs_second_row(multiply, weight, *kind, adds=adds)


@cache
def can_pack(dtype: torch.dtype, device: str) -> bool:
    """Return whether this build of torch can pack weights of `dtype` with oneDNN here; tried once per process."""
    if device != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    try:
        weight = torch.ones((16, 16), dtype=dtype)
        PackedMatmul(weight, None)(weight, weight)
    except (RuntimeError, AttributeError) as reason:
        _log.info("event=weights_not_packed dtype=%s reason=%r", dtype, str(reason).splitlines()[0])
        return False
    return True


def _pack(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS_HINT)
