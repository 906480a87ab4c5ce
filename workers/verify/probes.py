"""Two finer questions to what was recorded: whose share of a sum is wrong, and is it gate or up.

Knows the extra tensors that `taps.py` keeps when it probes, and single tensors of the checkpoint.
"""

import math
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from workers.layers.decoder_spec import DecoderSpec
from workers.verify.compare import Files
from workers.verify.names import part_of
from workers.weights.checkpoint import Checkpoint

_INPUTS = {"o_proj": "attention", "mlp": "gate_up"}
_WRONG = 0.1  # relative error of a share; rounding, grown over all layers, stays well below


def wrong_shares(files: Files, tensor: str, weight: str, model: Path) -> tuple[int, ...] | None:
    """The ranks whose share of `o_proj` or `mlp`, before the sum, is not what their columns give; None: cannot tell."""
    entry = Checkpoint.open(model).find(weight)
    if entry is None:
        return None
    with safe_open(entry.path, "pt") as file:
        whole = file.get_tensor(weight).double()  # [hidden, all inputs]
    inputs = files.truth(f"{files.layer}.{_INPUTS[tensor]}")  # [T, all inputs]
    local = whole.shape[1] // files.size
    wrong = []
    for rank in range(files.size):
        columns = slice(rank * local, (rank + 1) * local)
        expected = inputs[:, columns] @ whole[:, columns].T
        share = files.ours(rank, f"{files.layer}.{tensor}_partial").double()
        if not (share - expected).norm() < _WRONG * expected.norm():
            wrong.append(rank)
    return tuple(wrong)


def gate_is_right(files: Files, rank: int, spec: DecoderSpec, size: int) -> bool:
    """Whether a rank's wrong `act(gate) * up` has the right gate in it.

    For silu and gelu, act(g) - act(-g) = g. So with f the layer without biases, f(x) + f(-x) = g * u and
    f(x) - f(-x) = g * u * h(g), where h is an odd function: their quotient knows nothing of u.
    """
    part = part_of("gate_up", spec, rank, size)
    gate = files.truth(f"{files.layer}.gate")[:, part.start : part.stop]
    one = files.ours(rank, f"{files.layer}.gate_up").double()
    mirrored = files.ours(rank, f"{files.layer}.gate_up_mirrored").double()
    total, difference = one + mirrored, one - mirrored
    expected = total * _ODD[spec.activation](gate)
    return bool((difference - expected).norm() < _WRONG * difference.norm())


_ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": lambda gate: torch.tanh(gate / 2),
    "gelu_tanh": lambda gate: torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate.pow(3))),
}
