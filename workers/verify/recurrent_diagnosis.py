"""Causes of wrong tensors in gated delta nets and short convolutions: weights, or a slot with another state than the
sequence's latest.

A verification computes each prompt in one step, and then one token of each sequence in a step. So a generated token
reads the state of the tokens before it from a slot, and a token of a prompt reads none.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.layers.gated_delta_spec import GatedDeltaSpec
from oarlock.workers.layers.short_convolution_spec import ShortConvolutionSpec
from oarlock.workers.recurrent.reference import KEY_EPSILON
from oarlock.workers.verify.compare import Recorded
from oarlock.workers.verify.dequantised_reference import DequantisedWeights
from oarlock.workers.verify.request import Text

_CLOSE = 0.1  # relative distance below which a wrong value is explained


@dataclass(frozen=True, slots=True)
class WrongPart:
    """The columns of one rank of a wrong tensor of a sublayer with a state."""

    layer: int
    tensor: str
    columns: slice
    ours: Tensor  # float64 [T, columns]
    wrong: Tensor  # bool [T]: the wrong tokens


def slot_cause(
    part: WrongPart, spec: GatedDeltaSpec | ShortConvolutionSpec, folder: Path, weights: DequantisedWeights
) -> str:
    """Return the state that explains the first wrong token, in words; "" if it is in a prompt, which reads no state."""
    text, recorded = Text.read(folder), Recorded(folder)
    ends = list(accumulate(map(len, text.inputs()), initial=0))
    token = int(part.wrong.nonzero()[0])
    own = next(number for number, end in enumerate(ends[1:]) if token < end)
    count = token - ends[own]  # tokens before it
    if count < len(text.prompts[own]):
        return ""
    if isinstance(spec, ShortConvolutionSpec):
        simulated = _ShortConvolution(part, spec, recorded, weights)
    else:
        kind = _Convolution if part.tensor.endswith("_conv") else _Rule
        simulated = kind(part, spec, recorded, weights)
    least, best = _CLOSE, "its slot had not the state of the tokens before it"
    for sequence, (start, end) in enumerate(pairwise(ends)):
        for number, found in enumerate(simulated.results(token, range(start, end))):
            distance = _distance(part.ours[token, : len(found)], found)
            if distance < least and (sequence, number) != (own, count):
                least, best = distance, _words(sequence, number, own, count)
    return best


def _words(sequence: int, number: int, own: int, count: int) -> str:
    """Return the words for a token that read the state after `number` tokens of `sequence`, in place of `count` tokens
    of its `own`."""
    if number == 0:
        return f"it read no state, in place of the state after {count} tokens"
    if sequence == own:
        why = "its slot is stale or was not swapped" if number < count else "its slot was written too early"
        return f"{why}: it read the state after {number} tokens of its sequence, in place of {count}"
    return f"it read the state after {number} tokens of sequence {sequence}, in place of {count} of its own {own}"


def _distance(ours: Tensor, other: Tensor) -> float:
    return ((ours - other).norm() / other.norm().clamp_min(1e-30)).item()


class _Convolution:
    """Results of the convolution of some channels, from the recorded projections."""

    def __init__(self, part: WrongPart, spec: GatedDeltaSpec, recorded: Recorded, weights: DequantisedWeights) -> None:
        kind = part.tensor[0]
        self._inputs = recorded.truth(f"{part.layer}.delta_{kind}")[:, part.columns]
        self._weight = _convolution(weights, spec, part.layer, kind)[part.columns]

    def results(self, token: int, before: range) -> Iterator[Tensor]:
        """Yield the result of `token` after none, the first, the first two of the tokens `before`, and so on: each
        [channels]."""
        taps = self._weight.shape[1]
        for number in range(len(before) + 1):
            latest = before[max(0, number - taps + 1) : number]
            window = self._inputs[[*latest, token]]  # [up to taps, channels]
            yield F.silu((window.T * self._weight[:, taps - len(window) :]).sum(1))


class _ShortConvolution:
    """Results of the gated convolution of some channels, from the recorded projections."""

    def __init__(
        self, part: WrongPart, spec: ShortConvolutionSpec, recorded: Recorded, weights: DequantisedWeights
    ) -> None:
        b, self._gate, x = (recorded.truth(f"{part.layer}.conv_{one}")[:, part.columns] for one in "bcx")
        module = f"model.layers.{part.layer}.{spec.module}.conv"
        weight = weights.other(f"{module}.weight").double()
        self._inputs, self._weight = b * x, weight.reshape(len(weight), -1)[part.columns]
        self._bias = weights.other(f"{module}.bias").double()[part.columns] if spec.bias else 0.0

    def results(self, token: int, before: range) -> Iterator[Tensor]:
        """Yield the results of `token` as `_Convolution.results` does."""
        taps = self._weight.shape[1]
        for number in range(len(before) + 1):
            latest = before[max(0, number - taps + 1) : number]
            window = self._inputs[[*latest, token]]  # [up to taps, channels]
            total = (window.T * self._weight[:, taps - len(window) :]).sum(1)
            yield (total + self._bias) * self._gate[token]


class _Rule:
    """Results of the gated delta rule of some heads, from the recorded convolutions and gates."""

    def __init__(self, part: WrongPart, spec: GatedDeltaSpec, recorded: Recorded, weights: DequantisedWeights) -> None:
        each = spec.num_value_heads // spec.num_key_heads

        def of(tensor: str) -> Tensor:
            return recorded.truth(f"{part.layer}.{tensor}")

        def unit(rows: Tensor) -> Tensor:
            rows = rows.unflatten(1, (spec.num_key_heads, -1))
            rows = rows * torch.rsqrt((rows * rows).sum(2, keepdim=True) + KEY_EPSILON)
            return rows.repeat_interleave(each, 1)

        module = f"model.layers.{part.layer}.{spec.module}"
        a_log, dt_bias = (weights.other(f"{module}.{name}").double() for name in ("A_log", "dt_bias"))
        heads = slice(part.columns.start // spec.value_width, part.columns.stop // spec.value_width)
        self._queries = (unit(of("q_conv")) * spec.key_width**-0.5)[:, heads]
        self._keys = unit(of("k_conv"))[:, heads]
        self._values = of("v_conv").unflatten(1, (spec.num_value_heads, -1))[:, heads]
        self._rates = (torch.sigmoid(of("delta_b")) * (2 if spec.doubles_beta else 1))[:, heads]
        self._decays = torch.exp(-a_log.exp() * F.softplus(of("delta_a") + dt_bias))[:, heads]

    def results(self, token: int, before: range) -> Iterator[Tensor]:
        """Yield the result of `token` after none, the first, the first two of the tokens `before`, and so on: each
        [heads * value width]."""
        heads, width = self._keys.shape[1:]
        state = self._keys.new_zeros(heads, width, self._values.shape[2])
        yield self._result(token, state)
        for one in before:
            state = self._next(one, state)
            yield self._result(token, state)

    def _next(self, token: int, state: Tensor) -> Tensor:
        """Return the state after `token`: [heads, key width, value width]."""
        state = state * self._decays[token][:, None, None]
        found = (state * self._keys[token][:, :, None]).sum(1)
        delta = (self._values[token] - found) * self._rates[token][:, None]
        return state + self._keys[token][:, :, None] * delta[:, None, :]

    def _result(self, token: int, state: Tensor) -> Tensor:
        return (self._next(token, state) * self._queries[token][:, :, None]).sum(1).flatten()


def _convolution(weights: DequantisedWeights, spec: GatedDeltaSpec, layer: int, kind: str) -> Tensor:
    """Return the taps of the channels of q, k or v: float64 [channels, taps]."""
    module = f"model.layers.{layer}.{spec.module}"
    if weights.has(f"{module}.{kind}_conv1d"):
        found = weights.other(f"{module}.{kind}_conv1d.weight")
    else:
        rows = [spec.key_size, spec.key_size, spec.value_size]
        found = weights.other(f"{module}.conv1d.weight").split(rows)["qkv".index(kind)]
    return found.double().reshape(len(found), -1)
