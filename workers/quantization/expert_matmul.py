"""Products with the experts of a mixture: the gated MLPs of all experts of a rank, for the tokens that chose them.

`TorchExpertMatmul` is the reference: a loop over the experts in use, whose products are those of any other weight, so
that it has every form of weights. What all forms of it keep:

* Bits of a token depend on that token alone: not on how many tokens an expert gets, nor on their order.
* `down`'s results are added in float32, in the order of a row's ids, which ascend; each is multiplied by its weight
  before. The gated product is rounded once, to the model's type.
* Slices of the width are summed each by itself over all experts of a row, or else groups of experts are; then the
  slices, or groups, are added as in `tree_sum`. So 1, 2, 4 or 8 ranks, each with its slices, have the same bits.
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
        """`experts`: each is dropped before the next one is taken."""
        self.shape = shape
        self.products = [
            (
                one.gate_up.matmul(one.gate_up_bias, float32_output=True),
                one.down.matmul(float32_output=True, slices=shape.slices),
                one.down_bias,
            )
            for one in experts
        ]
        assert len(self.products) == shape.count

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        shape = self.shape
        lanes = torch.zeros((shape.slices * shape.groups, len(x), shape.hidden), device=x.device)
        ids = expert_ids - shape.first
        for expert in range(shape.count):
            rows, places = (ids == expert).nonzero(as_tuple=True)  # a token has an expert once
            if len(rows):
                lane = expert // shape.group if shape.group else 0
                for number, result in enumerate(self._slices(expert, x[rows])):
                    lanes[lane + number, rows] += weights[rows, places, None] * result
        return tree_sum(list(lanes))

    def _slices(self, expert: int, x: Tensor) -> list[Tensor]:
        """The expert's results for all `x` [T, hidden], one for each slice of its width: float32 [T, hidden]."""
        gate_up, down, bias = self.products[expert]
        inner = gate_of(gate_up(x), self.shape).to(self.shape.dtype)  # [T, width]
        length = self.shape.width // self.shape.slices
        found = []
        for number in range(self.shape.slices):
            alone = inner  # what a product adds up of other slices is 0 then
            if self.shape.slices > 1:
                alone = torch.zeros_like(inner)
                here = slice(number * length, (number + 1) * length)
                alone[:, here] = inner[:, here]
            found.append(down(alone).float())
        if bias is not None:
            found[0] = found[0] + bias.float()
        return found


def cpp_expert_matmul(shape: ExpertsShape, experts: Iterable[ExpertWeights]) -> CppExpertMatmul:
    """The product of the C++ kernel."""
    return CppExpertMatmul(shape, (_for_kernel(shape, one) for one in experts))


def _for_kernel(shape: ExpertsShape, one: ExpertWeights) -> tuple[GatedMatmul, Matmul, Tensor | None]:
    # The kernel has activations of its own: of this product it takes the order of the packed weight.
    gated = one.gate_up.gated_matmul(one.gate_up_bias, "silu")
    return gated, one.down.matmul(float32_output=True, slices=shape.slices), one.down_bias


def expert_matmul(shape: ExpertsShape, experts: Iterable[ExpertWeights], *, on_host: bool = True) -> ExpertMatmul:
    """The fastest product for these experts where their weights are; the caller should not keep these. `on_host`: on
    the CPU."""
    left = iter(experts)
    first = next(left, None)
    if first is None:  # a rank may have no expert: it runs its layers as the others do
        has_kernel = on_host and library.why_not(shape.dtype) is None
        return CppExpertMatmul(shape, ()) if has_kernel else TorchExpertMatmul(shape, ())
    if triton_experts.why_not(first) is None:
        return triton_experts.TritonExpertMatmul(shape, chain([first], left))
    products = _for_kernel(shape, first)
    if not can_stack(*products[:2]):
        return TorchExpertMatmul(shape, chain([first], left))
    del first
    return CppExpertMatmul(shape, chain([products], (_for_kernel(shape, one) for one in left)))
