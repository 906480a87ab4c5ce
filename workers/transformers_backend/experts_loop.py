"""Experts that our kernels do not compute: the class's own operations, expert by expert, as an implementation of
transformers' experts.

Every rank holds all of them, so they need no sum over ranks. On the meta device nothing is computed, so that a class
can be looked at without weights.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.transformers_backend.private_parts import ALL_EXPERTS_FUNCTIONS

EXPERTS_IMPLEMENTATION = "oarlock"


def run_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Return the weighted sum over each token's experts: [T, hidden], as `hidden_states`.

    `top_k_index` [T, k]: experts of each token; ids that are no expert add nothing. `top_k_weights` [T, k].
    """
    if hidden_states.device.type == "meta":
        return torch.empty_like(hidden_states)
    total = torch.zeros_like(hidden_states, dtype=torch.promote_types(hidden_states.dtype, torch.float32))
    for expert in top_k_index.unique().tolist():
        if not 0 <= expert < module.num_experts:
            continue
        rows, choices = (top_k_index == expert).nonzero(as_tuple=True)
        result = _run_expert(module, expert, hidden_states[rows])
        total.index_add_(0, rows, result.to(total.dtype) * top_k_weights[rows, choices, None].to(total.dtype))
    return total.to(hidden_states.dtype)


def _run_expert(module: Any, expert: int, x: Tensor) -> Tensor:
    """Return the result of one expert for its rows `x` [rows, hidden], without the token's weight."""

    def linear(name: str, x: Tensor) -> Tensor:
        weight = getattr(module, name)[expert]
        bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
        return F.linear(x, weight.T if module.is_transposed else weight, bias)

    inner = module._apply_gate(linear("gate_up_proj", x)) if module.has_gate else module.act_fn(linear("up_proj", x))
    result = linear("down_proj", inner)
    return module.post_expert_norm(result) if module.has_post_expert_norm else result


def register_experts() -> None:
    """Make transformers know `run_experts` as an implementation of experts, called `EXPERTS_IMPLEMENTATION`."""
    ALL_EXPERTS_FUNCTIONS.register(EXPERTS_IMPLEMENTATION, run_experts)
