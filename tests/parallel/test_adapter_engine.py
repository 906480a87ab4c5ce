"""LoRA adapters through the whole engine: a client, the engine's process, and ranks that are processes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oarlock.engine.client import EngineClient
from oarlock.engine.config import EngineConfig
from oarlock.engine.errors import RequestError
from oarlock.engine.replicas import Replicas, start_engine
from oarlock.engine.types import Request
from oarlock.workers.executor import start_executor
from tests.golden.tiny_models import make_tiny
from tests.parallel.adapter_files import AdapterFiles, write_adapter
from tests.parallel.direct_engine import Answer, DirectEngine
from tests.parallel.rank_threads import ThreadExecutor
from tests.parallel.test_adapter_ranks import FAMILIES, config_of, differences, engine_with, make_requests
from tests.unit.workers.kernel_levels import NO_KERNELS

pytestmark = pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")

REQUESTS = make_requests(12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"), "llama", **FAMILIES["llama"])


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[AdapterFiles]:
    folder = tmp_path_factory.mktemp("adapters")
    return [write_adapter(folder / name, model, seed=seed) for seed, name in enumerate(("every", "plain", "small"))]


@pytest.fixture(scope="module")
def alone(model: Path, adapters: list[AdapterFiles]) -> dict[int, Answer]:
    """The answers of one rank, one after the other."""
    executor, answers = ThreadExecutor(config_of(model)), {}
    engine = engine_with(executor, adapters)
    for request in REQUESTS:
        answers |= engine.run([request])
    executor.close()
    return answers


@asynccontextmanager
async def started(config: EngineConfig) -> AsyncIterator[EngineClient | Replicas]:
    engine = await start_engine(config, lambda *_: None)
    try:
        yield engine
    finally:
        await engine.close(5.0)


async def ask(engine: EngineClient | Replicas, request: Request) -> Answer:
    """Send a request under a new id, and return its answer."""
    request, answer = replace(request, request_id=engine.new_request_id()), Answer()
    client = engine.choose(request) if isinstance(engine, Replicas) else engine
    async for event in client.generate(request):
        answer.token_ids += event.token_ids
        answer.logprobs += event.logprobs
        answer.prompt_logprobs += event.prompt_logprobs
        answer.pooled += event.pooled
        answer.error = event.error
    return answer


async def ask_all(engine: EngineClient | Replicas) -> dict[int, Answer]:
    answers = await asyncio.gather(*(ask(engine, request) for request in REQUESTS))
    return {request.request_id: answer for request, answer in zip(REQUESTS, answers, strict=True)}


@pytest.mark.slow
def test_two_rank_processes_answer_as_one_rank(
    model: Path, adapters: list[AdapterFiles], alone: dict[int, Answer], tmp_path: Path
) -> None:
    wide = write_adapter(tmp_path / "wide", model, rank=9)

    async def scenario() -> None:
        async with started(EngineConfig(config_of(model, 2))) as engine:
            for one in adapters:
                await engine.add_adapter(one.name, one.directory)
            with pytest.raises(RequestError, match=r"has rank 9, and slots have room for rank 8.*--max-lora-rank 9"):
                await engine.add_adapter(wide.name, wide.directory)
            assert differences(await ask_all(engine), alone) == []
            long = replace(REQUESTS[0], adapter="every", params=replace(REQUESTS[0].params, max_tokens=120))
            running = asyncio.create_task(ask(engine, long))
            while [info.num_requests for info in await engine.list_adapters()] != [1, 0, 0]:
                await asyncio.sleep(0.001)
            assert await engine.remove_adapter("every") == 1
            assert "was unloaded" in ((await running).error or "")
            listed = [(info.name, info.digest, info.state) for info in await engine.list_adapters()]
            assert listed == [(one.name, one.digest, "ready") for one in adapters[1:]]
            rest = [request for request in REQUESTS if request.adapter != "every"]
            again = await asyncio.gather(*(ask(engine, request) for request in rest))
            assert again == [alone[request.request_id] for request in rest]

    asyncio.run(scenario())
