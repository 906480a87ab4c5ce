"""Causes of wrong tensors in gated delta nets: weights, or a slot of state that is not the sequence's latest.

A verification computes each prompt in one step, and then one token of each sequence in a step. So a generated token
reads the state of the tokens before it from a slot, and a token of a prompt reads none.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.layers.gated_delta_spec import GatedDeltaSpec
from oarlock.workers.verify.compare import Recorded
from oarlock.workers.verify.dequantised_reference import DequantisedWeights
from oarlock.workers.verify.request import Text

_CLOSE = 0.1  # relative distance below which a wrong value is explained
_EPSILON = 1e-6  # of the lengths of queries and keys
_TOKENS = 8  # wrong tokens that are explained; each needs the states of all tokens before it


@dataclass(frozen=True, slots=True)
class WrongPart:
    """The columns of one rank of a wrong tensor of a gated delta net."""

    layer: int
    tensor: str
    columns: slice
    ours: Tensor  # float64 [T, columns]
    wrong: Tensor  # bool [T]: the wrong tokens


def slot_cause(part: WrongPart, spec: GatedDeltaSpec, folder: Path, weights: DequantisedWeights) -> str:
    """Return the state that explains the wrong tokens, in words; "" if no token of a prompt may be wrong and none
    does."""
    text, recorded = Text.read(folder), Recorded(folder)
    sequences = _Sequences(text)
    wrong = part.wrong.nonzero().flatten().tolist()
    if not wrong or any(token not in sequences.generated for token in wrong):
        return ""
    is_convolution = part.tensor.endswith("_conv")
    simulated = _Convolution(part, spec, recorded, weights) if is_convolution else _Rule(part, spec, recorded, weights)
    first_wrong = [token for token in wrong if token - 1 not in wrong][:_TOKENS]
    for words, before in sequences.states():
        if all(_explains(part, simulated, token, before(token)) for token in first_wrong):
            return words
    return "the state in its slot is not that of the tokens before it"


def _explains(part: WrongPart, simulated: "_Convolution | _Rule", token: int, before: list[int]) -> bool:
    """Return whether the state after the tokens `before` gives the wrong values of `token`."""
    found = simulated.result(token, before)
    ours = part.ours[token, : len(found)]
    return bool((found - ours).norm() < _CLOSE * ours.norm().clamp_min(1e-30))


class _Sequences:
    """Tokens of the recorded sequences, whose rows follow each other."""

    def __init__(self, text: Text) -> None:
        lengths = [len(sequence) for sequence in text.inputs()]
        self._ends = torch.tensor([0, *lengths]).cumsum(0).tolist()
        self._prompts = [len(prompt) for prompt in text.prompts]
        spans = zip(pairwise(self._ends), self._prompts, strict=True)
        self.generated = {token for (start, end), prompt in spans for token in range(start + prompt, end)}

    def states(self) -> Iterator[tuple[str, Callable[[int], list[int]]]]:
        """Yield (words, function from a generated token to the tokens whose state it may have read)."""
        yield "its slot was not swapped: it read the state of one step earlier", lambda token: self._past(token)[:-1]
        yield "it read no state, as at the start of a sequence", lambda token: []
        for other in range(len(self._prompts)):
            yield f"it read the state of sequence {other}", partial(self._past_of, other)

    def _of(self, token: int) -> int:
        return next(index for index, end in enumerate(self._ends[1:]) if token < end)

    def _past(self, token: int) -> list[int]:
        return list(range(self._ends[self._of(token)], token))

    def _past_of(self, other: int, token: int) -> list[int]:
        """Return the tokens that sequence `other` has after the step before that of `token`."""
        own = self._of(token)
        step = token - self._ends[own] - self._prompts[own]  # 0: the first step after the prompts
        start, end = self._ends[other], self._ends[other + 1]
        return list(range(start, min(end, start + self._prompts[other] + step)))


class _Convolution:
    """Results of the convolution of some channels, from the recorded projections."""

    def __init__(self, part: WrongPart, spec: GatedDeltaSpec, recorded: Recorded, weights: DequantisedWeights) -> None:
        kind = part.tensor[0]
        self._inputs = recorded.truth(f"{part.layer}.delta_{kind}")[:, part.columns]
        self._weight = _convolution(weights, spec, part.layer, kind)[part.columns]
        self._taps = spec.taps_of_convolution

    def result(self, token: int, before: list[int]) -> Tensor:
        """Return the result of `token` after the tokens `before`: [channels]."""
        latest = before[-(self._taps - 1) :]
        window = self._inputs[[*latest, token]]  # [up to taps, channels]
        return F.silu((window.T * self._weight[:, self._taps - len(window) :]).sum(1))


class _Rule:
    """Results of the gated delta rule of some heads, from the recorded convolutions and gates."""

    def __init__(self, part: WrongPart, spec: GatedDeltaSpec, recorded: Recorded, weights: DequantisedWeights) -> None:
        each = spec.num_value_heads // spec.num_key_heads

        def of(tensor: str) -> Tensor:
            return recorded.truth(f"{part.layer}.{tensor}")

        def unit(rows: Tensor) -> Tensor:
            rows = rows.unflatten(1, (spec.num_key_heads, -1))
            rows = rows * torch.rsqrt((rows * rows).sum(2, keepdim=True) + _EPSILON)
            return rows.repeat_interleave(each, 1)

        module = f"model.layers.{part.layer}.{spec.module}"
        a_log, dt_bias = (weights.other(f"{module}.{name}").double() for name in ("A_log", "dt_bias"))
        heads = slice(part.columns.start // spec.value_width, part.columns.stop // spec.value_width)
        self._queries = (unit(of("q_conv")) * spec.key_width**-0.5)[:, heads]
        self._keys = unit(of("k_conv"))[:, heads]
        self._values = of("v_conv").unflatten(1, (spec.num_value_heads, -1))[:, heads]
        self._rates = (torch.sigmoid(of("delta_b")) * (2 if spec.doubles_beta else 1))[:, heads]
        self._decays = torch.exp(-a_log.exp() * F.softplus(of("delta_a") + dt_bias))[:, heads]

    def result(self, token: int, before: list[int]) -> Tensor:
        """Return the result of `token` after the tokens `before`: [heads * value width]."""
        heads, width = self._keys.shape[1:]
        state = self._keys.new_zeros(heads, width, self._values.shape[2])
        for one in (*before, token):
            state = state * self._decays[one][:, None, None]
            found = (state * self._keys[one][:, :, None]).sum(1)
            delta = (self._values[one] - found) * self._rates[one][:, None]
            state = state + self._keys[one][:, :, None] * delta[:, None, :]
        return (state * self._queries[token][:, :, None]).sum(1).flatten()


def _convolution(weights: DequantisedWeights, spec: GatedDeltaSpec, layer: int, kind: str) -> Tensor:
    """Return the taps of the channels of q, k or v: float64 [channels, taps]."""
    module = f"model.layers.{layer}.{spec.module}"
    if weights.has(f"{module}.{kind}_conv1d"):
        found = weights.other(f"{module}.{kind}_conv1d.weight")
    else:
        rows = [spec.key_size, spec.key_size, spec.value_size]
        found = weights.other(f"{module}.conv1d.weight").split(rows)["qkv".index(kind)]
    return found.double().reshape(len(found), -1)
