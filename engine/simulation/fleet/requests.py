"""Requests of a trace as the simulation of a fleet reads them: lengths and shared beginnings, and no text.

A prompt's tokens are made when the request arrives, so that a trace of a hundred million tokens takes no memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from oarlock.engine.sampling_params import SamplingParams
from oarlock.engine.types import Request

_BASE, _DIGITS = 250, 7  # Python keeps one object for each whole number up to 256
_FILL = 255
TOKEN = 254  # the id of every generated token


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """Request of a trace. `at_s`: seconds since the trace begins."""

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: tuple[int, ...] = ()  # names of the prompt's blocks from its beginning: equal names, equal tokens
    block_tokens: int = 0  # 1: the names are the tokens themselves

    def engine_request(self, number: int) -> Request:
        """Make the request; `number`: its number, by which the rest of its prompt differs from all others."""
        tokens: list[int] = list(self.blocks) if self.block_tokens == 1 else []
        for name in () if self.block_tokens == 1 else self.blocks:
            tokens += _named(name, self.block_tokens, 1)
        del tokens[self.num_prompt_tokens :]
        tokens += _named(number, max(0, self.num_prompt_tokens - len(tokens)), 2)
        return Request(number, tuple(tokens), SamplingParams(max_tokens=self.num_output_tokens, seed=0))


def _named(name: int, count: int, kind: int) -> list[int]:
    """Make `count` tokens, the first of which encode `kind` and `name`."""
    digits = [kind]
    while name:
        name, digit = divmod(name, _BASE)
        digits.append(digit)
    return (digits + [_FILL] * (count - len(digits)))[:count]
