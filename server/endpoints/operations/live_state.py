"""The live state of the server as one JSON object: its phase, its requests, and the current state of each engine.

An engine is asked at most once a second; all clients that watch get the same response.
"""

import asyncio
import time
from collections.abc import Container
from typing import Any

from oarlock.engine.stats import EngineState, OpenRequest
from oarlock.server.config.settings import Settings
from oarlock.server.endpoints.serving import STATS_TIMEOUT_S, OpenAIServing
from oarlock.server.http.middleware import GENERATING, POOLING
from oarlock.server.http.server_state import Phase, ServerState
from oarlock.server.llm.generation import Replica
from oarlock.server.observability.metrics import HttpCounters
from oarlock.server.version import VERSION

_FRESH_S = 1.0
_COMPUTING = GENERATING | POOLING
_FULL = frozenset({429, 503})  # the server had no room for the request, or was not ready
_MISTAKES = frozenset(range(400, 499)) - _FULL  # clients' mistakes, without 499 (the client left)


class OpenAIServingLiveState(OpenAIServing):
    """`GET /v1/state`."""

    state_name = "live_state"

    def __init__(self, settings: Settings, state: ServerState, counters: HttpCounters) -> None:
        super().__init__(settings, state, counters)
        self._task: asyncio.Task[dict[str, Any]] | None = None
        self._began_s = 0.0

    async def show(self) -> dict[str, Any]:
        """Return the state, at most a second old."""
        now = time.monotonic()
        task = self._task
        if task is None or (task.done() and now - self._began_s >= _FRESH_S):
            task = self._task = asyncio.create_task(self._collect(), name="live-state")
            self._began_s = now
        return await asyncio.shield(task)  # a client that leaves must not cancel the shared task

    async def _collect(self) -> dict[str, Any]:
        state, async_llm = self.state, self.state.async_llm
        replicas = [] if async_llm is None else async_llm.engine.replicas
        states = await asyncio.gather(*map(_state_of, replicas))
        ids = self._response_ids(states)
        engines = [_engine(one.number, found, ids) for one, found in zip(replicas, states, strict=True)]
        rates = [found["tokens_per_second"] for found in states if found is not None]
        response: dict[str, Any] = {
            "model": self.model_names[0],
            "version": VERSION,
            "time": round(time.time(), 3),
            "uptime_s": round(time.time() - state.started_at, 3),
            "status": self._status(),
            "requests": {
                "running": sum(engine["running"] for engine in engines),
                "waiting": sum(engine["waiting"] for engine in engines),
                "finished": sum(self.counters.finished.values()),
                "refused": self._num_with_status(_FULL),
                "invalid": self._num_with_status(_MISTAKES),
            },
            "tokens_per_second": {
                "prompt": round(sum(rate["prompt"] for rate in rates), 1),
                "generation": round(sum(rate["generation"] for rate in rates), 1),
            },
            "engines": engines,
        }
        if state.phase in (Phase.STARTING, Phase.LOADING):
            response["loading"] = {
                "step": state.loading_step,
                "progress": round(state.loading_fraction, 4),
                "detail": state.loading_detail,
            }
        return response

    def _status(self) -> str:
        """Return `ok`, `degraded` while a replica is down, `stalled` if no rank makes progress, else the phase."""
        state = self.state
        if state.phase is not Phase.READY:
            return state.phase.value
        if state.heartbeat is None or not state.heartbeat.is_alive:
            return Phase.DEAD.value
        if state.why_not_ready() is not None:
            return "stalled"
        return "degraded" if "down" in state.replica_states() else "ok"

    def _num_with_status(self, statuses: Container[int]) -> int:
        """Return the number of requests for the engine that were answered with a status in `statuses`."""
        return sum(
            number
            for (_, route, status), number in self.counters.responses.items()
            if route in _COMPUTING and status in statuses
        )

    def _response_ids(self, states: list[EngineState | None]) -> dict[int, str]:
        """Return the response ids of the shown requests, by the engine's ids."""
        wanted = {one["request_id"] for state in states if state is not None for one in state["slowest"]}
        generations = () if self.state.async_llm is None else self.state.async_llm.open
        return {
            choice.request.request_id: generation.response_id
            for generation in generations
            for choice in generation.choices
            if choice.request.request_id in wanted
        }


async def _state_of(replica: Replica) -> EngineState | None:
    try:
        async with asyncio.timeout(STATS_TIMEOUT_S):
            return await replica.state()
    except TimeoutError:
        return None


def _engine(number: int, state: EngineState | None, ids: dict[int, str]) -> dict[str, Any]:
    """Return `state` with the ids of responses. Without a state, return an engine that is down."""
    if state is None:
        return {
            "engine": number,
            "status": "down",
            "running": 0,
            "waiting": 0,
            "adapters": None,
            "kv": {"block_size": 0, "total": 0, "held": 0, "cached": 0, "free": 0, "cells_of": 1, "map": ""},
            "step": {"count": 0, "last_ms": 0.0, "median_ms": 0.0, "p99_ms": 0.0, "ranks": []},
            "slowest": [],
        }
    return {
        "engine": number,
        "status": "ready",
        "running": state["running"],
        "waiting": state["waiting"],
        "kv": state["kv"],
        "step": state["step"],
        "adapters": state["adapters"],
        "slowest": [_open_request(one, ids) for one in state["slowest"] if one["request_id"] in ids],
    }


def _open_request(one: OpenRequest, ids: dict[int, str]) -> dict[str, Any]:
    return {
        "id": ids[one["request_id"]],
        "state": one["state"],
        "adapter": one["adapter"],
        "age_s": one["age_s"],
        "prompt_tokens": one["prompt_tokens"],
        "cached_tokens": one["cached_tokens"],
        "output_tokens": one["output_tokens"],
    }
