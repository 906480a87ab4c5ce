"""Causes of wrong tensors in layers with a recurrent state: weights, or a slot with another state than the sequence's
latest.

A verification computes each prompt in one step, its second half again from a checkpoint, and then one token of each
sequence in a step. So a generated token reads the state of the tokens before it from a slot, as does the first token
behind a checkpoint. Other tokens of a prompt read none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.layers.gated_delta_spec import GatedDeltaSpec
from oarlock.workers.layers.kimi_delta_spec import KimiDeltaSpec
from oarlock.workers.layers.mamba2_spec import CHANNELS, Mamba2Spec
from oarlock.workers.layers.short_convolution_spec import ShortConvolutionSpec
from oarlock.workers.recurrent.reference import KEY_EPSILON, kimi_gates
from oarlock.workers.verify.compare import Recorded
from oarlock.workers.verify.dequantised_reference import DequantisedWeights
from oarlock.workers.verify.request import Text

RecurrentSpec = GatedDeltaSpec | KimiDeltaSpec | Mamba2Spec | ShortConvolutionSpec
_CLOSE = 0.1  # relative distance below which a wrong value is explained


@dataclass(frozen=True, slots=True)
class WrongPart:
    """The columns of one rank of a wrong tensor of a sublayer with a state."""

    layer: int
    tensor: str
    columns: slice
    ours: Tensor  # float64 [T, columns]
    wrong: Tensor  # bool [T]: the wrong tokens


def slot_cause(part: WrongPart, spec: RecurrentSpec, folder: Path, weights: DequantisedWeights) -> str:
    """Return the state that explains the first wrong token, in words; "" if tokens are wrong that depend on no slot."""
    text, recorded = Text.read(folder), Recorded(folder)
    ends = list(accumulate(map(len, text.inputs()), initial=0))
    token = int(part.wrong.nonzero()[0])
    own = next(number for number, end in enumerate(ends[1:]) if token < end)
    count = token - ends[own]  # tokens before it
    is_resumed = count == text.checkpoints[own] > 0
    if not is_resumed and count < len(text.prompts[own]):
        return ""
    if any(part.wrong[start : start + (at or 1)].any() for start, at in zip(ends, text.checkpoints, strict=False)):
        return ""
    simulated = _simulated(part, spec, recorded, weights)
    least, best = _CLOSE, "its slot did not have the state of the tokens before it"
    for sequence, (start, end) in enumerate(pairwise(ends)):
        for number, found in enumerate(simulated.results(token, range(start, end))):
            distance = _distance(part.ours[token, : len(found)], found)
            if distance < least and (sequence, number) != (own, count):
                least, best = distance, _words(sequence, number, own, count, is_resumed=is_resumed)
    return best


def weights_of(spec: RecurrentSpec, *, is_convolution: bool) -> str:
    """Return the weights that a convolution or a recurrence depends on, in words."""
    if isinstance(spec, ShortConvolutionSpec):
        return "conv.weight, the gates before and after it"
    if is_convolution:
        return "conv1d.weight"
    return "A_log, dt_bias or D" if isinstance(spec, Mamba2Spec) else "A_log or dt_bias"


def _words(sequence: int, number: int, own: int, count: int, *, is_resumed: bool) -> str:
    """Return the words for a token that read the state after `number` tokens of `sequence`, in place of `count` tokens
    of its `own`. `is_resumed`: it read a checkpoint."""
    if number == 0:
        return f"it read no state, in place of the state after {count} tokens"
    if sequence != own:
        return f"it read the state after {number} tokens of sequence {sequence}, in place of {count} of its own {own}"
    if is_resumed:
        late = abs(number - count)
        tokens = f"{late} {'token' if late == 1 else 'tokens'} too {'early' if number < count else 'late'}"
        return (
            f"its checkpoint is {tokens}: it read the state after {number} tokens of its sequence, in place of {count}"
        )
    why = "its slot is stale or was not swapped" if number < count else "its slot was written too early"
    return f"{why}: it read the state after {number} tokens of its sequence, in place of {count}"


def _distance(ours: Tensor, other: Tensor) -> float:
    return ((ours - other).norm() / other.norm().clamp_min(1e-30)).item()


class _Simulated(Protocol):
    """A computation of a sublayer from the recorded tensors before it, with any state."""

    def results(self, token: int, before: range) -> Iterator[Tensor]:
        """Yield the result of `token` after none, the first, the first two of the tokens `before`, and so on: each
        [columns]."""


def _simulated(part: WrongPart, spec: RecurrentSpec, recorded: Recorded, weights: DequantisedWeights) -> _Simulated:
    """Return the computation of the wrong columns."""
    is_convolution = part.tensor.endswith("_conv")
    if isinstance(spec, ShortConvolutionSpec):
        return _short_convolution(part, spec, recorded, weights)
    if isinstance(spec, Mamba2Spec):
        kind = _mamba_convolution if is_convolution else _MambaRule
        return kind(part, spec, recorded, weights)
    if isinstance(spec, KimiDeltaSpec):
        return (_kimi_convolution if is_convolution else _KimiRule)(part, spec, recorded, weights)
    return (_delta_convolution if is_convolution else _DeltaRule)(part, spec, recorded, weights)


@dataclass(frozen=True, slots=True)
class _Convolution:
    """The convolution of some channels."""

    inputs: Tensor  # float64 [T, channels]
    weight: Tensor  # float64 [channels, taps]
    bias: Tensor | float
    gate: Tensor | None  # float64 [T, channels], which multiplies results; None: they pass through SiLU

    def results(self, token: int, before: range) -> Iterator[Tensor]:
        """Yield the results of `token` as `_Simulated` describes: each [channels]."""
        taps = self.weight.shape[1]
        for number in range(len(before) + 1):
            latest = before[max(0, number - taps + 1) : number]
            window = self.inputs[[*latest, token]]  # [up to taps, channels]
            total = (window.T * self.weight[:, taps - len(window) :]).sum(1) + self.bias
            yield F.silu(total) if self.gate is None else total * self.gate[token]


def _delta_convolution(
    part: WrongPart, spec: GatedDeltaSpec, recorded: Recorded, weights: DequantisedWeights
) -> _Convolution:
    inputs = recorded.truth(f"{part.layer}.delta_{part.tensor[0]}")[:, part.columns]
    rows = [spec.key_size, spec.key_size, spec.value_size]
    return _Convolution(inputs, _taps(_weight_of_part(part, spec.module, rows, weights))[part.columns], 0.0, None)


def _kimi_convolution(
    part: WrongPart, spec: KimiDeltaSpec, recorded: Recorded, weights: DequantisedWeights
) -> _Convolution:
    inputs = recorded.truth(f"{part.layer}.kimi_{part.tensor[0]}")[:, part.columns]
    found = _weight_of_part(part, spec.module, [spec.size] * 3, weights)
    return _Convolution(inputs, _taps(found)[part.columns], 0.0, None)


def _weight_of_part(part: WrongPart, inside: str, rows: list[int], weights: DequantisedWeights) -> Tensor:
    """Return the weight of the convolution of queries, keys or values, stored separately or fused. `rows`: of each."""
    kind, module = part.tensor[0], f"model.layers.{part.layer}.{inside}"
    if weights.has(f"{module}.{kind}_conv1d"):
        return weights.other(f"{module}.{kind}_conv1d.weight")
    return weights.other(f"{module}.conv1d.weight").split(rows)["qkv".index(kind)]


def _mamba_convolution(
    part: WrongPart, spec: Mamba2Spec, recorded: Recorded, weights: DequantisedWeights
) -> _Convolution:
    kind, module = part.tensor[0], f"model.layers.{part.layer}.{spec.module}"
    number = "xbc".index(kind)
    inputs = recorded.truth(f"{part.layer}.mamba_{kind}")[:, part.columns] * spec.scales[1 + number]

    def stored(name: str) -> Tensor:
        if weights.has(f"{module}.{CHANNELS[number]}"):
            return weights.other(f"{module}.{CHANNELS[number]}.{name}")
        return weights.other(f"{module}.conv1d.{name}").split([rows for rows, _ in spec.rows[1:4]])[number]

    bias = stored("bias").double()[part.columns] if spec.conv_bias else 0.0
    return _Convolution(inputs, _taps(stored("weight"))[part.columns], bias, None)


def _short_convolution(
    part: WrongPart, spec: ShortConvolutionSpec, recorded: Recorded, weights: DequantisedWeights
) -> _Convolution:
    b, gate, x = (recorded.truth(f"{part.layer}.conv_{one}")[:, part.columns] for one in "bcx")
    module = f"model.layers.{part.layer}.{spec.module}.conv"
    bias = weights.other(f"{module}.bias").double()[part.columns] if spec.bias else 0.0
    return _Convolution(b * x, _taps(weights.other(f"{module}.weight"))[part.columns], bias, gate)


def _taps(weight: Tensor) -> Tensor:
    """Return the weight of a convolution as float64 [channels, taps]."""
    return weight.double().reshape(len(weight), -1)


class _Rule:
    """A recurrence over a state of some heads, float64 [heads, ...]."""

    zeros: Tensor  # the state before the first token

    def results(self, token: int, before: range) -> Iterator[Tensor]:
        """Yield the results of `token` as `_Simulated` describes: each [heads * width]."""
        state = self.zeros
        yield self.result(token, state)
        for one in before:
            state = self.next(one, state)
            yield self.result(token, state)

    def next(self, token: int, state: Tensor) -> Tensor:
        """Return the state after `token`."""
        raise NotImplementedError

    def result(self, token: int, state: Tensor) -> Tensor:
        """Return the result of `token` after `state`: [heads * width]."""
        raise NotImplementedError


class _MambaRule(_Rule):
    """Mamba 2's recurrence of some heads, from the recorded convolutions and time steps; gated if no norm follows."""

    def __init__(self, part: WrongPart, spec: Mamba2Spec, recorded: Recorded, weights: DequantisedWeights) -> None:
        heads = slice(part.columns.start // spec.head_dim, part.columns.stop // spec.head_dim)

        def of(tensor: str) -> Tensor:
            return recorded.truth(f"{part.layer}.{tensor}")

        def by_head(tensor: str) -> Tensor:
            rows = of(tensor).unflatten(1, (spec.groups, -1))
            return rows.repeat_interleave(spec.num_heads // spec.groups, 1)[:, heads]

        module = f"model.layers.{part.layer}.{spec.module}"
        a_log, dt_bias, skip = (weights.other(f"{module}.{name}").double() for name in ("A_log", "dt_bias", "D"))
        steps = F.softplus(of("mamba_dt") * spec.scales[4] + dt_bias).clamp(spec.least_step, spec.most_step)
        self._decays = torch.exp(-a_log.exp() * steps)[:, heads]
        self._x = of("x_conv").unflatten(1, (spec.num_heads, -1))[:, heads]
        self._steps, self._skip = steps[:, heads], skip[heads]
        self._b, self._c = by_head("b_conv"), by_head("c_conv")
        is_gated = part.tensor == "gated_norm"
        self._gate = F.silu(of("mamba_gate")[:, part.columns] * spec.scales[0]) if is_gated else None
        self.zeros = self._x.new_zeros(self._x.shape[1], spec.head_dim, spec.state_width)

    def next(self, token: int, state: Tensor) -> Tensor:
        added = (self._x[token] * self._steps[token][:, None])[:, :, None] * self._b[token][:, None, :]
        return state * self._decays[token][:, None, None] + added

    def result(self, token: int, state: Tensor) -> Tensor:
        found = (self.next(token, state) * self._c[token][:, None, :]).sum(2) + self._x[token] * self._skip[:, None]
        return found.flatten() if self._gate is None else found.flatten() * self._gate[token]


class _GatedDeltaRule(_Rule):
    """The gated delta rule of some heads."""

    _keys: Tensor  # float64 [T, heads, key width], as `_queries`
    _queries: Tensor
    _values: Tensor  # float64 [T, heads, value width]
    _rates: Tensor  # float64 [T, heads]
    _decays: Tensor  # float64 [T, heads, 1 or key width]

    def next(self, token: int, state: Tensor) -> Tensor:
        """Return the state after `token`: [heads, key width, value width]."""
        state = state * self._decays[token][:, :, None]
        found = (state * self._keys[token][:, :, None]).sum(1)
        delta = (self._values[token] - found) * self._rates[token][:, None]
        return state + self._keys[token][:, :, None] * delta[:, None, :]

    def result(self, token: int, state: Tensor) -> Tensor:
        return (self.next(token, state) * self._queries[token][:, :, None]).sum(1).flatten()


def _unit(rows: Tensor, heads: int) -> Tensor:
    """Return the rows of `heads` heads, each divided by its length: [T, heads, width]."""
    rows = rows.unflatten(1, (heads, -1))
    return rows * torch.rsqrt((rows * rows).sum(2, keepdim=True) + KEY_EPSILON)


class _DeltaRule(_GatedDeltaRule):
    """The rule of a gated delta net, from the recorded convolutions and gates."""

    def __init__(self, part: WrongPart, spec: GatedDeltaSpec, recorded: Recorded, weights: DequantisedWeights) -> None:
        each = spec.num_value_heads // spec.num_key_heads

        def of(tensor: str) -> Tensor:
            return recorded.truth(f"{part.layer}.{tensor}")

        def unit(rows: Tensor) -> Tensor:
            return _unit(rows, spec.num_key_heads).repeat_interleave(each, 1)

        module = f"model.layers.{part.layer}.{spec.module}"
        a_log, dt_bias = (weights.other(f"{module}.{name}").double() for name in ("A_log", "dt_bias"))
        heads = slice(part.columns.start // spec.value_width, part.columns.stop // spec.value_width)
        self._queries = (unit(of("q_conv")) * spec.key_width**-0.5)[:, heads]
        self._keys = unit(of("k_conv"))[:, heads]
        self._values = of("v_conv").unflatten(1, (spec.num_value_heads, -1))[:, heads]
        self._rates = (torch.sigmoid(of("delta_b")) * (2 if spec.doubles_beta else 1))[:, heads]
        self._decays = torch.exp(-a_log.exp() * F.softplus(of("delta_a") + dt_bias))[:, heads, None]
        self.zeros = self._keys.new_zeros(*self._keys.shape[1:], self._values.shape[2])


class _KimiRule(_GatedDeltaRule):
    """The rule of Kimi delta attention, from the recorded convolutions and projections to gates."""

    def __init__(self, part: WrongPart, spec: KimiDeltaSpec, recorded: Recorded, weights: DequantisedWeights) -> None:
        heads = slice(part.columns.start // spec.head_width, part.columns.stop // spec.head_width)

        def of(tensor: str) -> Tensor:
            return recorded.truth(f"{part.layer}.{tensor}")

        def by_head(rows: Tensor) -> Tensor:
            return rows.unflatten(-1, (spec.num_heads, -1))

        module = f"model.layers.{part.layer}.{spec.module}"
        a_log, dt_bias = (weights.other(f"{module}.{name}").double().flatten() for name in ("A_log", "dt_bias"))
        projected = by_head(of("kimi_f")), of("kimi_b")
        gates = kimi_gates(*projected, a_log, by_head(dt_bias), lower_bound=spec.lower_bound)
        self._decays, self._rates = torch.exp(gates[0])[:, heads], gates[1][:, heads]
        self._queries = (_unit(of("q_conv"), spec.num_heads) * spec.head_width**-0.5)[:, heads]
        self._keys = _unit(of("k_conv"), spec.num_heads)[:, heads]
        self._values = by_head(of("v_conv"))[:, heads]
        self.zeros = self._keys.new_zeros(*self._keys.shape[1:], self._values.shape[2])
