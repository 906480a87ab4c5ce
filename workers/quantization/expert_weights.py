"""The experts of a rank: their sizes, their weights, and the protocol of products with them."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.quantization.method import LinearWeight


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Sizes of a rank's experts. At most one of `slices` and `groups` is more than 1."""

    first: int  # id of its first expert
    count: int  # of its experts
    hidden: int
    width: int  # of each expert, on this rank
    dtype: torch.dtype  # of x
    slices: int = 1  # equal ones of `width`, each summed by itself
    groups: int = 1  # of neighbouring experts, each summed by itself
    group: int = 0  # experts of a group; the last ones may have fewer, or none; 0: all
    activation: str = "silu"  # as `ExpertsSpec` has it
    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert's weights on a rank."""

    gate_up: LinearWeight  # [2 * width, hidden], gate above up
    down: LinearWeight  # [hidden, width]
    gate_up_bias: Tensor | None = None  # [2 * width]
    down_bias: Tensor | None = None  # [hidden]; only on the rank with the first slice, to which it is added


class ExpertMatmul(Protocol):
    """All experts of a rank."""

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """The rank's share of the sum over each token's experts: float32 [T, hidden].

        `x` [T, hidden]; `expert_ids` int32 [T, k] ascending in each row, of which those of other ranks are skipped;
        `weights` float32 [T, k].
        """


def gate_of(both: Tensor, shape: ExpertsShape, dtype: torch.dtype = torch.float64) -> Tensor:
    """The gated product of `both` [T, 2 * width], gate before up: float32 [T, width].

    In float64: on the CPU torch computes the last few elements of an array with another exponential function, by whose
    last bits a token would depend on its place; rounding hides them.
    """
    gate, up = both.to(dtype).chunk(2, 1)
    if shape.activation == "clamped_swiglu":
        gate, up = gate.clamp(max=shape.limit), up.clamp(-shape.limit, shape.limit) + 1.0
        gate = gate * torch.sigmoid(shape.alpha * gate)
    else:
        gate = F.silu(gate) if shape.activation == "silu" else F.gelu(gate, approximate="tanh")
    return (gate * up).float()
