"""Expert matmuls of an MoE layer: the gated MLPs of all experts of a rank, for the tokens that chose them.

`TorchExpertMatmul` is the reference: a loop over the experts in use with the matmuls of ordinary weights, so that it
supports every format of weights. All implementations guarantee:

* Bits of a token depend only on that token: not on the number of tokens of an expert, nor on their order.
* `down`'s results are added in float32, in the order of a row's ids, which ascend; each is multiplied by its weight
  before. The gated activation is rounded once, to the model's dtype.
* Either slices of the width or groups of experts are summed separately, over all experts of a row; then the slices or
  groups are added as in `tree_sum`. So 1, 2, 4 or 8 ranks, each with its slices, have the same bits.
"""

from collections.abc import Iterable
from itertools import chain

import torch
from torch import Tensor

from oarlock.workers.distributed.all_reduce import tree_sum
from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.experts import CppExpertMatmul, can_stack
from oarlock.workers.quantization import triton_experts
from oarlock.workers.quantization.expert_weights import ExpertMatmul, ExpertsShape, ExpertWeights, gate_of
from oarlock.workers.quantization.matmul import GatedMatmul, Matmul


class TorchExpertMatmul:
    """`ExpertMatmul` by a loop over the experts in use."""

    def __init__(self, shape: ExpertsShape, experts: Iterable[ExpertWeights]) -> None:
        """Build the matmuls; each of `experts` is dropped before the next is taken."""
        self.shape = shape
        self.matmuls = [
            (
                one.gate_up.matmul(one.gate_up_bias, float32_output=True),
                one.down.matmul(float32_output=True, slices=shape.slices),
                one.down_bias,
            )
            for one in experts
        ]
        assert len(self.matmuls) == shape.count

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        shape = self.shape
        lanes = torch.zeros((shape.slices * shape.groups, len(x), shape.hidden), device=x.device)
        ids = expert_ids - shape.first
        for expert in range(shape.count):
            rows, choices = (ids == expert).nonzero(as_tuple=True)  # a token has an expert once
            if len(rows):
                lane = expert // shape.group if shape.group else 0
                weight = weights[rows, choices, None]  # [rows, 1]
                after = 1.0 if shape.weighs_inputs else weight
                for number, result in enumerate(self._slices(expert, x[rows], weight)):
                    lanes[lane + number, rows] += after * result
        return tree_sum(list(lanes))

    def _slices(self, expert: int, x: Tensor, weight: Tensor) -> list[Tensor]:
        """Return the expert's results for `x` [T, hidden], float32 [T, hidden] for each slice of its width. `weight`:
        of the expert, float32 [T, 1]."""
        gate_up, down, bias = self.matmuls[expert]
        both = gate_up(x)
        if self.shape.weighs_inputs:  # gate and up are linear: the result is as if the input was scaled
            both = both * weight
        inner = gate_of(both, self.shape).to(self.shape.dtype)  # [T, width]
        length = self.shape.width // self.shape.slices
        found = []
        for number in range(self.shape.slices):
            alone = inner  # contributions of other slices are 0
            if self.shape.slices > 1:
                alone = torch.zeros_like(inner)
                here = slice(number * length, (number + 1) * length)
                alone[:, here] = inner[:, here]
            found.append(down(alone).float())
        if bias is not None:
            found[0] = found[0] + bias.float()
        return found


def cpp_expert_matmul(shape: ExpertsShape, experts: Iterable[ExpertWeights]) -> CppExpertMatmul:
    """Return the matmul of the C++ kernel."""
    return CppExpertMatmul(shape, (_for_kernel(shape, one) for one in experts))


def _for_kernel(shape: ExpertsShape, one: ExpertWeights) -> tuple[GatedMatmul | Matmul, Matmul, Tensor | None]:
    # The kernel has its own activations; it takes only the order of the packed weight from this matmul.
    weight, bias = one.gate_up, one.gate_up_bias
    first = weight.gated_matmul(bias, "silu") if shape.is_gated else weight.matmul(bias)
    return first, one.down.matmul(float32_output=True, slices=shape.slices), one.down_bias


def expert_matmul(shape: ExpertsShape, experts: Iterable[ExpertWeights], *, on_host: bool = True) -> ExpertMatmul:
    """Return the fastest matmul for these experts on their device; the caller should not keep the weights.

    `on_host`: the experts are on the CPU.
    """
    left = iter(experts)
    first = next(left, None)
    if first is None:  # a rank may have no expert: it runs its layers like the others
        has_kernel = on_host and library.why_not(shape.dtype) is None
        return CppExpertMatmul(shape, ()) if has_kernel else TorchExpertMatmul(shape, ())
    if shape.is_gated and triton_experts.why_not(first) is None:
        return triton_experts.TritonExpertMatmul(shape, chain([first], left))
    matmuls = _for_kernel(shape, first)
    if not can_stack(*matmuls[:2]):
        return TorchExpertMatmul(shape, chain([first], left))
    del first
    return CppExpertMatmul(shape, chain([matmuls], (_for_kernel(shape, one) for one in left)))
