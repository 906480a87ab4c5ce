"""Several replicas behind one address: what health, metrics and load say of each, and how the server ends."""

from __future__ import annotations

import asyncio
import signal
from dataclasses import dataclass, field, replace

import httpx
import pytest

from oarlock.engine.types import EngineInfo, Request
from oarlock.server.config.settings import make_settings
from oarlock.server.endpoints.serving import connect_engine
from oarlock.server.http.listeners import bind, url_of
from oarlock.server.http.server_state import Phase
from oarlock.server.launch.supervisor import Supervisor
from tests.contract.conftest import FakeEngine


@dataclass
class FakeReplicas:
    """Fake engines with the interface of `oarlock.engine.replicas.Replicas`; requests go round."""

    replicas: list[FakeEngine]
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    exit_code: int | None = None
    death_cause: str | None = None
    last_progress_age_s: float = 0.0
    num_chosen: int = 0
    next_id: int = 0

    @property
    def info(self) -> EngineInfo:
        return replace(self.replicas[0].info, data_parallel_size=len(self.replicas))

    @property
    def is_alive(self) -> bool:
        return any(one.is_alive for one in self.replicas)

    def new_request_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def choose(self, request: Request, rank: int | None = None) -> FakeEngine:
        if rank is not None:
            return self.replicas[rank]
        self.num_chosen += 1
        return self.replicas[(self.num_chosen - 1) % len(self.replicas)]

    async def reset_prefix_cache(self) -> int:
        return sum([await one.reset_prefix_cache() for one in self.replicas])

    async def close(self, timeout: float) -> None:
        for one in self.replicas:
            await one.close(timeout)


@pytest.fixture
def make_replicas(make_stage):
    def make(size: int = 2, **options):
        stage = make_stage("one two three", **options)
        engines = [stage.engine, *(replace(stage.engine, number=number) for number in range(1, size))]
        for engine in engines:
            engine.requests, engine.numbers = [], replace(engine.numbers, num_requests_running=engine.number + 1)
        return stage, FakeReplicas(engines)

    return make


@pytest.fixture
def stage(make_replicas, tokenizer):
    """A ready application around two replicas."""
    stage, replicas = make_replicas()
    connect_engine(stage.settings, stage.state, stage.counters, replicas, tokenizer)
    stage.state.heartbeat = replicas
    stage.engine = replicas
    return stage


async def _get(stage, path: str) -> httpx.Response:
    async with stage.client() as client:
        return await client.get(path)


def test_the_choices_of_a_prompt_stay_together_and_prompts_are_dealt(stage):
    async def scenario():
        async with stage.client() as client:
            body = {"prompt": ["a", "b", "c"], "n": 2, "max_tokens": 2, "temperature": 1}
            return (await client.post("/v1/completions", json=body)).json()["usage"]

    usage = asyncio.run(scenario())
    first, second = (one.requests for one in stage.engine.replicas)
    prompts = [[tuple(request.prompt_token_ids) for request in requests] for requests in (first, second)]
    assert [len(found) for found in prompts] == [4, 2] and len(set(prompts[0])) == 2 and len(set(prompts[1])) == 1
    counted = [stage.counters.replicas[number] for number in (0, 1)]
    assert [one.finished["length"] for one in counted] == [4, 2]
    assert sum(one.prompt_tokens for one in counted) == usage["prompt_tokens"]
    assert [one.generation_tokens for one in counted] == [8, 4] and usage["completion_tokens"] == 12


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_header_names_the_replica(stage, path):
    async def scenario(*ranks: str | bytes):
        body = {"max_tokens": 2, "n": 2}
        body |= {"prompt": "a"} if path == "completions" else {"messages": [{"role": "user", "content": "a"}]}
        async with stage.client() as client:
            return [
                await client.post(f"/v1/{path}", json=body, headers={"X-data-parallel-rank": rank}) for rank in ranks
            ]

    answers = asyncio.run(scenario("1", "1", "0", "01"))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert [len(one.requests) for one in stage.engine.replicas] == [2, 6] and stage.engine.num_chosen == 0
    for answer in asyncio.run(scenario("2", "-1", "one", "", "1.0", "\u00b2".encode("latin-1"), "9" * 5000)):
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "X-data-parallel-rank"), error
        assert "from 0 to 1" in error["message"]
    assert [len(one.requests) for one in stage.engine.replicas] == [2, 6]


def test_the_header_can_only_name_the_first_of_one_replica(make_stage):
    stage = make_stage("one")

    async def scenario():
        async with stage.client() as client:
            body = {"prompt": "a", "max_tokens": 1}
            return [
                await client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": rank})
                for rank in ("0", "1")
            ]

    first, second = asyncio.run(scenario())
    assert (first.status_code, second.status_code) == (200, 400)
    assert "there is one replica" in second.json()["error"]["message"]


def test_every_metric_of_an_engine_has_a_line_for_each_replica(stage):
    page = asyncio.run(_get(stage, "/metrics")).text
    for name, values in {
        "vllm:num_requests_running": ("1.0", "2.0"),
        "vllm:num_requests_waiting": ("0.0", "0.0"),
        "vllm:prompt_tokens_total": ("0.0", "0.0"),
        "vllm:time_to_first_token_seconds_count": ("0.0", "0.0"),
        "vllm:prefix_cache_hits_total": ("0.0", "0.0"),
        "oarlock:engine_up": ("1.0", "1.0"),
    }.items():
        for number, value in enumerate(values):
            assert f'{name}{{engine="{number}",model_name="demo"}} {value}\n' in page, name
    assert 'vllm:request_success_total{engine="1",finished_reason="stop",model_name="demo"} 0.0' in page
    assert page.count("vllm:cache_config_info{") == 2
    load = asyncio.run(_get(stage, "/load")).json()
    assert load["requests_running"] == 3
    assert asyncio.run(_get(stage, "/v1/models")).json()["data"][0]["data_parallel_size"] == 2


def test_health_is_degraded_while_a_replica_is_down_and_unavailable_without_any(stage):
    assert asyncio.run(_get(stage, "/health")).json() == {
        "status": "ok", "state": "ready", "replicas": ["ready", "ready"],
    }  # fmt: skip
    stage.engine.replicas[1].is_alive = False
    found = asyncio.run(_get(stage, "/health"))
    assert (found.status_code, found.json()["status"]) == (200, "degraded")
    assert found.json()["replicas"] == ["ready", "down"]
    stage.engine.replicas[0].is_alive = False
    assert asyncio.run(_get(stage, "/health")).status_code == 503


def test_other_replicas_finish_if_one_is_lost_and_the_server_exits_with_its_code(make_replicas, monkeypatch):
    left = []
    monkeypatch.setattr("oarlock.server.launch.supervisor._exit_now", left.append)

    async def scenario():
        _, replicas = make_replicas(pause_after=1)
        resume = replicas.replicas[0].resume

        async def start(config, on_progress):
            return replicas

        listener = bind("127.0.0.1", 0)
        supervisor = Supervisor(make_settings({"log_level": "error"}), listener, start)
        run = asyncio.create_task(supervisor.run())
        async with asyncio.timeout(60):
            while supervisor.state.phase is not Phase.READY:
                await asyncio.sleep(0.005)
            async with httpx.AsyncClient(timeout=60) as client:
                body = {"prompt": "x", "max_tokens": 3}
                asked = asyncio.create_task(client.post(url_of(listener) + "/v1/completions", json=body))
                while not replicas.replicas[0].requests:
                    await asyncio.sleep(0.005)
                replicas.replicas[1].is_alive, replicas.exit_code, replicas.death_cause = False, 6, "a rank hung"
                replicas.lost.set()
                while supervisor.state.phase is not Phase.DRAINING:
                    await asyncio.sleep(0.005)
                refused = await client.post(url_of(listener) + "/v1/completions", json=body)
                resume.set()
                return (await asked).status_code, refused.status_code, await run

    assert asyncio.run(scenario()) == (200, 503, 6)
    assert left == [] and signal.getsignal(signal.SIGTERM) is not None
