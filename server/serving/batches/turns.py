"""How many requests of batches run at a time: beside other requests only half of what the engine's rows would hold."""

from __future__ import annotations

import asyncio

from server.serving.server_state import ServerState


class Turns:
    """A context manager that is entered once for each request of a batch, in the order of asking."""

    def __init__(self, num_rows: int, state: ServerState) -> None:
        """`num_rows`: sequences that the engine runs at a time."""
        self.size = num_rows
        self._beside_others = max(1, num_rows // 2)
        self._all = asyncio.Semaphore(num_rows)
        self._state = state
        self._num_open = 0

    async def __aenter__(self) -> None:
        await self._all.acquire()
        try:
            while self._state.num_in_flight and self._num_open >= self._beside_others:
                await self._state.idle.wait()
        except BaseException:
            self._all.release()
            raise
        self._num_open += 1

    async def __aexit__(self, *_: object) -> None:
        self._num_open -= 1
        self._all.release()
