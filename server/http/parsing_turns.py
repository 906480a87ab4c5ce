"""Fair sharing of the event loop between the parsing of bodies and all other work.

A body is parsed in one go. Several bodies that arrive together could follow one another for seconds, while no other
request makes progress. So after some milliseconds of parsing, all other tasks get a turn of the loop before the next
body is parsed, and short bodies are parsed before long ones.
"""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import TypeVar

TURN_S = 0.004  # parsing time in one turn of the loop, before other tasks get theirs
_T = TypeVar("_T")


class ParsingTurns:
    """The time spent in one turn of the event loop, and the bodies that wait for the next turn."""

    def __init__(self) -> None:
        self._spent_s = 0.0  # parsing time in this turn
        self._is_scheduled = False  # whether the next turn is scheduled
        self._numbers = itertools.count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap: size, number, wake-up future

    async def run(self, size: int, work: Callable[[], _T]) -> _T:
        """Return the result of `work`, called as soon as this turn has time left. `size`: shorter bodies go first."""
        if self._spent_s > TURN_S or self._waiting:
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (size, next(self._numbers), turn))
            self._schedule()
            await turn
        begun = time.perf_counter()
        try:
            return work()
        finally:
            self._spent_s += time.perf_counter() - begun
            self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        """Begin a new turn, and wake the shortest body that waits. Callers that have left are skipped."""
        self._spent_s, self._is_scheduled = 0.0, False
        while self._waiting:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                self._schedule()
                return
