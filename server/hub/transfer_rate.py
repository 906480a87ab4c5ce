"""Progress, speed and remaining time of a transfer."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from oarlock.server.config.options import format_size

_WINDOW_S = 10.0  # the speed is measured over this time


class TransferRate:
    """Bytes counted by several threads, out of `total`."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._clock = clock
        self._lock = threading.Lock()
        self._here = 0
        self._received = 0  # since the start; what was here before took no time
        self._samples: deque[tuple[float, int]] = deque([(clock(), 0)])

    def add(self, count: int, *, is_new: bool = True) -> None:
        with self._lock:
            self._here += count
            self._received += count if is_new else 0

    @property
    def fraction(self) -> float:
        return min(1.0, self._here / self._total) if self._total else 1.0

    def describe(self) -> str:
        """Progress as text: `1.2 GiB of 4.9 GiB, 35.1 MiB/s, 1 min 48 s left`, with the speed of the last seconds."""
        now, received = self._clock(), self._received
        while len(self._samples) > 1 and now - self._samples[1][0] >= _WINDOW_S:
            self._samples.popleft()
        since, before = self._samples[0]
        self._samples.append((now, received))
        words = f"{format_size(self._here)} of {format_size(self._total)}"
        if now <= since or self._here >= self._total:
            return words
        speed = (received - before) / (now - since)
        words += f", {format_size(int(speed))}/s"
        return f"{words}, {in_words((self._total - self._here) / speed)} left" if speed > 0 else words


def in_words(seconds: float) -> str:
    """Duration as text: `45 s`, `1 min 48 s`, `2 h 05 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
