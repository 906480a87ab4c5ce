"""The state of the whole server: its phase, the progress of loading, the engine, and the requests in flight."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from oarlock.server.http.body_memory import BodyMemory
from oarlock.server.http.ignored_parameters import IgnoredParameters
from oarlock.server.http.large_body import LargeBodies
from oarlock.server.http.parsing_turns import ParsingTurns
from oarlock.server.http.request_record import RecentRequests
from oarlock.server.llm.introduction import Introduction

if TYPE_CHECKING:
    from oarlock.server.http.tracing import RequestTracer
    from oarlock.server.llm.async_llm import AsyncLLM

STALL_LIMIT_S = 30.0


class Phase(StrEnum):
    """The life of a server, in order."""

    STARTING = "starting"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class Liveness(Protocol):
    """Liveness of one replica, as the health routes show it."""

    @property
    def is_alive(self) -> bool: ...


class Heartbeat(Protocol):
    """Signs of life of the engine, which determine readiness."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def last_progress_age_s(self) -> float: ...

    @property
    def replicas(self) -> Sequence[Liveness]: ...


class BatchService(Protocol):
    """The runner of batches as the supervisor starts and stops it."""

    def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def close(self) -> None: ...


@dataclass
class ServerState:
    """Written by the supervisor, except for the requests in flight and `drain`."""

    stall_limit_s: float = STALL_LIMIT_S
    phase: Phase = Phase.STARTING
    loading_step: str = "starting"
    loading_fraction: float = 0.0
    loading_detail: str = ""  # bytes, speed and time left of a download; the nodes that are missing
    started_at: float = field(default_factory=time.time)
    heartbeat: Heartbeat | None = None
    async_llm: AsyncLLM | None = None
    introduction: Introduction = field(default_factory=Introduction)  # the sentences and questions of the model's owner
    large_bodies: LargeBodies = field(default_factory=LargeBodies)
    body_memory: BodyMemory = field(default_factory=BodyMemory)
    parsing_turns: ParsingTurns = field(default_factory=ParsingTurns)
    requests: RecentRequests = field(default_factory=RecentRequests)  # records of requests to generate
    ignored_parameters: IgnoredParameters = field(default_factory=IgnoredParameters)
    tracer: RequestTracer | None = None  # None: no traces are sent
    batches: BatchService | None = None  # None: there is no --batch-dir
    num_in_flight: int = 0  # requests accepted and not yet answered to their last byte
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    stop: asyncio.Event = field(default_factory=asyncio.Event)  # the supervisor waits for it

    def __post_init__(self) -> None:
        self.idle.set()

    def enter(self) -> None:
        """Count a request that was accepted."""
        self.num_in_flight += 1
        self.idle.clear()

    def leave(self) -> None:
        """Count an accepted request as answered, or as abandoned by its client."""
        self.num_in_flight -= 1
        if not self.num_in_flight:
            self.idle.set()

    def drain(self) -> None:
        """Refuse new requests, and make the supervisor finish open requests and exit. A second call changes nothing."""
        if self.phase is Phase.READY:
            self.phase = Phase.DRAINING
        self.stop.set()

    def replica_states(self) -> list[str]:
        """Return the state of each of several replicas: `ready`, or `down` until its engine has started again."""
        replicas = () if self.heartbeat is None else self.heartbeat.replicas
        return ["ready" if one.is_alive else "down" for one in replicas] if len(replicas) > 1 else []

    def why_not_ready(self) -> str | None:
        """Return None if requests can be served, else the reason in one sentence."""
        if self.phase in (Phase.STARTING, Phase.LOADING):
            detail = f" ({self.loading_detail})" if self.loading_detail else ""
            return f"The model is loading: {self.loading_step}, {self.loading_fraction:.0%}{detail}."
        if self.phase is Phase.DRAINING:
            return "The server is shutting down; it is finishing the running requests."
        heartbeat = self.heartbeat
        if self.phase is Phase.DEAD or heartbeat is None or not heartbeat.is_alive:
            return "The engine has stopped; the server is about to exit."
        if heartbeat.last_progress_age_s > self.stall_limit_s:
            return f"No rank has made progress for {heartbeat.last_progress_age_s:.0f} seconds."
        return None
