"""Waits of requests for their LoRA adapters, in histories, statistics and the live state."""

import itertools

import pytest

from oarlock.engine.core.engine_core import history, live_state
from oarlock.engine.scheduler.timeline import _MAX_WAITS, AdapterWaits
from oarlock.engine.stats import MAX_ADAPTER_LABELS, AdapterHistory
from tests.unit.engine.scheduler.test_adapters import AdapterDriver


def waits_of(driver: AdapterDriver, request_id: int) -> AdapterHistory:
    found = history(driver.scheduler, request_id)
    assert found is not None and found["adapter"] is not None
    return found["adapter"]


def test_a_history_has_the_waits_for_a_load_and_for_a_slot() -> None:
    """The first request for `a` waits for its load, and one for `b`, which is loaded, for the slot of `a`."""
    driver = AdapterDriver("ab", max_loras=1)
    driver.ask(1, "a", max_tokens=8)
    driver.ask(2, max_tokens=2)
    driver.steps(1)
    (wait,) = waits_of(driver, 1)["waits"]
    assert wait == {"awaited": "load", "at_s": 0.0, "end_s": None}
    while driver.scheduler.num_running == 0 or 2 not in driver.ends:
        driver.step()
    driver.ask(3, "b", max_tokens=2)
    asked_s = driver.now
    driver.run()
    first, third = waits_of(driver, 1), waits_of(driver, 3)
    assert first["name"] == "a" and first["load_s"] > 0.0
    assert [wait["awaited"] for wait in first["waits"]] in (["load"], ["load", "slot"])
    assert (third["name"], third["load_s"]) == ("b", 0.0)
    (wait,) = third["waits"]
    ended = driver.scheduler.requests.log.ended
    assert wait["awaited"] == "slot" and wait["at_s"] == asked_s
    assert wait["end_s"] is not None and wait["end_s"] == asked_s + third["slot_s"] >= ended[1].end_s
    none = history(driver.scheduler, 2)
    assert none is not None and none["adapter"] is None
    waited = driver.scheduler.stats.adapter_wait_s
    assert waited.count == 2 and waited.sum == pytest.approx(first["load_s"] + first["slot_s"] + third["slot_s"])


def test_an_adapter_that_leaves_host_memory_is_awaited_again() -> None:
    """`b` is loaded when its request begins to wait, leaves for the earlier request of `c`, and is loaded again."""
    driver = AdapterDriver("abc", max_loras=1, max_cpu_loras=1)
    driver.steps(20)
    driver.ask(1, "a", max_tokens=30)
    driver.steps(4)
    for number, name in ((2, "b"), (3, "c"), (4, "b"), (5, "a")):
        driver.ask(number, name, max_tokens=3)
    driver.run()
    driver.check_outputs()
    for number in (2, 3, 4, 5):
        found = waits_of(driver, number)
        waits = found["waits"]
        assert all(wait["end_s"] is not None for wait in waits), "nothing waits after its end"
        assert all(one["end_s"] == two["at_s"] for one, two in itertools.pairwise(waits))
        assert all(one["awaited"] != two["awaited"] for one, two in itertools.pairwise(waits))
        total = sum(wait["end_s"] - wait["at_s"] for wait in waits if wait["end_s"] is not None)
        assert total == pytest.approx(found["load_s"] + found["slot_s"])


def test_a_preempted_request_and_an_aborted_one_end_their_waits() -> None:
    driver = AdapterDriver("ab", max_loras=1)
    driver.ask(1, "a", max_tokens=40, is_low_priority=True)
    driver.steps(10)
    driver.ask(2, "b", max_tokens=4)
    driver.steps(3)
    assert waits_of(driver, 1)["waits"][-1]["end_s"] is None, "it has yielded its slot"
    driver.ask(3, "a", max_tokens=4)
    asked_s = driver.now
    driver.steps(1)
    driver.abort(3)
    (wait,) = waits_of(driver, 3)["waits"]
    assert wait["at_s"] == asked_s and wait["end_s"] == driver.scheduler.requests.log.ended[3].end_s
    driver.run()
    assert waits_of(driver, 1)["waits"][-1]["end_s"] is not None


def test_the_first_waits_are_kept_and_the_sums_are_of_all() -> None:
    waits = AdapterWaits("a")
    for second in range(0, 100, 2):
        waits.change("slot", float(second))
        waits.change("slot", second + 0.5)
        waits.change(None, second + 1.0)
    found = waits.history()
    assert len(found["waits"]) == _MAX_WAITS and (found["load_s"], found["slot_s"]) == (0.0, 50.0)


def test_the_live_state_has_the_adapters_in_use_first() -> None:
    driver = AdapterDriver()
    assert live_state(driver.scheduler, driver.now)["slowest"] == []
    for number in range(1, MAX_ADAPTER_LABELS + 10):
        driver.load(f"name {number}", number)
    for number, name in enumerate((70, 70, 71, 72), 1):
        driver.ask(number, f"name {name}", max_tokens=30)
    while driver.scheduler.num_running < 3:
        driver.step()
    found = live_state(driver.scheduler, driver.now)
    adapters = found["adapters"]
    assert adapters is not None
    assert (adapters["slots"], adapters["in_slots"], adapters["names"]) == (2, 2, MAX_ADAPTER_LABELS + 9)
    assert adapters["in_host_memory"] <= adapters["host_limit"] == driver.adapters.registry.max_in_host_memory
    shown = adapters["shown"]
    assert len(shown) == MAX_ADAPTER_LABELS
    assert shown[:2] == [
        {"name": "name 70", "state": "ready", "slot": 1, "running": 2, "waiting": 0},
        {"name": "name 71", "state": "ready", "slot": 2, "running": 1, "waiting": 0},
    ]
    third = shown[2]
    assert (third["name"], third["slot"], third["running"], third["waiting"]) == ("name 72", 0, 0, 1)
    assert adapters["waiting"] == 1
    assert [one["adapter"] for one in found["slowest"]] == ["name 70", "name 70", "name 71", "name 72"]
