"""Many requests at once, each with a time limit, each answer checked.

What is sent comes from `corpus.py`, `mutate.py` and `wire.py`.
"""

from __future__ import annotations

import asyncio
import collections
import random
import time
from collections.abc import Awaitable, Iterable

import httpx

from oarlock.server.http.middleware import POOLING
from tests.e2e.running import RunningServer
from tests.fuzz import wire
from tests.fuzz.bodies import Route
from tests.fuzz.checks import problem_of
from tests.fuzz.corpus import JSON, Case, corpus
from tests.fuzz.mutate import mutated

AT_ONCE = 12
WITHIN_S = 60.0  # a server that sheds load and has a time limit of 10 s for requests has no reason to take longer
LEAVE_EARLY = 0.03  # so many of the mutations are left before their answer


class Flood:
    """Sends requests, checks their answers and counts them."""

    def __init__(self, server: RunningServer, foreign: frozenset[str] = POOLING) -> None:
        """`foreign`: routes of tasks that the model is not served for, which refuse before they look at fields."""
        self._foreign = foreign
        self._url, self._port = server.url, server.port
        self.problems: list[str] = []
        self.sent = 0
        self.longest_probe_s = 0.0
        self._statuses: collections.Counter[str] = collections.Counter()
        self._seconds: list[tuple[float, str]] = []

    async def wire(self, routes: Iterable[Route]) -> None:
        """Send broken HTTP to every route."""

        async def one(name: str, content: bytes) -> None:
            self.sent += 1
            try:
                answer = await wire.attack(self._port, content, WITHIN_S)
            except TimeoutError:
                self.problems.append(f"{name}: neither answer nor end within {WITHIN_S:g} s")
                return
            self._statuses[answer[9:12].decode("latin-1") or "connection closed"] += 1
            if problem := wire.problem_of(answer):
                self.problems.append(f"{name}: {problem}")

        attacks = [
            (f"{route.path}, {name}", content) for route in routes for name, content in wire.attacks(route.path).items()
        ]
        await _all_of(one(name, content) for name, content in attacks)

    async def corpus(self, routes: Iterable[Route]) -> None:
        """Every case on every route, streamed as well where it can be."""
        async with self._client() as client, self._client() as probe:
            probing = asyncio.create_task(self._probe_liveness(probe))
            for route in routes:
                for stream in (False, True) if route.streams else (False,):
                    cases = corpus(route, stream)
                    await _all_of(self._case(client, route, case) for case in cases)
            probing.cancel()

    async def mutations(self, routes: list[Route], number: int, seed: int) -> None:
        """`number` random bodies; some of their senders do not wait for the answer."""
        chance = random.Random(seed)

        async def one(route: Route, content: bytes, patience: float | None) -> None:
            case = Case(f"mutation {content[:300]!r}", content, False)
            if patience is None:
                await self._case(client, route, case)
                return
            self.sent += 1
            try:
                await asyncio.wait_for(client.post(route.path, content=content, headers=JSON), patience)
            except (TimeoutError, httpx.TransportError):
                self._statuses["left"] += 1

        async with self._client() as client:
            await _all_of(
                one(
                    route := chance.choice(routes),
                    mutated(route, chance),
                    chance.uniform(0.001, 0.1) if chance.random() < LEAVE_EARLY else None,
                )
                for _ in range(number)
            )

    def by_status(self) -> str:
        """Number of answers by status."""
        return ", ".join(f"{status}: {number}" for status, number in sorted(self._statuses.items()))

    def durations(self) -> str:
        """Median, tail, and the longest with its name."""
        ordered = sorted(self._seconds)
        median, p99 = (ordered[int((len(ordered) - 1) * at)][0] for at in (0.5, 0.99))
        longest, where = ordered[-1]
        return f"median {median:.3f}, p99 {p99:.3f}, longest {longest:.3f} ({where[:80]})"

    async def _probe_liveness(self, probe: httpx.AsyncClient) -> None:
        """Ask the liveness probe again and again: its longest wait is how long the event loop was blocked."""
        while True:
            began = time.monotonic()
            answer = await probe.get("/health/live")
            self.longest_probe_s = max(self.longest_probe_s, time.monotonic() - began)
            if answer.status_code != 200:
                self.problems.append(f"/health/live: {answer.status_code}")
            await asyncio.sleep(0.2)

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self._url, timeout=None, trust_env=False)

    async def _case(self, client: httpx.AsyncClient, route: Route, case: Case) -> None:
        self.sent += 1
        began = time.monotonic()
        where = f"{route.path}, {case.name}"
        try:
            call = client.post(route.path, content=case.content, headers=case.headers)
            answer = await asyncio.wait_for(call, WITHIN_S)
        except TimeoutError:
            self.problems.append(f"{where}: no answer within {WITHIN_S:g} s")
            return
        except httpx.TransportError as error:
            self._statuses["connection closed"] += 1
            if len(case.content) <= 2**20:  # larger ones may be cut off while they are still being sent
                self.problems.append(f"{where}: {type(error).__name__}: {error}")
            return
        self._seconds.append((time.monotonic() - began, where))
        self._statuses[str(answer.status_code)] += 1
        refused = case.refused and not (case.by_engine and route.path.endswith(("/render", "_tokens")))
        is_text = case.param == "input" and route.path in POOLING  # ids, or no text between marks: of these are vectors
        refused = refused and not is_text
        param = None if case.by_engine or is_text or route.path in self._foreign else case.param
        problem = problem_of(answer.status_code, answer.headers, answer.content, refused=refused, param=param)
        if problem and not _is_full(answer):
            self.problems.append(f"{where}: {problem}")


def _is_full(answer: httpx.Response) -> bool:
    """429 is never about the body, so nothing about the body can be wrong with it."""
    return answer.status_code == 429 and "retry-after" in answer.headers


async def _all_of(calls: Iterable[Awaitable[None]]) -> None:
    """Await all calls, `AT_ONCE` at a time, made one by one."""
    pending = iter(calls)

    async def worker() -> None:
        for call in pending:
            await call

    await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
