"""`GET /v1/state` over the real application: who may ask, what it says, and how often it asks the engine."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from oarlock.engine.stats import EngineState, KvState, OpenRequest, RankTimes, StepTimesState, TokenRates
from oarlock.server.endpoints.operations.live_state import _FRESH_S
from oarlock.server.http.server_state import Phase

STATE = EngineState(
    running=1,
    waiting=2,
    kv=KvState(block_size=16, total=64, held=3, cached=12, free=49, cells_of=1, map="h3c12f49"),
    step=StepTimesState(
        count=7, last_ms=20.0, median_ms=19.0, p99_ms=30.0, ranks=[RankTimes(rank=0, last_ms=19.5, median_ms=18.5)]
    ),
    tokens_per_second=TokenRates(prompt=100.0, generation=40.5),
    adapters=None,
    slowest=[
        OpenRequest(
            request_id=1, state="running", adapter=None, age_s=2.0, prompt_tokens=5, cached_tokens=0, output_tokens=1
        ),
        OpenRequest(
            request_id=99, state="waiting", adapter="a", age_s=1.0, prompt_tokens=5, cached_tokens=0, output_tokens=0
        ),
    ],
)


async def _get(stage, path="/v1/state", **headers) -> httpx.Response:
    async with stage.client() as client:
        return await client.get(path, headers=headers)


def test_it_shows_engines_and_names_open_requests_by_the_id_of_their_answer(make_stage, wait_for):
    stage = make_stage(pause_after=1, live_state=STATE)

    async def scenario() -> tuple[dict, str]:
        async with stage.client() as client:
            body = {"prompt": "Hello", "stream": True}
            async with asyncio.timeout(60):
                stream = asyncio.create_task(client.post("/v1/completions", json=body, headers={"x-request-id": "abc"}))
                while not stage.engine.requests:
                    await asyncio.sleep(0.01)
                answer = (await client.get("/v1/state")).json()
                stage.engine.resume.set()
                await stream
        return answer

    answer = asyncio.run(scenario())
    assert (answer["model"], answer["status"]) == ("demo", "ok")
    assert answer["requests"] == {"running": 1, "waiting": 2, "finished": 0, "refused": 0, "invalid": 0}
    assert answer["tokens_per_second"] == {"prompt": 100.0, "generation": 40.5}
    (engine,) = answer["engines"]
    assert engine["kv"] == STATE["kv"]
    assert engine["step"] == STATE["step"]
    # One that is not open any more is left out.
    assert [one["id"] for one in engine["slowest"]] == ["cmpl-abc"]


def test_refused_and_finished_requests_are_counted(make_stage):
    stage = make_stage(live_state=STATE)

    async def scenario() -> dict:
        async with stage.client() as client:
            assert (await client.post("/v1/completions", json={"prompt": "Hello"})).status_code == 200
            assert (await client.post("/v1/completions", json={"prompt": 1.5})).status_code == 400
            return (await client.get("/v1/state")).json()

    requests = asyncio.run(scenario())["requests"]
    assert (requests["finished"], requests["refused"], requests["invalid"]) == (1, 0, 1)


def test_a_full_queue_refuses_and_a_wrong_request_is_invalid(make_stage, queue_full):
    stage = make_stage(refuse=queue_full, live_state=STATE)

    async def scenario() -> dict:
        async with stage.client() as client:
            for body, status in (({"prompt": "Hello"}, 429), ({"prompt": "Hello"}, 429), ({"prompt": 1.5}, 400)):
                assert (await client.post("/v1/completions", json=body)).status_code == status
            return (await client.get("/v1/state")).json()

    requests = asyncio.run(scenario())["requests"]
    assert (requests["finished"], requests["refused"], requests["invalid"]) == (0, 2, 1)


def test_however_many_watch_the_engine_is_asked_once_a_second(make_stage, monkeypatch):
    stage = make_stage(live_state=STATE)
    now = [1000.0]
    monkeypatch.setattr("oarlock.server.endpoints.operations.live_state.time.monotonic", lambda: now[0])

    async def scenario() -> list[int]:
        asked = []
        async with stage.client() as client:
            for seconds in (0.0, _FRESH_S / 2, _FRESH_S / 2):
                now[0] += seconds
                await asyncio.gather(*(client.get("/v1/state") for _ in range(5)))
                asked.append(stage.engine.num_asked)
        return asked

    assert asyncio.run(scenario()) == [1, 1, 2]


def test_a_watcher_that_leaves_takes_the_answer_from_nobody(make_stage):
    stage = make_stage(live_state=STATE)
    asked, resume = asyncio.Event(), asyncio.Event()

    async def slow_state():
        asked.set()
        await resume.wait()
        return STATE

    stage.engine.state = slow_state

    async def scenario() -> int:
        async with stage.client() as client:
            first = asyncio.create_task(client.get("/v1/state"))
            await asked.wait()
            second = asyncio.create_task(client.get("/v1/state"))
            await asyncio.sleep(0)
            first.cancel()
            await asyncio.sleep(0)
            resume.set()
            return (await second).json()["engines"][0]["running"]

    assert asyncio.run(scenario()) == 1


@pytest.mark.parametrize(
    ("options", "key", "status"),
    [
        ({"api_key": ("sk",)}, None, 200),  # on loopback it is open, as /metrics is
        ({"api_key": ("sk",), "host": "0.0.0.0"}, None, 401),
        ({"api_key": ("sk",), "host": "0.0.0.0"}, "sk", 200),
        ({"api_key": ("sk",), "host": "0.0.0.0", "open_metrics": True}, None, 200),
    ],
)
def test_it_is_open_whenever_metrics_are_open(make_stage, options, key, status):
    stage = make_stage(live_state=STATE, **options)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    for path in ("/v1/state", "/metrics"):
        assert asyncio.run(_get(stage, path, **headers)).status_code == status


def test_it_answers_while_the_model_loads_and_while_the_server_drains(make_stage):
    stage = make_stage(live_state=STATE)
    stage.state.phase, stage.state.loading_step, stage.state.loading_fraction = Phase.LOADING, "loading", 0.25
    async_llm, stage.state.async_llm = stage.state.async_llm, None
    found = asyncio.run(_get(stage)).json()
    assert (found["status"], found["engines"]) == ("loading", [])
    assert found["loading"] == {"step": "loading", "progress": 0.25, "detail": ""}

    stage = make_stage(live_state=STATE)
    stage.state.phase = Phase.DRAINING
    assert asyncio.run(_get(stage)).json()["status"] == "draining"
    assert async_llm is not None


def test_an_engine_that_does_not_answer_is_shown_as_down(make_stage):
    stage = make_stage(live_state=None)
    (engine,) = asyncio.run(_get(stage)).json()["engines"]
    assert (engine["status"], engine["running"], engine["kv"]["map"]) == ("down", 0, "")
