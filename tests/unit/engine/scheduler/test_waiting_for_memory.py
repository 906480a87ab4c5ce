"""Sequences that wait for blocks, slots or a checkpoint: others yield to them or pass them, and waiting is cheap."""

import pytest

from oarlock.engine.kv_cache.sequence_memory import SequenceMemory
from oarlock.workers.config import GroupInfo
from tests.unit.engine.engine_fakes import Driver, make_config, make_request

SIZE = 4
FULL, WINDOW = GroupInfo(41, 0), GroupInfo(41, 0, span=30)
SLOTS = GroupInfo(40, 0, is_recurrent=True)


def ids(number: int, count: int) -> list[int]:
    """Return a prompt that shares no block with that of another number."""
    return [number, *((number * 7 + index) % 64 for index in range(count - 1))]


def make_driver(*groups: GroupInfo, **config) -> Driver:
    sizes = {"max_model_len": 400, "block_size": SIZE, "max_num_batched_tokens": 64, "max_waiting_requests": 1000}
    return Driver(make_config(**{**sizes, **config}), groups=groups)


@pytest.mark.parametrize("groups", [(FULL,), (FULL, SLOTS), (FULL, WINDOW), (FULL, WINDOW, SLOTS)])
def test_batch_requests_give_up_blocks_whatever_the_memory_of_the_model(groups: tuple[GroupInfo, ...]) -> None:
    driver = make_driver(*groups)
    for number in (1, 2, 3):
        driver.add(make_request(number, ids(number, 40), max_tokens=20, is_low_priority=True))
    for _ in range(6):
        driver.step()
    driver.add(make_request(9, ids(9, 100)))
    driver.step()
    driver.step()
    running = [seq.request_id for seq in driver.scheduler.requests.running]
    assert 9 in running and driver.scheduler.stats.num_preemptions > 0
    driver.run().check_outputs()
    driver.check_idle()


@pytest.mark.parametrize("groups", [(FULL,), (FULL, SLOTS), (FULL, WINDOW, SLOTS)])
def test_a_refused_sequence_is_not_searched_again_in_every_step(
    monkeypatch: pytest.MonkeyPatch, groups: tuple[GroupInfo, ...]
) -> None:
    searches = []
    find_prefix = SequenceMemory.find_prefix
    monkeypatch.setattr(
        SequenceMemory, "find_prefix", lambda self, *others: searches.append(1) or find_prefix(self, *others)
    )
    driver = make_driver(*groups)
    driver.add(make_request(1, ids(1, 90), max_tokens=40))
    driver.step()
    driver.add(make_request(2, ids(2, 90)))
    for _ in range(30):
        driver.step()
    assert len(searches) == 2 and driver.scheduler.num_waiting == 1
    driver.run().check_outputs()
    assert len(searches) == 3
    driver.check_idle()
