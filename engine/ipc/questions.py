"""Questions of the frontend that the engine answers by number: statistics, a cache reset, the live state, histories.

The messages of the last two are here.
"""

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

from oarlock.engine.ipc.frames import Frame, FrameError, encode
from oarlock.engine.stats import EngineState, RequestHistory


def ask_state(number: int) -> bytes:
    return encode({"kind": "state", "number": number})


def state(number: int, value: EngineState) -> bytes:
    return encode({"kind": "state", "number": number, "state": value})


def read_state(frame: Frame) -> tuple[int, EngineState]:
    """Raises `FrameError`."""
    number, value = frame.head.get("number"), frame.head.get("state")
    if not isinstance(number, int) or not isinstance(value, dict) or not EngineState.__required_keys__ <= value.keys():
        raise FrameError("a bad 'state' frame: a number and the members of a state are required")
    return number, cast(EngineState, value)


def ask_histories(request_ids: Sequence[int]) -> Callable[[int], bytes]:
    """Write the question for the histories of these requests."""
    return lambda number: encode({"kind": "histories", "number": number, "ids": list(request_ids)})


def read_ids(frame: Frame) -> list[int]:
    """Raises `FrameError`."""
    ids = frame.head.get("ids")
    if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
        raise FrameError("a bad 'histories' frame: a list of ids is required")
    return ids


def histories(number: int, values: list[RequestHistory]) -> bytes:
    """Write the answer: the histories of those requests that are known."""
    return encode({"kind": "histories", "number": number, "histories": values})


def read_histories(frame: Frame) -> tuple[int, list[RequestHistory]]:
    """Raises `FrameError`."""
    number, values = frame.head.get("number"), frame.head.get("histories")
    if not isinstance(number, int) or not isinstance(values, list):
        raise FrameError("a bad 'histories' frame: a number and a list are required")
    return number, cast(list[RequestHistory], values)


class Questions:
    """Questions that wait for an answer, by number."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        """`write`: to the engine's socket."""
        self._write = write
        self._numbers = itertools.count(1)
        self._open: dict[int, asyncio.Future[Any]] = {}

    async def ask(self, frame: Callable[[int], bytes]) -> Any:
        """Ask the question `frame(number)` and wait for its answer. Raises the error that `fail_all` is given."""
        number = next(self._numbers)
        future = self._open[number] = asyncio.get_running_loop().create_future()
        self._write(frame(number))
        try:
            return await future
        finally:
            self._open.pop(number, None)

    def answer(self, number: int, value: Any) -> None:
        """Pass an answer to the caller that waits for it; drop it if there is none any more."""
        future = self._open.pop(number, None)
        if future is not None and not future.done():
            future.set_result(value)

    def fail_all(self, error: Exception) -> None:
        """Fail all open questions: the engine will answer none of them."""
        for future in self._open.values():
            if not future.done():
                future.set_exception(error)
