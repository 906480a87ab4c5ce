"""LoRA adapters through the whole engine: a client, the engine's process, and ranks that are processes."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

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
            with pytest.raises(RequestError, match=r"has rank 9, above --max-lora-rank 8.*with --max-lora-rank 9"):
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


@pytest.mark.soak
def test_replicas_have_the_same_adapters_also_after_a_death(
    model: Path, adapters: list[AdapterFiles], alone: dict[int, Answer], tmp_path: Path
) -> None:
    broken = write_adapter(tmp_path / "broken", model)
    (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"no header")

    async def scenario() -> None:
        async with started(EngineConfig(config_of(model, data_parallel_size=2), enable_prefix_caching=True)) as engine:
            assert isinstance(engine, Replicas)
            for one in adapters:
                await engine.add_adapter(one.name, one.directory)
            with pytest.raises(RequestError, match="could not be loaded"):
                await engine.add_adapter("broken", broken.directory)
            assert differences(await ask_all(engine), alone) == []
            first = engine.replicas[0]
            dead = first.client
            os.kill(dead.pid, signal.SIGKILL)
            await engine.remove_adapter("small")
            while first.client is dead or not first.is_alive:
                await asyncio.sleep(0.05)
            for replica in engine.replicas:
                assert [info.name for info in await replica.client.list_adapters()] == ["every", "plain"]
            rest = [request for request in REQUESTS if request.adapter != "small"]
            for client in (replica.client for replica in engine.replicas):
                again = await asyncio.gather(*(ask(client, request) for request in rest))
                assert again == [alone[request.request_id] for request in rest]

    asyncio.run(scenario())


@pytest.mark.soak
def test_eight_rank_processes_answer_as_one_rank(
    model: Path, adapters: list[AdapterFiles], alone: dict[int, Answer]
) -> None:
    executor = start_executor(config_of(model, 8, cpu_affinity="none"), lambda *_: None)
    try:
        assert executor.info.rank_invariant and executor.info.batch_invariant
        assert differences(engine_with(executor, adapters).run(REQUESTS), alone) == []
    finally:
        executor.close()


@pytest.mark.soak
def test_a_thousand_loads_leak_nothing(model: Path, adapters: list[AdapterFiles]) -> None:
    """Neither memory nor descriptors nor threads of two rank processes, whose adapters run in between."""
    executor = start_executor(config_of(model, 2), lambda *_: None)
    engine = DirectEngine(executor, num_blocks=30, enable_prefix_caching=True)
    seen: list[list[tuple[int, ...]]] = []
    for cycle in range(1000):
        files = adapters[cycle % 3]
        assert engine.add_adapter("one", files.digest, files.directory) is None
        if cycle % 10 == 0:
            (answer,) = engine.run([Request(1, (5, 6, 7), REQUESTS[0].params, adapter="one")]).values()
            assert answer.error is None
        engine.scheduler.adapters.remove("one", [], engine.now)
        if cycle in (199, 999):
            seen.append([_held_by(pid) for pid in executor.rank_pids])
    registry = engine.scheduler.adapters.registry
    assert registry.num_loads == 1000 and len(registry) == registry.num_ready == 0
    executor.close()
    for (early_bytes, *early), (late_bytes, *late) in zip(*seen, strict=True):
        assert late == early and late_bytes - early_bytes < 4 << 20


def _held_by(pid: int) -> tuple[int, ...]:
    """Return a process's resident bytes, descriptors and threads."""
    process = Path(f"/proc/{pid}")
    pages = int((process / "statm").read_text().split()[1])
    counts = (len(list((process / name).iterdir())) for name in ("fd", "task"))
    return pages * os.sysconf("SC_PAGE_SIZE"), *counts
