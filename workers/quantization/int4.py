"""Weights rounded to 4 bits at load, with one scale for each 32 inputs of an output (`--quantization int4`).

`GroupedWeight` creates their matmuls.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.quantization.grouped import GroupedWeight
from oarlock.workers.quantization.method import DenseWeight, Empty, WeightShard
from oarlock.workers.weights.source import WeightSource

GROUP = 32  # inputs that share a scale
_ROWS_AT_ONCE = 256  # rows of a weight that are rounded at a time, in float32


def round_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row [K] of `x` to integers from -8 to 7, with a scale for each group of inputs.

    The value with the largest magnitude becomes -8 times the scale, which may be negative. So all 16 values are used,
    while an unsigned scale would leave one value unused or clip the largest value.

    `x` [N, K] -> int8 [N, K], bfloat16 [N, groups].
    """
    rows, inputs = x.shape
    grouped = F.pad(x.float(), (0, -inputs % GROUP)).view(rows, -1, GROUP)  # [N, groups, GROUP]
    largest = grouped.gather(2, grouped.abs().argmax(2, keepdim=True))  # [N, groups, 1], with its sign
    scales = (largest / -8.0).to(torch.bfloat16)
    inverse = torch.where(scales == 0, 0.0, 1.0 / scales.float())
    values = (grouped * inverse).round_().nan_to_num_(0.0).clamp_(-8, 7)
    return values.to(torch.int8).view(rows, -1)[:, :inputs], scales.squeeze(2)


def dequantised(values: Tensor, scales: Tensor) -> Tensor:
    """Dequantise int8 [N, K] and bfloat16 [N, groups] to float32 [N, K]."""
    return values.float() * scales.float().repeat_interleave(GROUP, 1)[:, : values.shape[1]]


def rounded(weight: Tensor) -> GroupedWeight:
    """Return a weight [N, K], which need not be kept, in 4 bits."""
    rows, inputs = weight.shape
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty((rows, -(-inputs // GROUP)), device=weight.device)
    for row in range(0, rows, _ROWS_AT_ONCE):
        part = slice(row, row + _ROWS_AT_ONCE)
        values[part], scales[part] = round_groups(weight[part])
    return GroupedWeight(values, scales, GROUP, weight.dtype, bits=4)


class Int4LinearMethod:
    """`LinearMethod` that reads a weight in its stored dtype and rounds it to 4 bits."""

    def load(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> GroupedWeight:
        # A shard begins at the start of a group, so that its weights do not depend on the number of ranks.
        assert shard.first_input % GROUP == 0, f"a shard begins within a group, at input {shard.first_input}"
        return rounded(shard.take(weights, empty))

    def dequantised(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> DenseWeight:
        """See `QuantisedLinearMethod.dequantised`."""
        assert shard.first_input % GROUP == 0, f"a shard begins within a group, at input {shard.first_input}"
        into = shard.take(weights, empty)
        for row in range(0, shard.rows, _ROWS_AT_ONCE):
            part = into[row : row + _ROWS_AT_ONCE]
            part.copy_(dequantised(*round_groups(part)))
        return DenseWeight(into)
