"""Requests with more sequences than the engine's queue holds: real client and engine process, scripted ranks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from oarlock.engine.client import EngineClient
from oarlock.engine.config import EngineConfig
from oarlock.server.config.settings import make_settings
from oarlock.server.endpoints.app import create_app
from oarlock.server.endpoints.serving import connect_engine
from oarlock.server.http.server_state import Phase, ServerState
from oarlock.server.observability.metrics import HttpCounters
from oarlock.workers.config import WorkerConfig

pytestmark = pytest.mark.slow

ENGINE = str(Path(__file__).resolve().parents[1] / "unit" / "engine" / "fake_engine.py")
BOSS = {"Authorization": "Bearer boss"}
ROWS, WAITING = 2, 4


class Small:
    """A server whose engine runs two sequences at a time and lets four wait."""

    def __init__(self, engine: EngineClient, client: httpx.AsyncClient, service) -> None:
        self.engine, self.client, self.service = engine, client, service

    async def complete(self, prompt, key: str | None = None, **fields) -> httpx.Response:
        body = {"prompt": prompt, "seed": 1, "max_tokens": 2, "ignore_eos": True, **fields}
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return await self.client.post("/v1/completions", json=body, headers=headers)

    async def texts(self, prompt, **fields) -> list[str]:
        answer = await self.complete(prompt, **fields)
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(choices)))
        return [choice["text"] for choice in choices]

    async def until(self, condition) -> None:
        while not condition(await self.engine.stats()):
            await asyncio.sleep(0.01)

    async def until_idle(self) -> None:
        """Wait until nothing runs or waits, and check that server and engine hold nothing."""
        await self.until(lambda stats: not stats.num_requests_running + stats.num_requests_waiting)
        await asyncio.sleep(0.05)
        stats = await self.engine.stats()
        assert stats.num_accepted == sum(stats.finished.values())
        assert stats.num_blocks_free + stats.num_blocks_cached == stats.num_blocks_total
        assert self.engine.num_open == 0 and not self.service.open
        assert self.service.admission_queue.is_idle


@pytest.fixture
def small(tokenizer):
    """`small(scene)`: run `scene(server)`; options of the engine and its scenario beside it."""

    @asynccontextmanager
    async def start(scenario, max_model_len=64, api_keys=(), **limits):
        worker = WorkerConfig(
            json.dumps(scenario),
            device="cpu",
            dtype="float32",
            max_num_seqs=ROWS,
            max_num_batched_tokens=max_model_len,
            block_size=4,
            max_model_len=max_model_len,
        )
        config = EngineConfig(worker, **{"max_waiting_requests": WAITING, **limits})
        engine = await EngineClient.start(config, lambda *_: None, command=[ENGINE])
        settings = make_settings({"served_model_name": ("demo",), "admin_api_key": "boss", "api_key": api_keys})
        state, counters = ServerState(), HttpCounters()
        app = create_app(settings, state, counters)
        service = connect_engine(settings, state, counters, engine, tokenizer)
        state.heartbeat, state.phase = engine, Phase.READY
        transport = httpx.ASGITransport(app=app)
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client:
                yield Small(engine, client, service)
        finally:
            state.large_bodies.close()
            await engine.close()

    def run(scene, scenario=None, **limits):
        async def bounded():
            async with asyncio.timeout(60), start(scenario or {}, **limits) as server:
                await scene(server)

        asyncio.run(bounded())

    return run


def test_700_prompts_are_answered_as_each_would_be_alone(small):
    async def scene(server):
        prompts = [[1 + number % 60, 2] for number in range(700)]
        texts = await server.texts(prompts)
        assert len(texts) == 700
        for number in (0, 5, 350, 699):
            assert await server.texts(prompts[number]) == [texts[number]]
        stats = await server.engine.stats()
        assert (stats.num_rejected, stats.finished["length"]) == (0, 704)
        await server.until_idle()

    small(scene)


def test_prompts_and_choices_multiply_and_streams_are_made_of_the_same_pieces(small):
    async def scene(server):
        prompts, fields = [[number, 2] for number in range(1, 4)], {"n": 16, "echo": True, "logprobs": 1}
        texts = await server.texts(prompts, **fields)
        assert len(texts) == 3 * 16 and len(set(texts[:16])) > 1
        streamed, ends = [""] * len(texts), [0] * len(texts)
        body = {"prompt": prompts, "seed": 1, "max_tokens": 2, "ignore_eos": True, "stream": True, **fields}
        async with server.client.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    streamed[choice["index"]] += choice["text"]
                    ends[choice["index"]] += choice["finish_reason"] is not None
        assert streamed == texts and set(ends) == {1}
        best = await server.texts([1, 2], n=2, best_of=20, logprobs=1)
        assert len(best) == 2
        await server.until_idle()

    small(scene)


def test_more_prompt_tokens_than_may_wait_are_no_reason_to_refuse_one_request(small):
    async def scene(server):
        assert len(await server.texts([3] * 40, n=20)) == 20
        assert (await server.engine.stats()).num_rejected == 0

    small(scene, max_waiting_tokens=100)


def test_a_request_of_many_sequences_leaves_room_for_others(small):
    async def scene(server):
        many = [asyncio.create_task(server.texts([[number, 2]] * 100)) for number in (1, 2)]
        await server.until(lambda stats: stats.num_requests_waiting)
        for number in range(3, 23):
            await server.texts([number, 2])
        assert not any(task.done() for task in many)
        assert [len(texts) for texts in await asyncio.gather(*many)] == [100, 100]
        assert (await server.engine.stats()).num_rejected == 0

    small(scene, {"step_s": 0.002})


def test_a_queue_that_is_full_refuses_the_whole_request_at_once(small):
    async def scene(server):
        others = [asyncio.create_task(server.texts([number, 2], max_tokens=60)) for number in range(1, 7)]
        await server.until(lambda stats: stats.num_requests_waiting == WAITING)
        for stream in (False, True):
            refused = await server.complete([[7, 2]] * 700, stream=stream)
            assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
            assert int(refused.headers["Retry-After"]) >= 1
            assert server.engine.num_open == len(others)
        await asyncio.gather(*others)
        await server.until_idle()

    small(scene, {"step_s": 0.01})


@pytest.mark.parametrize("how", ["timeout", "abort"])
def test_unsent_sequences_end_with_their_request(small, how):
    async def scene(server):
        task = asyncio.create_task(server.complete([[5, 2]] * 700, timeout=3.0 if how == "timeout" else None))
        if how == "abort":
            # the server has heard of an end: what the engine has ended meanwhile may still be on its way
            await server.until(lambda _: any(choice.finished for run in server.service.open for choice in run.choices))
            answer = await server.client.post("/admin/abort", json={"all": True}, headers=BOSS)
            assert answer.json() == {"aborted": 1}
        reasons = [choice["finish_reason"] for choice in (await task).json()["choices"]]
        assert len(reasons) == 700 and set(reasons) == {"length", how}
        await server.until_idle()
        assert (await server.engine.stats()).num_accepted < 700

    small(scene, {"step_s": 0.02})


def test_nothing_more_is_sent_for_a_client_that_has_left(small):
    async def scene(server):
        task = asyncio.create_task(server.texts([[5, 2]] * 100, max_tokens=30))
        await server.until(lambda stats: stats.num_requests_waiting)
        task.cancel()
        await asyncio.wait((task,))
        await server.until_idle()
        assert (await server.engine.stats()).num_accepted < 100

    small(scene, {"step_s": 0.01})


def test_the_death_of_the_engine_ends_what_was_not_sent_yet(small):
    async def scene(server):
        task = asyncio.create_task(server.complete([[5, 2]] * 100, max_tokens=30))
        await server.until(lambda stats: stats.num_requests_waiting)
        os.kill(server.engine.pid, signal.SIGKILL)
        answer = await task
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
        assert not server.service.open and server.engine.num_open == 0
        await asyncio.sleep(0.05)
        assert server.service.admission_queue.is_idle

    small(scene, {"step_s": 0.01})


def test_one_sequence_that_fails_ends_its_request_and_what_was_not_sent(small):
    async def scene(server):
        refused = await server.complete([[5, 2]] * 50 + [[63] * 64])
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert (await server.engine.stats()).num_accepted == 0

    small(scene)


def test_more_sequences_than_a_request_may_have_are_a_400_that_names_limit_and_fix(small):
    async def scene(server):
        refused = await server.complete([[5, 2]] * 1024, n=3)
        message = refused.json()["error"]["message"]
        assert refused.status_code == 400 and "2048" in message.replace(",", ""), message
        limits = (await server.client.get("/v1/capabilities")).json()["limits"]
        assert limits["max_sequences_per_request"] == 2048
        assert (limits["max_waiting_sequences"], limits["max_waiting_prompt_tokens"]) == (WAITING, 1_000_000)

    small(scene)


def test_a_key_that_floods_the_server_leaves_another_its_share(small):
    """It has every row and a full queue; another key's request is neither refused nor behind the queue."""

    async def scene(server):
        flood = [asyncio.create_task(server.complete([1, 2], key="loud-key", max_tokens=40)) for _ in range(60)]
        await server.until(lambda stats: stats.num_requests_waiting >= 50)
        before = (await server.engine.stats()).finished["length"]
        answer = await server.complete([3, 4], key="quiet-key", max_tokens=4)
        assert answer.status_code == 200, answer.text
        # a few more may end while it runs: two run at a time
        assert (await server.engine.stats()).finished["length"] - before <= 6
        answers = await asyncio.gather(*flood)
        assert all(one.status_code == 200 for one in answers)
        assert len({one.json()["choices"][0]["text"] for one in answers}) == 1  # also of those that made room
        await server.until_idle()

    small(scene, {"step_s": 0.005}, max_model_len=64, max_waiting_requests=60, api_keys=("loud-key", "quiet-key"))
