"""Metrics of LoRA adapters: counts by name, the memory that adapters are in, and the family that gateways read."""

import time
from dataclasses import replace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from oarlock.engine.stats import EngineStats
from oarlock.server.observability.metrics import HttpCounters, exposition
from tests.contract.conftest import INFO

NAME = 'a "name",\n with marks'


@pytest.fixture
def replicas() -> list[EngineStats]:
    first = EngineStats(
        num_adapters=3,
        num_adapters_loaded=2,
        num_adapters_in_slots=1,
        num_requests_waiting_for_adapter=4,
        running_adapters=["sql"],
        waiting_adapters=["legal", NAME],
        num_adapter_loads=5,
        num_adapter_failures=1,
        num_adapter_puts=6,
        num_adapter_evictions=2,
        by_adapter={"sql": [2, 30, 40], NAME: [1, 5, 6]},
    )
    first.adapter_wait_s.observe(0.4)
    return [first, EngineStats(running_adapters=["legal", "sql"], by_adapter={"sql": [1, 2, 3]})]


def read(stats: list[EngineStats], prefix: str = "vllm:", **info) -> dict[tuple[str, ...], float]:
    """Return the samples of the families about adapters: name and labels but the model's -> value."""
    text = exposition(stats, replace(INFO, **info), HttpCounters(), "demo", prefix).decode()
    return {
        (sample.name, *(sample.labels[label] for label in sorted(sample.labels.keys() - {"model_name"}))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "adapter" in sample.name or "lora" in sample.name
    }


def test_counts_and_memory_have_their_values(replicas) -> None:
    found = read(replicas, max_loras=2)
    names = {
        "adapters": 3, "adapters_in_host_memory": 2, "adapters_in_slots": 1, "adapter_slots": 2,
        "num_requests_waiting_for_adapter": 4, "adapter_loads_total": 5, "adapter_load_failures_total": 1,
        "adapter_puts_total": 6, "adapter_evictions_total": 2, "adapter_wait_seconds_count": 1,
    }  # fmt: skip
    assert {name: found[f"oarlock:{name}", "0"] for name in names} == names
    assert found["oarlock:adapter_slots", "1"] == 2 and found["oarlock:adapters", "1"] == 0
    by_name = {key: value for key, value in found.items() if len(key) == 3 and key[0].endswith("_total")}
    kinds = ("requests", "prompt_tokens", "generation_tokens")
    assert by_name == {
        (f"oarlock:adapter_{kind}_total", name, engine): value
        for name, engine, values in ((NAME, "0", (1, 5, 6)), ("sql", "0", (2, 30, 40)), ("sql", "1", (1, 2, 3)))
        for kind, value in zip(kinds, values, strict=True)
    }


def test_gateways_read_one_sample_with_the_names_of_all_replicas(replicas) -> None:
    before = time.time()
    for prefix in ("vllm:", "other_"):
        found = {key: value for key, value in read(replicas, prefix, max_loras=2).items() if "lora" in key[0]}
        assert list(found) == [(f"{prefix}lora_requests_info", "0", "2", "sql,legal", f"legal,{NAME}")]
        assert before <= next(iter(found.values())) <= time.time()
    assert not [key for key in read(replicas) if "lora" in key[0]], "there is none without adapters"
