"""Matmuls of many rows with float8 weights that have a scale for each block of 128 x 128, if torch supports them.

Each 128 inputs of a row of x are rounded to float8 with their own scale, as intended by checkpoints with dynamic
activations. torch multiplies and applies both scales to sums in float32 (`torch.nn.functional.scaled_mm`, on compute
capability 9.0). Devices and libraries accept different layouts, so a trial at start decides for each size of weight: it
tries both shapes of scales, checks the values, and compares the time with the other backend.
"""

import logging
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType

from oarlock.workers.quantization import scaled_float8

_log = logging.getLogger(__name__)

BLOCK = 128
_ALIGNED = 4  # rows of x, and blocks of inputs, are padded to a multiple of this number in the scales
_TRIED = 512  # rows of x in a trial
_LOOKED_AT = 512  # outputs checked at each end of the weight
# Maximum relative root mean square distance to the float32 matmul; results have at least 8 bits.
_NEAR = 0.02
_TIMED = 5  # timed matmuls

Otherwise = Callable[[Tensor], Tensor]  # x [T, K] -> [T, N]


def blocks_of(scales: Tensor) -> Tensor | None:
    """Return a scale for each block, float32 [N / 128, K / 128], from scales [N, K / 128] of each output and 128
    inputs.

    Return None if blocks of 128 outputs do not share scales, for example because ranks cut the weight within a block.
    """
    if len(scales) % BLOCK:
        return None
    parts = scales.view(-1, BLOCK, scales.shape[1])
    return parts[:, 0].contiguous() if bool((parts == parts[:, :1]).all()) else None


def round_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each 128 inputs of a row to float8 with a scale: float8_e4m3fn [T, K], float32 [T, ceil(K / 128)]."""
    rows, inputs = x.shape
    values, scales = scaled_float8.round_rows(F.pad(x, (0, -inputs % BLOCK)).view(-1, BLOCK))
    return values.view(rows, -1)[:, :inputs], scales.view(rows, -1)


class BlockMatmuls:
    """`x @ weight.T` of a weight [N, K], N and K multiples of 128, by `scaled_mm`."""

    def __init__(self, values: Tensor, blocks: Tensor, *, pads_shape: bool) -> None:
        """Store `values` float8_e4m3fn [N, K] and `blocks` float32 [N / 128, K / 128].

        `pads_shape`: scales of padding are part of the tensor's shape, not only of its memory.
        """
        self._values = values
        groups = blocks.shape[1]
        scales = F.pad(blocks, (0, -groups % _ALIGNED)).T  # [K / 128 and padding, N / 128], outputs far apart in memory
        self._scales = scales if pads_shape else scales[:groups]

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """Multiply `x` [T, K] -> [T, N] of `dtype`."""
        rows, inputs = x.shape
        padded = F.pad(x, (0, 0, 0, -rows % _ALIGNED)).contiguous()
        values, scales = scaled_float8.round_rows_fused(padded.view(-1, BLOCK))
        by_group = scales.view(len(padded), -1).T.contiguous().T  # [T, K / 128], groups far apart in memory
        return _matmul(values.view(-1, inputs), by_group, self._values, self._scales, dtype)[:rows]


def _matmul(rounded: Tensor, scales: Tensor, values: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    kinds = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return F.scaled_mm(rounded, values.T, scales, kinds[0], blocks, kinds[1], output_dtype=dtype)


# Key of a size and its dtypes -> whether the shape has padding, or the reason why there is no such matmul.
_chosen: dict[tuple, bool | str] = {}


def block_matmul(
    values: Tensor, blocks: Tensor, x_dtype: torch.dtype, dtype: torch.dtype, otherwise: Otherwise
) -> BlockMatmuls | str:
    """Return the matmul of this weight with x of `x_dtype` and results of `dtype`, or the reason why there is none.

    Each size is tried once: results must be right, and computed faster than by `otherwise`.
    """
    key = (*values.shape, x_dtype, dtype, values.device)
    if key not in _chosen:
        _chosen[key] = found = _tried(values, blocks, x_dtype, dtype, otherwise)
        if isinstance(found, str):
            _log.info("event=no_block_float8_matmul outputs=%d inputs=%d reason=%r", *values.shape, found)
    found = _chosen[key]
    return found if isinstance(found, str) else BlockMatmuls(values, blocks, pads_shape=found)


def _tried(
    values: Tensor, blocks: Tensor, x_dtype: torch.dtype, dtype: torch.dtype, otherwise: Otherwise
) -> bool | str:
    """Return whether the shape of scales has padding, or the reason why the last trial failed."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn((_TRIED, values.shape[1]), generator=draw).to(values.device, x_dtype)
    rounded, scales = round_blocks(x)
    columns = torch.arange(len(values), device=values.device)
    columns = torch.cat((columns[:_LOOKED_AT], columns[-_LOOKED_AT:]))
    whole = values.view(torch.uint8)[columns].view(values.dtype).float()
    whole *= blocks[columns // BLOCK].repeat_interleave(BLOCK, 1)
    exact = (rounded.float() * scales.repeat_interleave(BLOCK, 1)) @ whole.T
    reason = ""
    for pads_shape in (True, False):
        matmul = BlockMatmuls(values, blocks, pads_shape=pads_shape)
        try:
            off = (matmul(x, dtype)[:, columns].float() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            reason = str(error).splitlines()[0]
            continue
        if not off < _NEAR:
            reason = f"its results are wrong by {float(off):.3f}"
            continue
        ours, theirs = _seconds(lambda matmul=matmul: matmul(x, dtype), x), _seconds(lambda: otherwise(x), x)
        return pads_shape if ours < theirs else f"it takes {ours * 1e6:.0f} us, the other kernel {theirs * 1e6:.0f} us"
    return reason


def _seconds(run: Callable[[], object], x: Tensor) -> float:
    """Return the minimum seconds of several calls on the device of `x`."""
    run()
    times = []
    for _ in range(_TIMED):
        _wait(x)
        begun = time.perf_counter()
        run()
        _wait(x)
        times.append(time.perf_counter() - begun)
    return min(times)


def _wait(x: Tensor) -> None:
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)
