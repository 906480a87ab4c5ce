"""`oarlock top`: the map of KV blocks, percentiles of what happened between two looks, and the whole page."""

from __future__ import annotations

import copy
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from rich.console import Console

from oarlock.server.cli.top import watch
from oarlock.server.cli.top.watch import shrink

ENGINE = {
    "engine": 0,
    "status": "ready",
    "running": 2,
    "waiting": 1,
    "kv": {
        "block_size": 16, "total": 64, "held": 16, "cached": 8, "free": 40, "cells_of": 1, "map": "h16c8f40",
    },
    "step": {
        "count": 3402, "last_ms": 25.1, "median_ms": 25.8, "p99_ms": 61.2,
        "ranks": [{"rank": 0, "last_ms": 24.6, "median_ms": 25.2}, {"rank": 1, "last_ms": 24.7, "median_ms": 26.4}],
    },
    "slowest": [
        {
            "id": "cmpl-\x1b[2J1", "state": "running", "age_s": 3.24, "prompt_tokens": 35, "cached_tokens": 32,
            "output_tokens": 11,
        },
        {
            "id": "cmpl-2", "state": "waiting", "age_s": 250.0, "prompt_tokens": 9, "cached_tokens": 0,
            "output_tokens": 0,
        },
    ],
}  # fmt: skip
STATE = {
    "model": "oarlock-demo",
    "version": "1.0.0",
    "time": 1767225600.0,
    "uptime_s": 7_500.0,
    "status": "ok",
    "requests": {"running": 2, "waiting": 1, "finished": 12, "refused": 3, "invalid": 4},
    "tokens_per_second": {"prompt": 120.0, "generation": 38.54},
    "engines": [ENGINE],
    "latencies": {
        "ttft_ms": {"p50": 12.34, "p90": 40.0}, "itl_ms": {"p50": None, "p90": None}, "prefix_hit_rate": 0.25,
        "preemptions": 1,
    },
    "batches": None,
}  # fmt: skip
PAGE = """\
oarlock-demo  http://127.0.0.1:8000  ok  up 2 h 5 min  version 1.0.0
requests  2 running, 1 waiting, 12 finished, 3 refused, 4 invalid, 1 preemptions
tokens/s  38.5 generated, 120.0 of prompts computed, 25% of prompts cached
latency   first token 12.3 ms (p90 40.0), between tokens -

engine  2 running, 1 waiting
KV blocks of 16 tokens: █ 16 held  ▒ 8 cached  · 40 free  of 64
████████████████▒▒▒▒▒▒▒▒········································
steps  3402, last 25.1 ms, median 25.8, p99 61.2
ranks  0: 24.6 (median 25.2), 1: 24.7 (median 26.4); medians 1.2 ms apart
oldest requests  state           age  prompt  cached  output
cmpl-␛[2J1       running       3.2 s      35      32      11
cmpl-2           waiting  4 min 10 s       9       0       0
"""


def shown(state: dict, width: int = 80, replica: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(watch.page(state, "http://127.0.0.1:8000", width, 20, replica))
    return "".join(f"{line.rstrip()}\n" for line in console.file.getvalue().splitlines())


def test_the_page_is_this():
    assert shown(STATE) == PAGE


def test_adapters_have_a_line_and_the_used_ones_a_table():
    names = [("sql", "ready", 2, 1, 0), ("legal", "loading", 0, 0, 3), ("idle", "on_disk", 0, 0, 0)]
    shown_ones = [dict(zip(("name", "state", "slot", "running", "waiting"), one, strict=True)) for one in names]
    counts = {"slots": 2, "in_slots": 1, "host_limit": 4, "in_host_memory": 1, "names": 3, "waiting": 3}
    slowest = [one | {"adapter": adapter} for one, adapter in zip(ENGINE["slowest"], ("sql", None), strict=True)]
    engine = ENGINE | {"adapters": counts | {"shown": shown_ones}, "slowest": slowest}
    lines = shown({**STATE, "engines": [engine]}).splitlines()
    assert lines[-7:] == [
        "adapters  1 of 2 slots, 1 of 4 in host memory, 3 known, 3 requests wait",
        "adapter  memory   running  waiting",
        "sql      slot 2         1        0",
        "legal    loading        0        3",
        "oldest requests  state           age  prompt  cached  output  adapter",
        "cmpl-␛[2J1       running       3.2 s      35      32      11  sql",
        "cmpl-2           waiting  4 min 10 s       9       0       0  -",
    ]


def test_a_narrow_terminal_has_a_map_of_several_lines():
    lines = shown(STATE, 34).splitlines()
    at = lines.index("█" * 16 + "▒" * 8 + "·" * 8)
    assert lines[at + 1] == "·" * 32


def test_a_replica_that_is_down_and_a_model_that_loads():
    both = copy.deepcopy(STATE)
    both["engines"].append({**copy.deepcopy(ENGINE), "engine": 1, "status": "down"})
    assert "engine 0  2 running" in shown(both) and "engine 1 is down" in shown(both)
    row = "0        ready        2        1      25%     12%   3402  25.1 ms  25.8 ms\n1        down"
    assert row in shown(both)
    assert "engine 0" not in shown(both, replica=1) and "engine 1 is down" in shown(both, replica=1)
    loads = {
        **STATE,
        "engines": [],
        "status": "loading",
        "loading": {"step": "weights", "progress": 0.5, "detail": "x"},
    }
    assert "loading: weights 50% x" in shown(loads)


def test_batches_come_last():
    counts = {"completed": 7, "failed": 1, "total": 20}
    batch = {"id": "batch_1", "status": "in_progress", "created_at": 1767225500, "request_counts": counts}
    table = ["batches  state               age  done  failed  of", "batch_1  in_progress  1 min 40 s     7       1  20"]
    assert shown({**STATE, "batches": [batch]}).splitlines()[-3:] == ["", *table]


@given(st.lists(st.tuples(st.sampled_from("hcf"), st.integers(1, 5000)), max_size=20), st.integers(1, 400))
@pytest.mark.slow
def test_a_map_is_never_larger_than_asked_and_keeps_its_order(runs, cells):
    text = "".join(f"{letter}{count}" for letter, count in runs)
    whole = "".join(letter * count for letter, count in runs)
    found = shrink(text, cells)
    wide = max(1, -(-len(whole) // cells))
    assert len(found) == -(-len(whole) // wide) <= cells
    for at, letter in enumerate(found):
        part = whole[at * wide : (at + 1) * wide]
        assert part.count(letter) == max(map(part.count, "hcf"))


def test_invalid_block_maps_are_errors():
    with pytest.raises(ValueError, match="not a map"):
        shrink("h12x3", 10)


def readings() -> tuple[CollectorRegistry, Histogram, Counter, Counter]:
    registry = CollectorRegistry()
    limits = (0.01, 0.1, 1.0)
    ttft = Histogram("vllm:time_to_first_token_seconds", "", ["engine"], registry=registry, buckets=limits)
    Histogram("vllm:inter_token_latency_seconds", "", ["engine"], registry=registry, buckets=limits)
    hits = Counter("vllm:prefix_cache_hits", "", ["engine"], registry=registry)
    queries = Counter("vllm:prefix_cache_queries", "", ["engine"], registry=registry)
    return registry, ttft, hits, queries


def test_percentiles_are_of_what_happened_in_between_on_all_engines():
    registry, ttft, hits, queries = readings()
    for _ in range(10):
        ttft.labels("0").observe(0.005)
    before = watch.read_metrics(generate_latest(registry).decode())
    for engine in ("0", "1"):
        ttft.labels(engine).observe(0.05)
        hits.labels(engine).inc(1)
        queries.labels(engine).inc(4)
    now = watch.read_metrics(generate_latest(registry).decode())
    found = watch.between(before, now)
    assert found["ttft_ms"] == {"p50": 55.0, "p90": 91.0}  # linear between 10 and 100 ms
    assert found["itl_ms"] == {"p50": None, "p90": None}
    assert found["prefix_hit_rate"] == 0.25
    since_start = watch.between(watch.MetricSums(), now)
    assert since_start["ttft_ms"]["p50"] == pytest.approx(6.0)
    restarted = watch.between(now, watch.MetricSums(before.buckets, before.counters))
    assert restarted["ttft_ms"]["p50"] == pytest.approx(5.0)


def test_beyond_the_last_bucket_its_limit_is_all_that_is_known():
    assert watch.percentile({0.1: 0.0, 1.0: 1.0, float("inf"): 10.0}, 0.9) == 1000.0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3.24, "3.2 s"), (60, "1 min 0 s"), (3599, "59 min 59 s"), (3600, "1 h 0 min"), (90_000, "1 d 1 h")],
)
def test_durations(seconds, text):
    assert watch.duration(seconds) == text
