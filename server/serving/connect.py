"""Puts a running engine behind the endpoints, and logs each request that has ended."""

from __future__ import annotations

import time
from typing import Any

from oarlock.server.config.settings import Settings
from oarlock.server.llm.async_llm import AsyncLLM
from oarlock.server.llm.generation import Engine, Generation
from oarlock.server.llm.generation_config import GenerationConfig
from oarlock.server.llm.pooler_config import PoolerConfig
from oarlock.server.observability.logs import event, logger
from oarlock.server.observability.metrics import HttpCounters
from oarlock.server.serving.server_state import ServerState
from oarlock.server.tokenizer.tokenizer import Tokenizer

_log = logger("requests")


def connect_engine(
    settings: Settings,
    state: ServerState,
    counters: HttpCounters,
    engine: Engine,
    tokenizer: Tokenizer,
    generation_config: GenerationConfig | None = None,
    pooler: PoolerConfig | None = None,
) -> AsyncLLM:
    """Fill in `state.async_llm`. Requests are refused all the same until the state's phase is ready."""
    async_llm = AsyncLLM(
        engine, tokenizer, generation_config, strict_max_tokens=settings.strict_max_tokens, pooler=pooler
    )
    async_llm.on_finish.append(counters.finish)
    if settings.enable_log_requests:
        async_llm.on_finish.append(_log_generation)
    state.async_llm = async_llm
    return async_llm


def _log_generation(generation: Generation) -> None:
    """The one line of a request. Never its text."""
    now = time.monotonic()
    first = generation.first_token_at
    reasons = ",".join(choice.finish_reason or "abort" for choice in generation.choices[:8])
    fields: dict[str, Any] = {
        "request_id": generation.request_id,
        "prompt_tokens": generation.prompt_tokens,
        "cached_tokens": generation.cached_tokens,
        "completion_tokens": generation.completion_tokens,
        "choices": len(generation.choices),
        "ttft_s": None if first is None else first - generation.arrival,
        "total_s": now - generation.arrival,
        "finish": reasons,
        "client": generation.client or None,
    }
    _log.info(event("request_done", **fields))
