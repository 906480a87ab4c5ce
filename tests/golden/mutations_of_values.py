"""Faults of norms, activations and multipliers, each planted in the layers of a family that has them."""

from dataclasses import replace
from typing import Any

import torch
from pytest import MonkeyPatch
from torch import Tensor

from oarlock.workers.layers import attention, linear
from oarlock.workers.layers.attention import Attention
from oarlock.workers.layers.experts import Experts, ExpertStack
from oarlock.workers.layers.layer_input import LayerInputs
from oarlock.workers.layers.linear import ColumnParallelLinear
from oarlock.workers.layers.norm import LayerNorm, LayerScalar, RMSNorm
from oarlock.workers.models.decoder import Branch, DecoderLayer, HeldResult
from tests.golden.mutations import with_init

# -- norms


def norm_offset_forgotten(patch: MonkeyPatch) -> None:
    with_init(patch, RMSNorm, "offset", 0.0)


def norms_after_half_blocks_left_out(patch: MonkeyPatch) -> None:
    with_init(patch, Branch, "post_norm", None)


def layer_norm_offset_forgotten(patch: MonkeyPatch) -> None:
    with_init(patch, LayerNorm, "offset", 0.0)


def layer_norm_without_its_mean(patch: MonkeyPatch) -> None:
    def call(self: LayerNorm, x: Tensor) -> Tensor:
        return torch.nn.functional.rms_norm(x.float(), (self.size,), self.weight, self.eps).to(x.dtype)

    patch.setattr(LayerNorm, "__call__", call)


# -- an MLP without a gate, and values that are limited


def _with_activation(patch: MonkeyPatch, name: str) -> None:
    original = linear.activated
    patch.setattr(linear, "activated", lambda multiply, activation: original(multiply, name))


def relu_not_squared(patch: MonkeyPatch) -> None:
    _with_activation(patch, "relu")


def exact_gelu_for_its_approximation(patch: MonkeyPatch) -> None:
    _with_activation(patch, "gelu")


def rows_of_the_first_rank(patch: MonkeyPatch) -> None:
    original = ColumnParallelLinear.__init__

    def patched(self: ColumnParallelLinear, parts: tuple, *arguments: Any, **options: Any) -> None:
        original(self, tuple(replace(part, first=0) for part in parts), *arguments, **options)

    patch.setattr(ColumnParallelLinear, "__init__", patched)


def queries_keys_and_values_not_limited(patch: MonkeyPatch) -> None:
    with_init(patch, Attention, "clip_qkv", None)


# -- norms and multipliers of dense families


def norms_after_half_blocks_change_places(patch: MonkeyPatch) -> None:
    original = DecoderLayer.__init__

    def patched(self: DecoderLayer, *arguments: Any) -> None:
        original(self, *arguments)
        first, second = self.branches
        first.post_norm, second.post_norm = second.post_norm, first.post_norm

    patch.setattr(DecoderLayer, "__init__", patched)


def residual_scale_forgotten(patch: MonkeyPatch) -> None:
    with_init(patch, Branch, "scale", 1.0)


def biases_of_norms_dropped(patch: MonkeyPatch) -> None:
    taken = LayerNorm._taken

    def patched(self: LayerNorm, weights: Any, kind: str) -> Tensor:
        found = taken(self, weights, kind)
        return found.zero_() if kind == "bias" else found

    patch.setattr(LayerNorm, "_taken", patched)


def weights_of_experts_on_their_results(patch: MonkeyPatch) -> None:
    with_init(patch, ExpertStack, "shape", lambda stack: replace(stack.shape, weighs_inputs=False))


def values_not_normed(patch: MonkeyPatch) -> None:
    with_init(patch, Attention, "value_norm", None)


def scale_of_values_forgotten(patch: MonkeyPatch) -> None:
    with_init(patch, Attention, "value_scale", 1.0)


def gates_of_heads_by_another_function(patch: MonkeyPatch) -> None:
    gate_with = attention.gate_with
    patch.setattr(attention, "gate_with", lambda x, gate, activation: gate_with(x, gate, "sigmoid"))


def factor_of_the_layer_forgotten(patch: MonkeyPatch) -> None:
    patch.setattr(LayerScalar, "__call__", lambda self, hidden: hidden)


def inputs_of_the_layer_before(patch: MonkeyPatch) -> None:
    inputs = LayerInputs.__call__
    patch.setattr(LayerInputs, "__call__", lambda self, ids, embedded: inputs(self, ids, embedded).roll(1, 1))


# -- experts whose result the next layer adds, and experts without matrices


def held_result_added_too_early(patch: MonkeyPatch) -> None:
    """The layer that holds it adds it itself."""
    original = DecoderLayer.__call__

    def call(self: DecoderLayer, hidden: Tensor, step: Any) -> Tensor:
        hidden = original(self, hidden, step)
        if self.held.rows is None:
            return hidden
        early, self.held.rows = self.held.rows, torch.zeros_like(hidden)
        return hidden + early

    patch.setattr(DecoderLayer, "__call__", call)


def held_result_left_out(patch: MonkeyPatch) -> None:
    original = HeldResult.take
    patch.setattr(HeldResult, "take", lambda self: torch.zeros_like(original(self)))


def experts_without_matrices_left_out(patch: MonkeyPatch) -> None:
    with_init(patch, Experts, "first_identity", None)
