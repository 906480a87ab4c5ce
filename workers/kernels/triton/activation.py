"""The activation of a gated MLP, `activation(gate) * up`, in one pass: in float32, rounded once."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
_WARPS = 4


@triton.jit
def gate_row(
    y,  # [T, 2 * WIDTH]   gate, then up
    out,  # [T, WIDTH]
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,  # the form with tanh; else SiLU
):
    """Computes some columns of one row of `out`."""
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


_gate: Any = gate_row  # a kernel's call compiles it: no annotation describes its arguments


def gated(y: Tensor, activation: str) -> Tensor:
    """`y` [T, 2 * I], gate before up -> [T, I]. `activation`: silu or gelu_tanh."""
    rows, width = y.shape[0], y.shape[1] // 2
    assert y.is_contiguous() and activation in ("silu", "gelu_tanh")
    out = torch.empty((rows, width), dtype=y.dtype, device=y.device)
    _gate[(rows, triton.cdiv(width, _BLOCK))](
        y, out, WIDTH=width, BLOCK=_BLOCK, GELU=activation == "gelu_tanh", num_warps=_WARPS
    )
    return out
