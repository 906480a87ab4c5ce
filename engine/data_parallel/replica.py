"""One of several replicas: its engine, which is started again when it dies, and the load of its requests.

A replica knows its own engine alone; `replicas.py` decides which one a request goes to. Of replicas that start side by
side, `JoinedProgress` shows the one furthest behind.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial

from oarlock.engine.client import EngineClient
from oarlock.engine.config import OnProgress
from oarlock.engine.data_parallel.choice import Load
from oarlock.engine.errors import EngineDeadError, StartupError, UnavailableError
from oarlock.engine.stats import EngineState, EngineStats, RequestHistory
from oarlock.engine.types import Request, TokenEvent

logger = logging.getLogger("oarlock.engine.replicas")

MAX_DEATHS = 3  # so many within `DEATHS_S` are a fault that a new start does not mend
DEATHS_S = 600.0

# One text, whichever replica it is about.
_OTHER_NUMBERS = StartupError(
    "The replicas would compute different numbers: their model, types or kernels differ.",
    "See whether files of the model or of its kernels have changed since the start, then start again.",
)
_NOTHING_RUNS = {
    "state": "dead",
    "num_requests_running": 0,
    "num_requests_waiting": 0,
    "num_waiting_tokens": 0,
    "kv_cache_usage": 0.0,
    "num_blocks_free": 0,
    "num_blocks_cached": 0,
    "num_blocks_held": 0,
}
StartReplica = Callable[[int, int], Awaitable[EngineClient]]  # its number, and how often it was started before


class Replica:
    """A running engine with its number and load, made once it is ready."""

    def __init__(self, number: int, client: EngineClient, start: StartReplica) -> None:
        """`start`: starts the engine again after each death."""
        self.number = number
        self.client = client
        info = client.info
        self.load = Load(
            max_open=info.max_num_seqs + info.max_waiting_requests, max_waiting_tokens=info.max_waiting_tokens
        )
        self._start = start
        self._num_starts = 1
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)

    @property
    def is_alive(self) -> bool:
        return self.client.is_alive

    async def stats(self) -> EngineStats:
        """Statistics of the engine. Counters begin again with a new engine; a dead one runs nothing."""
        stats = await self.client.stats()
        return stats if self.is_alive else replace(stats, **_NOTHING_RUNS)

    async def state(self) -> EngineState | None:
        """The live state; None where the engine is dead."""
        return await self.client.state()

    async def histories(self, request_ids: Sequence[int]) -> list[RequestHistory]:
        """Histories of those of these requests that the present engine knows."""
        return await self.client.histories(request_ids)

    async def generate(self, request: Request, num_new_tokens: int) -> AsyncGenerator[TokenEvent, None]:
        """Generate as `EngineClient.generate` does. `num_new_tokens`: prompt tokens that this request needs first.

        Raises `UnavailableError` when the engine dies: the same request may be sent again, and goes to another replica.
        It is not sent again here: part of its answer may be on its way, and it may be the cause of the death.
        """
        load = self.load
        load.num_open += 1
        load.num_waiting_tokens += num_new_tokens
        try:
            async with aclosing(self.client.generate(request)) as events:
                async for event in events:
                    load.num_waiting_tokens -= num_new_tokens
                    num_new_tokens = 0
                    yield event
        except EngineDeadError as error:
            raise UnavailableError(
                f"The engine that worked on this request has stopped (replica {self.number}). Others serve on: the "
                "same request may be sent again.",
                "replica_lost",
            ) from error
        finally:
            load.num_open -= 1
            load.num_waiting_tokens -= num_new_tokens

    async def died(self) -> None:
        """Wait until its engine has ended; by then all its requests have."""
        await self.client.dead.wait()
        self._deaths.append(time.monotonic())
        cause = self.client.death_cause or "its process has ended"
        logger.error('event=replica_lost engine=%d exit_code=%s cause="%s"', self.number, self.client.exit_code, cause)

    @property
    def dies_too_often(self) -> bool:
        return len(self._deaths) == MAX_DEATHS and self._deaths[-1] - self._deaths[0] < DEATHS_S

    async def restart(self, numbers_digest: str) -> None:
        """Start an engine in place of the one that died; it must compute the same numbers as the others. Raises
        `StartupError`."""
        began = time.monotonic()
        client = await self._start(self.number, self._num_starts)
        if client.info.numbers_digest != numbers_digest:
            await client.close(0.0)
            raise _OTHER_NUMBERS
        self.client = client
        self._num_starts += 1
        logger.info("event=replica_ready engine=%d seconds=%.1f", self.number, time.monotonic() - began)


class ReplicaHandle:
    """Handle on the replica chosen for a prompt: all its requests go there, and the prompt is computed once."""

    def __init__(self, replica: Replica, num_new_tokens: int) -> None:
        self.number = replica.number
        self._replica = replica
        self._num_new_tokens = num_new_tokens

    def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Events of one request, as of `Replica.generate`."""
        num_new_tokens, self._num_new_tokens = self._num_new_tokens, 0
        return self._replica.generate(request, num_new_tokens)


async def start_together(starts: Sequence[Awaitable[EngineClient]]) -> list[EngineClient]:
    """Await the starts of all engines. When one fails or their numbers differ, close all and raise `StartupError`."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        clients = list(await asyncio.gather(*tasks))
        if len({client.info.numbers_digest for client in clients}) > 1:
            raise _OTHER_NUMBERS
        return clients
    except BaseException:
        for task in tasks:
            task.cancel()
        for started in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(started, EngineClient):
                await started.close(0.0)
        raise


class JoinedProgress:
    """Passes on the phase and share of the replica that is furthest behind, whenever those change."""

    def __init__(self, num_replicas: int, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._phases: list[str] = []  # in the order in which they were first seen
        self._places: list[tuple[int, float, str]] = [(-1, 0.0, "")] * num_replicas  # place of the phase, share, detail
        self._shown: tuple[int, float, str] | None = None

    def of(self, number: int) -> OnProgress:
        """Callback to which replica `number` reports its progress."""
        return partial(self._report, number)

    def _report(self, number: int, phase: str, fraction: float, detail: str = "") -> None:
        if phase not in self._phases:
            self._phases.append(phase)
        self._places[number] = self._phases.index(phase), fraction, detail
        last = min(self._places)
        if last[0] >= 0 and last != self._shown:
            self._shown = last
            self._on_progress(self._phases[last[0]], *last[1:])
