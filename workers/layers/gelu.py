"""gelu (Hendrycks and Gimpel, 2016) of rows, in float32 and rounded once: by our kernel, else by torch, whose last bits
may depend on where in memory a number stands."""

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.kernels.cpu import elementwise

TANH_FORM = "gelu_tanh"  # else: by the error function


def gelu(x: Tensor, activation: str, dtype: torch.dtype, *, gated: bool = False) -> Tensor:
    """`x` [T, I] of `dtype` or float32 -> `dtype` [T, I]; with `gated` [T, 2 * I], where the first half of a row is the
    gate of the second."""
    if elementwise.can_serve(dtype, x.device):
        return elementwise.gelu(x, dtype, gated=gated, tanh_form=activation == TANH_FORM)
    return gelu_with_torch(x, activation, dtype, gated=gated)


def gelu_with_torch(x: Tensor, activation: str, dtype: torch.dtype, *, gated: bool = False) -> Tensor:
    """`gelu` with torch's operations, for every device; tests compare the kernel with it."""
    gate, up = x.float().chunk(2, 1) if gated else (x.float(), None)
    y = F.gelu(gate, approximate="tanh" if activation == TANH_FORM else "none")
    return (y if up is None else y * up).to(dtype)
