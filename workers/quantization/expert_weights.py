"""The experts of a rank: their sizes, their weights, and the protocol of their matmuls."""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.quantization.matmul import PLAIN_ACTIVATIONS
from oarlock.workers.quantization.method import LinearWeight


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """Sizes of a rank's experts. At most one of `slices` and `groups` is more than 1."""

    first: int  # id of the rank's first expert
    count: int  # experts of the rank
    hidden: int
    width: int  # intermediate size of each expert on this rank
    dtype: torch.dtype  # dtype of x
    slices: int = 1  # equal slices of `width`, each summed separately
    groups: int = 1  # groups of neighbouring experts, each summed separately
    group: int = 0  # experts per group; the last groups may have fewer or none; 0: all experts
    activation: str = "silu"  # see `ExpertsSpec`
    alpha: float = 1.702
    limit: float = 7.0
    is_gated: bool = True  # False: `gate_up` is only up, and the activation is one of `PLAIN_ACTIVATIONS`
    weighs_inputs: bool = False  # an expert's weight multiplies its input instead of its result; then without biases


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One expert's weights on a rank."""

    gate_up: LinearWeight  # [2 * width, hidden], gate above up; [width, hidden] without a gate
    down: LinearWeight  # [hidden, width]
    gate_up_bias: Tensor | None = None  # [2 * width]
    # [hidden]; only on the rank with the first slice, whose result it is added to.
    down_bias: Tensor | None = None


class ExpertMatmul(Protocol):
    """Matmuls of all experts of a rank."""

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """Return the rank's share of the weighted sum over each token's experts: float32 [T, hidden].

        `x` [T, hidden]; `expert_ids` int32 [T, k], ascending in each row; ids of other ranks' experts are skipped;
        `weights` float32 [T, k].
        """


def gate_of(both: Tensor, shape: ExpertsShape, dtype: torch.dtype = torch.float64) -> Tensor:
    """Return the gated activation of `both` [T, 2 * width], gate before up: float32 [T, width].

    Without a gate, return the activation of `both` [T, width].

    The default is float64. On the CPU torch computes the last few elements of an array with another exponential
    function, whose last bits would make a token depend on its position; rounding hides the difference.
    """
    if not shape.is_gated:
        return PLAIN_ACTIVATIONS[shape.activation](both.to(dtype)).float()
    gate, up = both.to(dtype).chunk(2, 1)
    if shape.activation == "clamped_swiglu":
        gate, up = gate.clamp(max=shape.limit), up.clamp(-shape.limit, shape.limit) + 1.0
        gate = gate * torch.sigmoid(shape.alpha * gate)
    else:
        gate = F.silu(gate) if shape.activation == "silu" else F.gelu(gate, approximate="tanh")
    return (gate * up).float()
