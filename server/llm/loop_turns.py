"""Fair turns on the event loop for work that is done in slices: one slice of all such work per round of the loop.

`asyncio.sleep(0)` between two slices lets other tasks run, but all tasks that do so run one slice each in every round:
a hundred large responses at a time would make each round a hundred slices long, and all other clients would wait.
"""

import asyncio
import weakref
from collections import deque


class LoopTurns:
    """Tasks of one event loop that wait for their next slice, first come first served."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = weakref.ref(loop)
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._is_scheduled = False

    async def wait(self) -> None:
        """Return in a later round of the loop, in which no other task has returned from this method."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting.append(future)
        if not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._admit)
        await future

    def _admit(self) -> None:
        """Admit the task that has waited longest, and schedule the next round if others wait."""
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():  # otherwise it was cancelled
                future.set_result(None)
                break
        loop = self._loop()
        self._is_scheduled = bool(self._waiting) and loop is not None
        if loop is not None and self._is_scheduled:
            loop.call_soon(self._admit)


_turns: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, LoopTurns] = weakref.WeakKeyDictionary()


async def turn() -> None:
    """Wait for the next slice of this task's work, after the slices of other waiting tasks."""
    loop = asyncio.get_running_loop()
    turns = _turns.get(loop)
    if turns is None:
        turns = _turns[loop] = LoopTurns(loop)
    await turns.wait()
