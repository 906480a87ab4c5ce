"""Matmuls of many rows with float8 weights, on devices whose tensor cores multiply float8.

Rows of x are rounded to float8 with one scale each, as intended by checkpoints with dynamic activations. torch
multiplies and applies the scales of rows and outputs to float32 sums (`torch.nn.functional.scaled_mm`, both scales by
row).
"""

import logging
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

_log = logging.getLogger(__name__)

LARGEST = 448.0  # largest value of e4m3
_SMALLEST = 1e-30  # a row without a larger value is all zeros: its scale has no inverse
_LEAST_CAPABILITY = (8, 9)
_ALIGNED = 16  # the numbers of inputs and of outputs must be multiples of it
_BLOCK = 2048  # inputs per step of the kernel


def why_not(values: Tensor, dtype: torch.dtype) -> str | None:
    """Return the reason why a weight [N, K] has no such matmul with results of `dtype`, or None if it has.

    Each size is tried once.
    """
    device = values.device
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < _LEAST_CAPABILITY:
        return "no tensor cores for float8"
    if values.shape[0] % _ALIGNED or values.shape[1] % _ALIGNED:
        return f"outputs and inputs are not multiples of {_ALIGNED}"
    return _refused(*values.shape, values.stride(0), dtype, device)


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row [K] to float8 with a scale: float8_e4m3fn [T, K], float32 [T]."""
    size = x.float().abs().amax(1)
    inverse = torch.where(size > _SMALLEST, LARGEST / size, 0.0)
    return (x.float() * inverse.unsqueeze(1)).to(torch.float8_e4m3fn), size / LARGEST


def round_rows_fused(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `round_rows` with one kernel."""
    from oarlock.workers.kernels.triton import matmul as kernels  # Triton is only installed on some machines

    rows, columns = x.shape
    assert x.stride(1) == 1
    out = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, dtype=torch.float32, device=x.device)
    kernel: Any = kernels.round_rows  # calling a kernel compiles it; no annotation of its arguments
    block = min(_BLOCK, 1 << (columns - 1).bit_length())
    kernel[(rows,)](x, out, scales, columns, x.stride(0), BLOCK=block, num_warps=8 if block > 128 else 1)
    return out, scales


def multiply(x: Tensor, values: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `x @ (values * factors).T`, [T, N] of `dtype`.

    x [T, K], values float8_e4m3fn [N, K], factors float32 [N].
    """
    rounded, scales = round_rows_fused(x)
    return _matmul(rounded, scales, values, factors, dtype)


def _matmul(rounded: Tensor, scales: Tensor, values: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    by_row = ScalingType.RowWise
    return F.scaled_mm(rounded, values.T, scales.unsqueeze(1), by_row, factors.unsqueeze(0), by_row, output_dtype=dtype)


@cache
def _refused(columns: int, inputs: int, stride: int, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return torch's reason to refuse a matmul of this size, if any: device and libraries decide the dtypes of
    results."""
    memory = torch.zeros((columns, stride), dtype=torch.uint8, device=device)
    rows = torch.zeros((_ALIGNED, inputs), dtype=torch.uint8, device=device)
    ones = torch.ones(max(columns, _ALIGNED), device=device)
    try:
        values, rounded = (part.view(torch.float8_e4m3fn) for part in (memory[:, :inputs], rows))
        _matmul(rounded, ones[:_ALIGNED], values, ones[:columns], dtype)
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        _log.info("event=no_float8_matmul outputs=%d inputs=%d results=%s reason=%r", columns, inputs, dtype, reason)
        return reason
    return None
