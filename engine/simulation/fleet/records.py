"""Times of single requests of a simulated fleet, and quantiles of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from oarlock.engine.types import FinishReason, TokenEvent, TokenEvents

PERCENTILES = (50, 95, 99)


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
        self._leaps: list[tuple[np.ndarray, int]] = []  # gaps, and how many requests had them all

    def tokens(self, events: TokenEvents, ends_s: np.ndarray) -> int:
        """Record the events of a step, or of a leap whose steps ended at `ends_s`, float64 [steps]. Returns how many
        requests ended with it."""
        now_s, last_s, gaps_s = float(ends_s[-1]), self._last_s, self._gaps_s
        self.num_tokens += len(events.request_ids)
        for number in events.request_ids:
            gaps_s.append(now_s - last_s[number])
            last_s[number] = now_s
        num_leapt = 0
        for event in events.others:
            if not event.token_ids:
                continue
            number, first_s = event.request_id, float(ends_s[0] if len(event.token_ids) > 1 else now_s)
            num_leapt += len(event.token_ids) > 1
            self.num_tokens += len(event.token_ids)
            if number in last_s:
                gaps_s.append(first_s - last_s[number])
            else:
                self.ttft_s[number] = first_s - self.arrived_s[number]
            last_s[number] = now_s
        if num_leapt:
            self._leaps.append((np.diff(ends_s), num_leapt))
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
        leapt = [np.repeat(gaps, count) for gaps, count in self._leaps]
        return np.concatenate([np.array(self._gaps_s, np.float64), *leapt])


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
