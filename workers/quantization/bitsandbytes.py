"""Reader of 4-bit weights of bitsandbytes as values in the model's dtype.

The values of a matrix follow one another row by row, two in a byte with the first in the high half. Each block of
values has a factor; blocks need not end at the end of a row.
"""

import contextlib
import json
import math
from typing import Any

import torch
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.workers.quantization.method import DenseWeight, Empty, WeightShard
from oarlock.workers.quantization.packed_integers import Span
from oarlock.workers.weights.source import WeightSource

_AT_ONCE = 1 << 22  # weights read at a time
_MAX_STATE_BYTES = 64 << 10  # maximum bytes of the settings stored with a weight; a few hundred are usual
_LONGEST = 80  # maximum characters of a value in an error


class BitsAndBytesLinearMethod:
    """`LinearMethod` of weights stored by bitsandbytes."""

    def __init__(self, state: str, block: int, nested_block: int | None) -> None:
        """Set the format. `state`: the tensor that describes a weight. `block`: weights that share a factor.

        `nested_block`: blocks whose factors share an outer factor, or None if factors are stored unquantised.
        """
        self._settings = (state, block, nested_block)

    def load(self, shard: WeightShard, weights: WeightSource, empty: Empty) -> DenseWeight:
        into = empty(shard.rows, shard.local_inputs)
        into[shard.rows - shard.padding :] = 0.0
        columns = slice(shard.first_input, shard.first_input + shard.local_inputs)
        for name, rows, first, view in shard.sources(weights, "weight", into):
            matrix = _Matrix(*self._settings, weights, name, rows, shard.inputs)
            at_once = max(1, _AT_ONCE // shard.inputs)
            for row in range(0, len(view), at_once):
                part = view[row : row + at_once]
                part.copy_(matrix.rows(Span(first + row, first + row + len(part)))[:, columns])
        return DenseWeight(into)


class _Matrix:
    """One stored matrix [rows, inputs]."""

    def __init__(
        self,
        state: str,
        block: int,
        nested_block: int | None,
        weights: WeightSource,
        name: str,
        rows: int,
        inputs: int,
    ) -> None:
        self._weights = weights
        self._name = name
        self._inputs = inputs
        self._block = block
        self._nested_block = nested_block
        self._code = self._vector("weight.quant_map", torch.float32)
        wanted = {"blocksize": block, "shape": [rows, inputs]}
        settings = self._state(state, wanted | ({"nested_blocksize": nested_block} if nested_block else {}))
        if nested_block:
            self._outer_code = self._vector("weight.nested_quant_map", torch.float32)
            self._outer = self._vector("weight.nested_absmax", torch.float32)
            self._offset = torch.tensor(float(settings["nested_offset"]))

    def _vector(self, kind: str, dtype: torch.dtype, span: Span | None = None) -> Tensor:
        name = f"{self._name}.{kind}"
        shape = self._weights.shape_of(name)
        assert shape is not None, "preflight has checked it"
        span = span or Span(0, shape[0])
        into = torch.empty((len(span), *shape[1:]), dtype=dtype)
        self._weights.take(name, into, shape=shape, start=span.first)
        return into.flatten()

    def _state(self, kind: str, wanted: dict[str, Any]) -> dict[str, Any]:
        """Return the settings stored with the weight. Raise `StartupError` if they differ from `wanted`."""
        shape = self._weights.shape_of(f"{self._name}.{kind}")
        is_short = shape is not None and math.prod(shape) <= _MAX_STATE_BYTES
        text = bytes(self._vector(kind, torch.uint8).tolist()) if is_short else b""
        state: Any = None
        with contextlib.suppress(ValueError, RecursionError):  # if it is not JSON, `state` stays None
            state = json.loads(text)
        wrong = _wrong_setting(state, wanted, has_offset=self._nested_block is not None)
        if wrong is not None:
            raise StartupError(
                f"tensor '{self._name}.{kind}' {wrong}.",
                "Download the checkpoint again, quantise the model with bitsandbytes' defaults, or use its unquantised "
                "checkpoint.",
            )
        return state

    def rows(self, rows: Span) -> Tensor:
        """Return the dequantised rows: float32 [rows, inputs]."""
        here = Span(rows.first * self._inputs, rows.stop * self._inputs)
        pairs = self._vector("weight", torch.uint8, here.of_words(2))  # rows begin at a byte
        codes = torch.stack((pairs >> 4, pairs & 15), 1).flatten()
        blocks = here.of_words(self._block)
        factors = self._factors(blocks).repeat_interleave(self._block)[here.within_words(self._block)]
        return (self._code[codes.int()] * factors).view(len(rows), self._inputs)

    def _factors(self, blocks: Span) -> Tensor:
        """Return the factors of the blocks: float32 [blocks]."""
        if self._nested_block is None:
            return self._vector("weight.absmax", torch.float32, blocks)
        codes = self._vector("weight.absmax", torch.uint8, blocks).int()
        outer = self._outer[torch.arange(blocks.first, blocks.stop) // self._nested_block]
        return self._outer_code[codes] * outer + self._offset


def _wrong_setting(state: object, wanted: dict[str, Any], *, has_offset: bool) -> str | None:
    """Return the fault in the settings of one weight, as a phrase to follow the tensor's name, or None."""
    if not isinstance(state, dict):
        return "has no JSON object of settings"
    for key, value in wanted.items():
        if key not in state:
            return f"names no {key}, which must be {value}"
        if state[key] != value:
            return f"has {key} {_shown(state[key])}, which is not supported: {value} would be"
    offset = state.get("nested_offset")
    if has_offset and not (isinstance(offset, int | float) and math.isfinite(offset)):
        given = "names no nested_offset" if offset is None else f"has nested_offset {_shown(offset)}"
        return f"{given}, which must be a finite number"
    return None


def _shown(value: object) -> str:
    return repr(value)[:_LONGEST]
