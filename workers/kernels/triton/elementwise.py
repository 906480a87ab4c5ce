"""RMSNorm of rows (arXiv 1910.07467), with or without a residual addition before it, and the activation of an MLP.

One program reads a row once, sums it in float32 and rounds once. The order of additions does not depend on the row's
index or the number of rows. `layers/norm.py` and `quantization/matmul.py` do the same with separate torch operations.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_ELEMENTS = 512  # elements of a row for each warp


@triton.jit
def norm_values(x, weight, eps, column, inside, SIZE: tl.constexpr):
    """Apply RMSNorm to `x` float32 [BLOCK], which is zero beyond SIZE."""
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / SIZE + eps)
    return x * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def norm_row(
    x,  # [T, SIZE], rows `x_stride` elements apart
    weight,  # [SIZE]
    normed,  # [T, SIZE]
    eps,
    x_stride,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # SIZE rounded up to a power of 2
):
    """Compute the norm of one row."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < SIZE
    values = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    result = norm_values(values, weight, eps, column, inside, SIZE)
    tl.store(normed + row * SIZE + column, result.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def add_and_norm_row(
    x,  # [T, SIZE]   the rows to add
    residual,  # [T, SIZE]
    post_weight,  # [SIZE]   scale of the norm of `x` before the addition; unused without POST
    weight,  # [SIZE]
    total,  # [T, SIZE]   the sum, rounded once
    normed,  # [T, SIZE]   the norm of the rounded sum
    post_eps,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # SIZE rounded up to a power of 2
    POST: tl.constexpr,
):
    """Add one row to the residual, and compute the norm of the sum."""
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < SIZE
    element = row * SIZE + column
    values = tl.load(x + element, mask=inside, other=0.0).to(tl.float32)
    if POST:
        values = norm_values(values, post_weight, post_eps, column, inside, SIZE)
    values += tl.load(residual + element, mask=inside, other=0.0).to(tl.float32)
    rounded = values.to(total.dtype.element_ty)
    tl.store(total + element, rounded, mask=inside)
    result = norm_values(rounded.to(tl.float32), weight, eps, column, inside, SIZE)
    tl.store(normed + element, result.to(normed.dtype.element_ty), mask=inside)


# Any, because calling a kernel compiles it: no annotation describes its arguments.
_norm: Any = norm_row
_add_and_norm: Any = add_and_norm_row


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply RMSNorm to `x` [T, size]; `weight` [size] -> [T, size] in the dtype of `x`."""
    rows, size = x.shape
    assert x.stride(1) == 1 and weight.is_contiguous()
    normed = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(size)
    _norm[(rows,)](x, weight, normed, eps, x.stride(0), SIZE=size, BLOCK=block, num_warps=warps(block))
    return normed


def add_and_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, post: tuple[Tensor, float] | None = None
) -> tuple[Tensor, Tensor]:
    """Add `x` [T, size] (also float32) and `residual` [T, size]. Return the sum, and its norm, in `residual`'s dtype.

    `post`: weight [size] and epsilon of a norm of `x` before the addition.
    """
    rows, size = residual.shape
    assert x.shape == residual.shape and x.is_contiguous() and residual.is_contiguous() and weight.is_contiguous()
    total, normed = torch.empty_like(residual), torch.empty_like(residual)
    post_weight, post_eps = post or (weight, 0.0)
    block = triton.next_power_of_2(size)
    _add_and_norm[(rows,)](
        x, residual, post_weight, weight, total, normed, post_eps, eps,
        SIZE=size, BLOCK=block, POST=post is not None, num_warps=warps(block),
    )  # fmt: skip
    return total, normed


def warps(block: int) -> int:
    """Return the number of warps of a program for rows of up to `block` elements."""
    return max(1, min(16, block // _ELEMENTS))


_BLOCK = 1024
_WARPS = 4


@triton.jit
def gate_row(
    y,  # [T, 2 * WIDTH]   gate, then up
    out,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,  # tanh approximation of gelu; otherwise SiLU
):
    """Compute some columns of one row of `out`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    gate = tl.load(y + row * 2 * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(y + row * 2 * WIDTH + WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    slope = gate
    if GELU:  # (1 + tanh(z)) / 2 = sigmoid(2 z), with z = sqrt(2 / pi) (gate + 0.044715 gate^3)
        slope = 1.5957691216057308 * gate * (1.0 + 0.044715 * gate * gate)
    result = gate * tl.sigmoid(slope) * up
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gate_values(x, gate, count, BLOCK: tl.constexpr):
    """Multiply some of the `count` values at `x` by the sigmoid of those at `gate`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    value *= tl.sigmoid(tl.load(gate + at, mask=inside, other=0.0).to(tl.float32))
    tl.store(x + at, value.to(x.dtype.element_ty), mask=inside)


_gate_values: Any = gate_values


def gate_rows(x: Tensor, gate: Tensor) -> Tensor:
    """Multiply `x` [T, columns] by the sigmoid of `gate` [T, columns], both contiguous, in place. Return `x`."""
    assert x.is_contiguous() and gate.is_contiguous() and x.shape == gate.shape
    if x.numel():
        _gate_values[(triton.cdiv(x.numel(), _BLOCK),)](x, gate, x.numel(), BLOCK=_BLOCK, num_warps=_WARPS)
    return x


_gate: Any = gate_row  # Any, because calling a kernel compiles it: no annotation describes its arguments


def gated(y: Tensor, activation: str) -> Tensor:
    """Apply a gate: `y` [T, 2 * I], gate before up -> [T, I]. `activation`: silu or gelu_tanh."""
    rows, width = y.shape[0], y.shape[1] // 2
    assert y.is_contiguous() and activation in ("silu", "gelu_tanh")
    out = torch.empty((rows, width), dtype=y.dtype, device=y.device)
    _gate[(rows, triton.cdiv(width, _BLOCK))](
        y, out, WIDTH=width, BLOCK=_BLOCK, GELU=activation == "gelu_tanh", num_warps=_WARPS
    )
    return out


@triton.jit
def activate_row(
    y,  # [T, WIDTH]
    out,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Compute some columns of one row of `out`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    x = tl.load(y + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # as in `gate_row`
        result = x * tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    else:
        result = tl.where(x < 0.0, 0.0, x)  # NaN stays NaN
        if ACTIVATION == "relu2":
            result = result * result
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)


_activate: Any = activate_row  # Any, because calling a kernel compiles it: no annotation describes its arguments


def activated(y: Tensor, activation: str, dtype: torch.dtype) -> Tensor:
    """Apply an activation: `y` [T, N] of `dtype` or float32 -> `dtype` [T, N]. `activation`: gelu, gelu_tanh, relu or
    relu2."""
    rows, width = y.shape
    assert y.is_contiguous() and activation in ("gelu", "gelu_tanh", "relu", "relu2")
    out = torch.empty((rows, width), dtype=dtype, device=y.device)
    _activate[(rows, triton.cdiv(width, _BLOCK))](
        y, out, WIDTH=width, BLOCK=_BLOCK, ACTIVATION=activation, num_warps=_WARPS
    )
    return out
