"""What the engines know of a request's first choices."""

from __future__ import annotations

import asyncio

from oarlock.engine.stats import RequestHistory
from oarlock.server.llm.async_llm import AsyncLLM
from oarlock.server.serving.explain.records import RequestRecord


async def histories_of(async_llm: AsyncLLM, record: RequestRecord) -> list[RequestHistory]:
    """In the order of the choices; without those that no engine knows any more."""
    asked = [
        replica.histories([choice.engine_id for choice in record.choices if choice.replica == replica.number])
        for replica in async_llm.engine.replicas
        if any(choice.replica == replica.number for choice in record.choices)
    ]
    found = {one["request_id"]: one for some in await asyncio.gather(*asked) for one in some}
    return [found[choice.engine_id] for choice in record.choices if choice.engine_id in found]
