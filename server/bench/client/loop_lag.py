"""Watches whether the client itself is the bottleneck: how late its event loop is, and how much of a core it uses."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np

EVERY_S = 0.01
LATE_MS = 5.0  # a timer's own resolution is 1 ms
LATE_SHARE = 0.2  # of the gap between two chunks
BUSY = 0.9


class LoopLag:
    """Asks the event loop to wake it every 10 ms, and notes how late it does."""

    def __init__(self) -> None:
        self._late: list[float] = []
        self._due = 0.0
        self._handle: asyncio.TimerHandle | None = None
        self._began = self._cpu = 0.0

    def start(self) -> None:
        self._began, self._cpu = time.perf_counter(), time.process_time()
        self._wait(asyncio.get_running_loop())

    def _wait(self, loop: asyncio.AbstractEventLoop) -> None:
        self._due = time.perf_counter() + EVERY_S
        self._handle = loop.call_later(EVERY_S, self._wake, loop)

    def _wake(self, loop: asyncio.AbstractEventLoop) -> None:
        self._late.append(max(0.0, time.perf_counter() - self._due))
        self._wait(loop)

    def stop(self) -> dict[str, Any]:
        """Stop and return the figures: `lag_ms` (p50, p99, longest) and `cpu_share` (CPU seconds per second)."""
        if self._handle is not None:
            self._handle.cancel()
        lasted = time.perf_counter() - self._began
        late = 1e3 * np.array(self._late or [max(0.0, time.perf_counter() - self._due)])
        lag = {"p50": np.percentile(late, 50), "p99": np.percentile(late, 99), "max": late.max()}
        return {
            "lag_ms": {name: float(value) for name, value in lag.items()},
            "cpu_share": (time.process_time() - self._cpu) / lasted if lasted else 0.0,
        }


def warning(client: dict[str, Any], gap_ms: float) -> str | None:
    """One sentence when the client may have distorted the figures. `gap_ms`: the median time between two chunks."""
    lag, share = client["lag_ms"]["p99"], client["cpu_share"]
    if share > BUSY:
        return (
            f"The client used {share:.0%} of a core: it was a bottleneck itself, and times are too long. Use fewer "
            "streams, or several clients."
        )
    if lag > max(LATE_MS, LATE_SHARE * gap_ms):
        return (
            f"The client's event loop was {lag:.1f} ms late (p99): times may be too long by that much. It had too "
            "little of a core; run it beside a less busy machine or with fewer streams."
        )
    return None
