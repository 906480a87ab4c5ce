"""Experts of a class that transformers computes, in our expert kernels: their description, and the module that replaces
the class's.

The router, the shared expert and everything around stays the class's code. Ranks divide the width of every expert,
which is right for any class: each rank has all inputs, and the sum over ranks is complete.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.experts import ExpertStack
from oarlock.workers.layers.experts_spec import ExpertsSpec, RouterSpec
from oarlock.workers.layers.placement import Placement
from oarlock.workers.quantization.matmul import ACTIVATIONS, PLAIN_ACTIVATIONS
from oarlock.workers.transformers_backend.class_description import ExpertsModule
from oarlock.workers.transformers_backend.experts_source import SeparateExperts, StackedSource

# Fields of configs with the number of experts of a token, most common first.
_TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "moe_top_k")
_LIMITS = ("limit", "swiglu_limit")
_ALPHAS = ("alpha", "swiglu_alpha")


def describe_experts(name: str, module: Any) -> ExpertsModule | None:
    """Return the description of the experts `module`, called `name`; None if our kernels do not compute it.

    `module` may be on the meta device.
    """
    own = _OF_OWN_CODE.get(type(module).__name__) if _is_of_transformers(module) else None
    if own is not None:
        return own(name, module)
    flags = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
    if not all(isinstance(getattr(module, flag, None), bool) for flag in flags) or module.has_post_expert_norm:
        return None
    is_gated, has_bias, is_transposed = bool(module.has_gate), bool(module.has_bias), bool(module.is_transposed)
    first = "gate_up_proj" if is_gated else "up_proj"
    shapes = {key: tuple(tensor.shape) for key, tensor in module.state_dict(keep_vars=True).items()}
    down = shapes.get("down_proj", ())
    if len(down) != 3 or down[0] != getattr(module, "num_experts", None):
        return None
    experts, hidden, width = (down[0], down[2], down[1]) if is_transposed else down
    rows = width * (1 + is_gated)
    expected: dict[str, tuple[int, ...]] = {"down_proj": down}
    expected |= {first: (experts, hidden, rows) if is_transposed else (experts, rows, hidden)}
    if has_bias:
        expected |= {f"{first}_bias": (experts, rows), "down_proj_bias": (experts, hidden)}
    if shapes != expected:
        return None
    one = ExpertsModule(
        name, experts, hidden, width, _top_k(module), "", is_gated, has_bias, is_transposed,
        bool(module.is_concatenated),
    )  # fmt: skip
    return _with_activation(one, module, module._apply_gate if is_gated else getattr(module, "act_fn", None))


def experts_of(model: nn.Module) -> dict[str, ExpertsModule]:
    """Return the descriptions of all experts modules of `model` that our kernels compute, by name. They may have been
    replaced already."""
    found = {}
    for name, module in model.named_modules():
        one = module.described if isinstance(module, ExpertsPart) else describe_experts(name, module)
        if one is not None:
            found[name] = one
    return found


class ExpertsPart(nn.Module):
    """Replaces an experts module: (hidden states [..., hidden], ids int [T, k], weights [T, k]) -> as hidden states."""

    def __init__(
        self, name: str, module: nn.Module, described: ExpertsModule, placement: Placement, *, divided: bool = True
    ) -> None:
        """Replace `module`, called `name`, which is not kept.

        `divided`: ranks divide the width of every expert; False: each rank holds all experts and sums nothing.
        """
        super().__init__()
        assert name == described.module, f"{name} was described as {described.module}"
        self.described = described
        self.placement = placement if divided else replace(placement, tp=TensorParallel.solo(), slices=1)
        spec = ExpertsSpec(
            described.experts, described.width, RouterSpec(described.top_k), described.activation, described.alpha,
            described.limit, described.has_bias, is_gated=described.is_gated,
        )  # fmt: skip
        names = [f"{name}.{expert}" for expert in range(described.experts)]
        self.stack = ExpertStack(names, spec, described.width, described.hidden, described.has_bias, self.placement)

    @property
    def weight_bytes(self) -> int:
        return self.stack.weight_bytes

    def load(self, weights: StackedSource) -> None:
        """Read the experts from `weights`, which has the class's names."""
        self.stack.load(SeparateExperts(weights, self.described))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if hidden_states.device.type == "meta":
            self.described = replace(self.described, top_k=top_k_index.shape[-1])
            return torch.empty_like(hidden_states)
        rows = hidden_states.reshape(-1, self.described.hidden)
        choices = top_k_index.shape[-1]
        ids, scales = _ascending(
            top_k_index.reshape(-1, choices), top_k_weights.reshape(-1, choices), self.described.experts
        )
        total = self._all_reduce(self.stack(rows.to(self.placement.dtype).contiguous(), ids.int(), scales))
        if self.described.identities:
            kept = scales.masked_fill(ids < self.described.experts, 0.0).sum(1, keepdim=True)
            total = total + kept * rows
        return total.to(hidden_states.dtype).reshape(hidden_states.shape)

    def _all_reduce(self, partial: Tensor) -> Tensor:
        """Return the sum of `partial`, float32 [T, hidden], over ranks."""
        placement = self.placement
        if placement.tp.size == 1:
            return partial
        return placement.tp.all_reduce(partial if placement.all_reduces_in_float32 else partial.to(placement.dtype))


def _ascending(ids: Tensor, weights: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Return `ids` [T, k] in ascending order, and `weights` [T, k] with them in float32.

    If a row has an id twice, the second gets both weights, and the first becomes `experts`, which is no expert.
    """
    order = ids.sort(dim=1)
    ids, weights = order.values, weights.float().gather(1, order.indices)
    again = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] < experts)
    if not again.any():
        return ids, weights
    ids, weights = ids.clone(), weights.clone()
    for at in range(again.shape[1]):
        here = again[:, at]
        weights[:, at + 1] += weights[:, at] * here
        ids[:, at] = ids[:, at].masked_fill(here, experts)
    order = ids.sort(dim=1)
    return order.values, weights.masked_fill(ids == experts, 0.0).gather(1, order.indices)


def _is_of_transformers(module: nn.Module) -> bool:
    return type(module).__module__.startswith("transformers.models.")


def _top_k(module: nn.Module) -> int:
    """Return the number of experts of a token by the module's config; 1 if it does not say."""
    config = getattr(module, "config", None)
    for name in _TOP_K:
        number = getattr(config, name, None)
        if isinstance(number, list) and number:
            number = max(number)
        if isinstance(number, int):
            return number
    return 1


def _with_activation(one: ExpertsModule, module: nn.Module, function: Any) -> ExpertsModule | None:
    """Return `one` with the activation whose values `function` of the class has; None if we have no such activation.

    A class may write its gate in any way, so values decide. `function` takes the result of gate and up as the class
    stores them, or without a gate the result of up.
    """
    points = torch.arange(-48, 49, dtype=torch.float64, device="cpu") / 4
    far = torch.tensor([20.0, 100.0, 1e3, 6e4], dtype=torch.float64, device="cpu")
    points = torch.cat((-far.flip(0), points, far))
    gate, up = points[:, None].expand(-1, len(points)), points[None].expand(len(points), -1)
    if not one.is_gated:
        inputs = points[None]
    elif one.is_concatenated:
        inputs = torch.cat((gate, up), 1)
    else:
        inputs = torch.stack((gate, up), 2).flatten(1)
    try:
        with torch.inference_mode():
            found = torch.as_tensor(function(inputs.clone())).double().cpu()
    except Exception:  # the class's code, which may raise anything
        return None
    if not one.is_gated:
        names = (name for name, ours in PLAIN_ACTIVATIONS.items() if _is_equal(found, ours(inputs)))
        return next((replace(one, activation=name) for name in names), None)
    for name, ours in ACTIVATIONS.items():
        if _is_equal(found, ours.function(gate) * up):
            return replace(one, activation=name)
    limit, alpha = _number(module, _LIMITS), _number(module, _ALPHAS)
    if limit is not None and alpha is not None:
        low = gate.clamp(max=limit)
        if _is_equal(found, low * torch.sigmoid(alpha * low) * (up.clamp(-limit, limit) + 1)):
            return replace(one, activation="clamped_swiglu", alpha=alpha, limit=limit)
    return None


def _is_equal(found: Tensor, ours: Tensor) -> bool:
    """Return whether the values agree up to the rounding of float32."""
    return found.shape == ours.shape and torch.allclose(found, ours, rtol=1e-5, atol=1e-6)


def _number(module: nn.Module, names: tuple[str, ...]) -> float | None:
    found = (getattr(module, name, None) for name in names)
    return next((float(value) for value in found if isinstance(value, int | float)), None)


def _longcat(name: str, module: Any) -> ExpertsModule | None:
    """Describe experts of which the last ones return their input and have no weights that are read."""
    if module.gate_up_proj is None:
        return None
    experts, hidden, width = module.down_proj.shape
    one = ExpertsModule(name, experts, hidden, width, 1, "", identities=module.zero_expert_num)
    return _with_activation(one, module, lambda both: module.act_fn(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1])


def _dbrx(name: str, module: Any) -> ExpertsModule | None:
    """Describe experts whose tensors are rows of three matrices."""
    rows, hidden = module.mlp.w1.shape
    one = ExpertsModule(name, module.num_experts, hidden, rows // module.num_experts, 1, "", is_flat=True)
    function = module.mlp.activation_fn
    return _with_activation(one, module, lambda both: function(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1])


# Experts modules of transformers whose code is none of its common implementations, by class name.
_OF_OWN_CODE: dict[str, Callable[[str, Any], ExpertsModule | None]] = {
    "LongcatFlashExperts": _longcat,
    "DbrxExperts": _dbrx,
}
