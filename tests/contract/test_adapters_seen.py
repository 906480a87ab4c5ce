"""LoRA adapters as operators see them: capabilities, metrics, live state, explained requests and the log."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from oarlock.engine.scheduler.timeline import RequestTimeline
from oarlock.server.config.settings import make_settings
from oarlock.server.hub.adapter_path import AdapterPaths
from oarlock.server.llm.adapters import ServedAdapters
from tests.contract.conftest import INFO
from tests.contract.test_adapters_wire import write
from tests.contract.test_live_state import STATE

LORA = replace(INFO, max_loras=2, max_lora_rank=16, adapter_slot_bytes=4096)
ADAPTERS = {
    "slots": 2, "in_slots": 1, "host_limit": 4, "in_host_memory": 1, "names": 1, "waiting": 0,
    "shown": [{"name": "sql", "state": "ready", "slot": 1, "running": 1, "waiting": 0}],
}  # fmt: skip


class SlowAdapters(ServedAdapters):
    """Adapters of a server whose first load takes noticeable time."""

    async def use(self, name: str) -> str:
        await asyncio.sleep(0.08)
        return await super().use(name)


@pytest.fixture
def stage(make_stage, tmp_path):
    write(tmp_path / "sql")
    options = {"enable_lora": True, "lora_dir": str(tmp_path), "offline": True, "enable_log_requests": True}
    made = make_stage("one two", info=LORA, live_state=STATE | {"adapters": ADAPTERS}, **options)
    paths = AdapterPaths(make_settings(options))
    made.state.async_llm.adapters = SlowAdapters(made.engine, ("demo",), paths, "demo".__eq__)
    return made


def test_a_request_with_an_adapter_is_seen_everywhere(stage, caplog):
    caplog.set_level("INFO", "oarlock")
    stage.engine.numbers = replace(stage.engine.numbers, running_adapters=["sql"], by_adapter={"sql": [1, 2, 3]})

    async def scenario() -> tuple[list[dict], str]:
        async with stage.client() as client:
            body = {"prompt": "secret", "model": "sql"}
            response = await client.post("/v1/completions", json=body, headers={"x-request-id": "one"})
            assert response.status_code == 200 and stage.engine.requests[0].adapter == "sql"
            timeline = RequestTimeline(1, 4, asyncio.get_running_loop().time(), "sql")
            timeline.awaits_adapter("slot", timeline.arrival_s)
            timeline.awaits_adapter(None, timeline.arrival_s + 0.5)
            stage.engine.known[1] = timeline.history(3)
            shown = [(await client.get(path)).json() for path in ("/v1/requests/one", "/v1/state", "/v1/capabilities")]
            return shown, (await client.get("/metrics")).text

    (explained, state, capabilities), metrics = asyncio.run(scenario())
    assert explained["adapter"] == "sql"
    waits = [event for event in explained["timeline"] if event["event"] == "waits for adapter"]
    assert [(wait["adapter"], wait["awaits"]) for wait in waits] == [("sql", "its first load"), ("sql", "a slot")]
    assert 0.08 <= explained["seconds"]["adapter_load"] == pytest.approx(waits[0]["seconds"], abs=1e-3)
    assert explained["seconds"]["adapter"] == pytest.approx(explained["seconds"]["adapter_load"] + 0.5, abs=1e-3)
    assert explained["engine"][0]["adapter"]["slot_s"] == pytest.approx(0.5)
    assert state["engines"][0]["adapters"] == ADAPTERS
    expected = {"max_loras": 2, "max_lora_rank": 16, "bytes_per_slot_per_rank": 4096}
    assert capabilities["adapters"] == expected and capabilities["models"] == ["demo", "alias/with/slash"]
    assert 'oarlock:adapter_generation_tokens_total{adapter="sql",engine="0",model_name="demo"} 3.0' in metrics
    assert 'max_lora="2",model_name="demo",running_lora_adapters="sql",waiting_lora_adapters=""' in metrics
    (line,) = (record.getMessage() for record in caplog.records if "request_done" in record.getMessage())
    assert " adapter=sql " in line and "secret" not in caplog.text


def test_without_adapters_nothing_names_them(make_stage):
    stage = make_stage("one two", live_state=STATE)

    async def scenario() -> tuple[dict, dict, dict, str]:
        async with stage.client() as client:
            await client.post("/v1/completions", json={"prompt": "Hi"}, headers={"x-request-id": "one"})
            paths = ("/v1/requests/one", "/v1/state", "/v1/capabilities")
            shown = [(await client.get(path)).json() for path in paths]
            return *shown, (await client.get("/metrics")).text

    explained, state, capabilities, metrics = asyncio.run(scenario())
    assert explained["adapter"] is None and "adapter" not in explained["seconds"]
    assert state["engines"][0]["adapters"] is None and capabilities["adapters"] is None
    assert "lora_requests_info" not in metrics and "adapter=" not in metrics
