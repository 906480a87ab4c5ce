"""Reader of weights in MXFP4, which stay in 4 bits: `blocks` uint8 [N, K / 2] and `scales` uint8 [N, K / 32]."""

import torch
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.workers.quantization.grouped import GroupedWeight
from oarlock.workers.quantization.method import DenseWeight, Empty, WeightShard
from oarlock.workers.quantization.packed_integers import Span, take_block
from oarlock.workers.weights import float4
from oarlock.workers.weights.source import WeightSource

_IN_BYTE = 2


class MXFP4LinearMethod:
    """`LinearMethod` of weights in MXFP4."""

    def load(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> GroupedWeight:
        inputs = Span(shard.first_input, shard.first_input + shard.local_inputs)
        # A shard begins at the start of a group, so that its values do not depend on the number of ranks.
        assert inputs.first % float4.GROUP == 0 and inputs.stop % float4.GROUP == 0
        values, scales = _numbers(shard, weights, inputs)
        return GroupedWeight(values, scales, float4.GROUP, empty(0).dtype, bits=4, is_float=True)

    def dequantised(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> DenseWeight:
        """See `QuantisedLinearMethod.dequantised`; a shard may begin within a group."""
        inputs = Span(shard.first_input, shard.first_input + shard.local_inputs)
        groups = inputs.of_words(float4.GROUP)
        values, scales = _numbers(shard, weights, Span(groups.first * float4.GROUP, groups.stop * float4.GROUP))
        numbers = values.float() * scales.repeat_interleave(float4.GROUP, 1)
        into = empty(shard.rows, shard.local_inputs)
        into.copy_(numbers[:, inputs.within_words(float4.GROUP)])
        return DenseWeight(into)


def _numbers(shard: WeightShard, weights: WeightSource, inputs: Span) -> tuple[Tensor, Tensor]:
    """Return twice the values, int8 [N, K], and their scales, float32 [N, groups], of `inputs`, which are whole
    groups."""
    values = torch.zeros((shard.rows, len(inputs)), dtype=torch.int8)
    scales = torch.zeros((shard.rows, len(inputs) // float4.GROUP))
    row = 0
    for name, rows, first, view in shard.sources(weights, "blocks", values):
        here = Span(first, first + len(view))
        pairs, exponents = (
            take_block(
                weights, f"{name}.{kind}", (rows, -(-shard.inputs // each)), here, inputs.of_words(each), torch.uint8
            )
            for kind, each in (("blocks", _IN_BYTE), ("scales", float4.GROUP))
        )
        if (exponents == float4.NOT_A_NUMBER).any():
            raise StartupError(
                f"tensor '{name}.scales' holds NaN: every output of this model would be meaningless.",
                "Download the checkpoint again; if it is your own, its conversion went wrong.",
            )
        view.copy_(float4.unpacked(pairs))
        scales[row : row + len(view)] = float4.scales_of(exponents)
        row += len(view)
    return values, scales
