"""Requests of a simulated fleet: as a trace gives them, and the recorded times of each with their quantiles.

A traced request has lengths and shared beginnings, and no text. A prompt's tokens are made when the request arrives, so
that a trace of a hundred million tokens takes no memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from oarlock.engine.sampling_params import SamplingParams
from oarlock.engine.types import FinishReason, Request, TokenEvent, TokenEvents

PERCENTILES = (50, 95, 99)
_BASE, _DIGITS = 250, 7  # Python keeps one object for each whole number up to 256
_FILL = 255
TOKEN = 254  # the id of every generated token


class Records:
    """Records of all replicas. Requests are named by their number in the trace."""

    def __init__(self) -> None:
        self.arrived_s: dict[int, float] = {}
        self.ttft_s: dict[int, float] = {}
        self.e2e_s: dict[int, float] = {}
        self.num_refused = 0
        self.num_tokens = 0  # generated
        self.ended_s = 0.0  # the last end of a request
        self._last_s: dict[int, float] = {}  # when a request had its newest token
        self._gaps_s: list[float] = []  # between tokens
        self._fast_forwards: list[tuple[np.ndarray, int]] = []  # gaps, and how many requests had them all

    def tokens(self, events: TokenEvents, ends_s: np.ndarray) -> int:
        """Record the events of a step, or of a fast-forward whose steps ended at `ends_s`, float64 [steps]. Returns how
        many requests ended with it."""
        now_s, last_s, gaps_s = float(ends_s[-1]), self._last_s, self._gaps_s
        self.num_tokens += len(events.request_ids)
        for number in events.request_ids:
            gaps_s.append(now_s - last_s[number])
            last_s[number] = now_s
        num_forwarded = 0
        for event in events.others:
            if not event.token_ids:
                continue
            number, first_s = event.request_id, float(ends_s[0] if len(event.token_ids) > 1 else now_s)
            num_forwarded += len(event.token_ids) > 1
            self.num_tokens += len(event.token_ids)
            if number in last_s:
                gaps_s.append(first_s - last_s[number])
            else:
                self.ttft_s[number] = first_s - self.arrived_s[number]
            last_s[number] = now_s
        if num_forwarded:
            self._fast_forwards.append((np.diff(ends_s), num_forwarded))
        return self.ended(events.others, now_s)

    def ended(self, events: Iterable[TokenEvent], now_s: float) -> int:
        """Record the ends among `events`, and return their number."""
        count = 0
        for event in events:
            if event.finish_reason is None:
                continue
            count += 1
            self._last_s.pop(event.request_id, None)
            self.ended_s = max(self.ended_s, now_s)
            if event.finish_reason is not FinishReason.ERROR:
                self.e2e_s[event.request_id] = now_s - self.arrived_s[event.request_id]
        return count

    def gaps_s(self) -> np.ndarray:
        """Every gap between two tokens of a request, float64 [n], in no order."""
        forwarded = [np.repeat(gaps, count) for gaps, count in self._fast_forwards]
        return np.concatenate([np.array(self._gaps_s, np.float64), *forwarded])


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Quantiles of one measure, in seconds; None where nothing was measured."""

    p50: float
    p95: float
    p99: float

    @staticmethod
    def of(values: Sequence[float] | np.ndarray) -> Quantiles | None:
        if not len(values):
            return None
        return Quantiles(*(float(value) for value in np.percentile(np.asarray(values), PERCENTILES)))


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
