"""Vectors through `AsyncLLM` over a fake engine: in order, complete or an error, counted, ended when nobody waits."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from oarlock.engine.errors import EngineDeadError, EngineError, QueueFullError, RequestError, UnavailableError
from oarlock.engine.types import KINDS as ALL_KINDS
from oarlock.engine.types import PoolingParams
from oarlock.server.errors import DeadlineError
from tests.contract.conftest import vectors_of

KINDS = tuple(kind for kind in ALL_KINDS if kind != "labels")  # those are of encoders

PROMPTS = [tuple(range(n, 2 * n)) for n in range(3, 40)]


def params_of(kind: str) -> PoolingParams:
    return PoolingParams(kind, (5, 2, 5) if kind == "logits" else ())


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def given_back(stage) -> bool:
    """Nothing is open any more, and each request that was not finished was aborted."""
    engine, llm = stage.engine, stage.state.async_llm
    assert sorted(engine.finished + engine.aborted) == sorted(request.request_id for request in engine.requests)
    return not llm.open and llm.admission_queue.is_idle


@pytest.mark.parametrize("kind", KINDS)
def test_each_prompt_gets_its_own_vectors(make_stage, kind):
    stage = make_stage()

    async def ask():
        return await stage.state.async_llm.start_pooling(PROMPTS, params_of(kind), "team").outputs()

    outputs = run(ask())
    sent = {tuple(request.prompt_token_ids): request for request in stage.engine.requests}
    assert [output.prompt_tokens for output in outputs] == [len(prompt) for prompt in PROMPTS]
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        shape = {"logits": (3,), "token": (len(prompt), 4)}.get(kind, (1, 4))
        assert output.vectors.dtype == np.float32 and output.vectors.shape == shape
        assert output.vectors.tobytes() == vectors_of(sent[prompt]).tobytes()
        assert output.cached_tokens == len(prompt) // 2
        assert sent[prompt].client == "team"
    assert given_back(stage) and stage.counters.prompt_tokens == sum(map(len, PROMPTS))
    assert stage.counters.generation_tokens == 0 and stage.counters.by_key["team"][:2] == [1, sum(map(len, PROMPTS))]
    assert stage.counters.replicas[0].finished["stop"] == len(PROMPTS)


def test_one_prompt(make_stage):
    stage = make_stage()
    output = run(stage.state.async_llm.pool((7, 8, 9), PoolingParams("mean"), priority=3, cache_salt=b"mine"))
    (request,) = stage.engine.requests
    assert (request.priority, request.cache_salt) == (3, b"mine")
    assert output.vectors.tobytes() == vectors_of(request).tobytes() and given_back(stage)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"refuse": QueueFullError("full", 2.0)}, QueueFullError),
        ({"refuse": RequestError("too long", "prompt")}, RequestError),
        ({"fail_after": 0}, EngineError),
        ({"fail_after": 0, "missing": "out_of_memory"}, UnavailableError),
        ({"die_after": 0}, EngineDeadError),
    ],
)
def test_one_error_ends_all_of_a_request(make_stage, options, error):
    stage = make_stage(**options)

    async def ask():
        with pytest.raises(error) as caught:
            await stage.state.async_llm.start_pooling(PROMPTS, PoolingParams("last")).outputs()
        assert caught.type is error
        await asyncio.sleep(0)

    run(ask())
    assert not stage.state.async_llm.open and stage.state.async_llm.admission_queue.is_idle


def test_a_time_limit_is_an_error_however_much_has_come(make_stage):
    stage = make_stage(pause_after=0)

    async def ask():
        with pytest.raises(DeadlineError, match=r"0\.05 seconds"):
            await stage.state.async_llm.pool((1, 2, 3), PoolingParams("token"), timeout_s=0.05)
        await asyncio.sleep(0)

    run(ask())
    assert given_back(stage) and len(stage.engine.aborted) == 1


def test_a_cancelled_call_aborts_at_the_engine(make_stage):
    stage = make_stage(pause_after=0)

    async def ask():
        task = asyncio.create_task(stage.state.async_llm.pool((1, 2, 3), PoolingParams("mean")))
        while not stage.engine.requests:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)

    run(ask())
    assert given_back(stage) and len(stage.engine.aborted) == 1


def test_an_operators_abort_is_an_error(make_stage):
    stage = make_stage(pause_after=0)

    async def ask():
        llm = stage.state.async_llm
        running = llm.start_pooling(PROMPTS[:3], PoolingParams("mean"))
        task = asyncio.create_task(running.outputs())
        while len(stage.engine.requests) < 3:
            await asyncio.sleep(0.001)
        assert llm.abort_all() == 1
        with pytest.raises(UnavailableError, match="operator") as caught:
            await task
        assert caught.value.code == "aborted"
        await asyncio.sleep(0)

    run(ask())
    assert given_back(stage) and len(stage.engine.aborted) == 3


def test_many_prompts_wait_for_room_at_the_engine(make_stage):
    stage = make_stage(pause_after=0)
    info = stage.engine.info

    async def ask():
        llm = stage.state.async_llm
        running = llm.start_pooling([(1, 2, 3)] * 100, PoolingParams("last"))
        task = asyncio.create_task(running.outputs())
        while len(stage.engine.requests) < 2 * info.max_num_seqs:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)  # in which more could be sent
        num_sent = len(stage.engine.requests)
        stage.engine.resume.set()
        assert len(await task) == 100
        return num_sent

    assert run(ask()) == 2 * info.max_num_seqs
    assert [request.is_admitted for request in stage.engine.requests] == [False, *[True] * 99]
    assert given_back(stage)
