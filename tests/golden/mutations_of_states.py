"""Planted faults of recurrent layers: each breaks the product in one place, by patching it."""

from dataclasses import replace
from typing import Any

from pytest import MonkeyPatch
from torch import Tensor

from oarlock.workers.layers.convolution import ConvolutionWeights
from oarlock.workers.layers.gated_delta import DeltaGates
from oarlock.workers.layers.kimi_delta import KimiGates
from oarlock.workers.recurrent import operations
from oarlock.workers.weights.source import WeightSource


def decay_left_out(patch: MonkeyPatch) -> None:
    gates = DeltaGates.__call__

    def patched(self: DeltaGates, b_and_a: Tensor) -> tuple[Tensor, Tensor]:
        log_decay, beta = gates(self, b_and_a)
        return log_decay * 0, beta

    patch.setattr(DeltaGates, "__call__", patched)


def beta_not_doubled(patch: MonkeyPatch) -> None:
    gates = DeltaGates.__call__

    def patched(self: DeltaGates, b_and_a: Tensor) -> tuple[Tensor, Tensor]:
        log_decay, beta = gates(self, b_and_a)
        return log_decay, beta / 2

    patch.setattr(DeltaGates, "__call__", patched)


def key_heads_shared_in_turn(patch: MonkeyPatch) -> None:
    """Value head h reads key head h modulo their number."""
    rule = operations.gated_delta_rule

    def patched(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Tensor:
        each = v.shape[1] // k.shape[1]
        return rule(q.repeat(1, each, 1), k.repeat(1, each, 1), v, *others)

    patch.setattr(operations, "gated_delta_rule", patched)


def gate_before_the_norm(patch: MonkeyPatch) -> None:
    norm = operations.gated_norm
    patch.setattr(
        operations, "gated_norm", lambda *inputs, gates_first, **how: norm(*inputs, gates_first=not gates_first, **how)
    )


def decays_of_the_next_channel(patch: MonkeyPatch) -> None:
    gates = KimiGates.__call__

    def patched(self: KimiGates, f: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        log_decay, beta = gates(self, f, b)
        return log_decay.roll(1, 2), beta

    patch.setattr(KimiGates, "__call__", patched)


def biases_of_the_first_rank(patch: MonkeyPatch) -> None:
    load = KimiGates.load

    def patched(self: KimiGates, weights: WeightSource) -> None:
        load(self, weights)
        bias = self.dt_bias.view(-1)
        weights.take(f"{self.name}.dt_bias", bias, shape=(self.spec.size,), start=0)

    patch.setattr(KimiGates, "load", patched)


def silu_for_the_sigmoid(patch: MonkeyPatch) -> None:
    norm = operations.gated_norm
    patch.setattr(operations, "gated_norm", lambda *inputs, gates_first, **_: norm(*inputs, gates_first=gates_first))


def taps_reversed(patch: MonkeyPatch) -> None:
    load = ConvolutionWeights.load

    def patched(self: ConvolutionWeights, weights: WeightSource) -> None:
        load(self, weights)
        self.weight = self.weight.flip(1).contiguous()

    patch.setattr(ConvolutionWeights, "load", patched)


def state_of_the_convolution_lost(patch: MonkeyPatch) -> None:
    """The second part of a prompt begins as the first does."""
    convolution = operations.causal_convolution

    def patched(x: Tensor, states: Tensor, weight: Tensor, bias: Any, step: Any, *, silu: bool) -> Tensor:
        return convolution(x, states, weight, bias, replace(step, reads=step.reads * 0), silu=silu)

    patch.setattr(operations, "causal_convolution", patched)


def state_of_the_rule_lost(patch: MonkeyPatch) -> None:
    rule = operations.gated_delta_rule

    def patched(*inputs: Any) -> Tensor:
        *others, step = inputs
        return rule(*others, replace(step, reads=step.reads * 0))

    patch.setattr(operations, "gated_delta_rule", patched)
