"""The live state of an engine: its requests, the map of its blocks, its step times and its rates."""

from dataclasses import replace

import numpy as np
import pytest

from oarlock.engine.core.engine_core import MAX_CELLS, MAX_SLOWEST, live_state, run_lengths
from oarlock.engine.kv_cache.block_pool import BlockPool
from oarlock.engine.scheduler.step_cost import StepLog
from tests.unit.engine.engine_fakes import Driver, make_config, make_request


def _states(text: str) -> str:
    """Decode run lengths: `h3c2` becomes `hhhcc`."""
    found, number = "", ""
    for char in [*text, "."]:
        if char.isdigit():
            number += char
        else:
            found += found[-1:] * (int(number) - 1) if number else ""
            found, number = found + char, ""
    return found[:-1]


def test_run_lengths_name_each_run() -> None:
    assert run_lengths("hhhcfff") == "h3c1f3"
    assert run_lengths("") == ""


def test_the_map_says_of_each_block_what_the_pool_counts() -> None:
    driver = Driver(make_config(), num_blocks=33)
    driver.add(make_request(1, range(9), max_tokens=2))
    driver.run()
    driver.add(make_request(2, range(40, 50), max_tokens=20))
    for _ in range(3):
        driver.step()
    kv = live_state(driver.scheduler, driver.now)["kv"]
    cells = _states(kv["map"])
    assert (len(cells), kv["cells_of"], kv["total"]) == (32, 1, 32)
    assert (cells.count("h"), cells.count("c"), cells.count("f")) == (kv["held"], kv["cached"], kv["free"])
    manager = driver.scheduler.memory
    assert manager.num_held and manager.num_cached and manager.num_free
    for block, letter in enumerate(cells, 1):
        expected = "f" if block in manager.leader.pool.free else "c" if block in manager.leader.pool.cached else "h"
        assert letter == expected, block


@pytest.mark.parametrize("num_blocks", [MAX_CELLS + 1, MAX_CELLS + 2, 1_000_001])
def test_the_map_of_any_pool_has_a_bounded_number_of_cells(num_blocks: int) -> None:
    manager = BlockPool(num_blocks)
    per_cell = -(-manager.num_total // MAX_CELLS)
    cells = manager.states(per_cell)
    assert MAX_CELLS // 2 <= len(cells) <= MAX_CELLS
    assert len(cells) == -(-manager.num_total // per_cell)


def test_requests_are_shown_the_oldest_first_and_not_all() -> None:
    driver = Driver(make_config(max_num_seqs=4))
    for number in range(1, 31):
        driver.add(make_request(number, [number, 2, 3], max_tokens=20))
        driver.now += 1.0
    driver.step()
    driver.step()
    driver.abort(2)
    found = live_state(driver.scheduler, driver.now)
    shown = found["slowest"]
    assert [one["request_id"] for one in shown] == [1, *range(3, 3 + MAX_SLOWEST - 1)]
    assert [one["state"] for one in shown[:4]] == ["running"] * 3 + ["waiting"]
    assert (found["running"], found["waiting"]) == (3, 26)
    assert shown[0]["age_s"] == pytest.approx(driver.now)
    assert (shown[0]["prompt_tokens"], shown[0]["output_tokens"]) == (3, 2)


def test_step_times_are_of_the_last_steps() -> None:
    log = StepLog()
    assert log.times() == {"count": 0, "last_ms": 0.0, "median_ms": 0.0, "p99_ms": 0.0, "ranks": []}
    for step in range(600):
        log.observe(step * 0.1, 5.0 if step < 88 else 0.01 + (step == 599) * 0.03, 1, 0, 0, [9_000_000, 7_000_000])
    times = log.times()
    assert (times["count"], times["last_ms"], times["median_ms"]) == (600, 40.0, 10.0)
    assert times["p99_ms"] <= 40.0, "steps that are long gone do not count"
    assert times["ranks"] == [
        {"rank": 0, "last_ms": 9.0, "median_ms": 9.0},
        {"rank": 1, "last_ms": 7.0, "median_ms": 7.0},
    ]


def test_rates_are_over_the_last_ten_seconds_and_begin_again_after_a_pause() -> None:
    log = StepLog()
    assert log.token_rates(5.0, 0) == {"prompt": 0.0, "generation": 0.0}
    for step in range(300):  # 30 s, ten steps a second, each with 4 tokens of prompts and 2 sampled ones
        log.observe(step * 0.1, 0.1, 2, 4, 2 * step)
    rates = log.token_rates(30.0, 600)
    assert rates["prompt"] == pytest.approx(40.0, rel=0.02)
    assert rates["generation"] == pytest.approx(20.0, rel=0.02)
    assert log.token_rates(60.0, 600) == {"prompt": 0.0, "generation": 0.0}
    log.observe(100.0, 0.1, 2, 0, 600)
    log.observe(103.9, 0.1, 2, 0, 601)
    assert log.token_rates(104.0, 640)["generation"] == pytest.approx(10.0), "the pause does not count"


def test_step_times_cost_little_memory_and_no_more_with_more_steps() -> None:
    log = StepLog()
    for step in range(5000):
        log.observe(step * 1.0, 0.1, 2, 1, step, (1, 2))
    assert len(log._marks) <= 13
    assert isinstance(log._seconds, np.ndarray) and len(log._seconds) == len(log._rank_ns) == 512


def test_a_request_with_a_grammar_that_is_compiled_counts_as_waiting() -> None:
    driver = Driver(make_config())
    driver.scheduler.set_pending({"a": (2, 20), "b": (1, 10)})
    driver.add(replace(make_request(1, [1, 2]), priority=1))
    assert live_state(driver.scheduler, driver.now)["waiting"] == 4
