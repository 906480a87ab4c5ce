"""Replayed events of the prefix cache equal the pool's contents after every step."""

from collections.abc import Sequence

import pytest

from oarlock.engine.kv_cache.block_events import AllBlocksCleared, BlockEventLog, BlockRemoved, BlockStored
from oarlock.engine.scheduler.sequence import SchedulerOutput
from oarlock.engine.types import TokenEvent
from tests.unit.engine.engine_fakes import Driver, Faults, make_config, make_request
from tests.unit.engine.kv_cache.replayed_blocks import ReplayedBlocks
from tests.unit.engine.scheduler.test_pipeline_depth import Scene, make_scene, run_scene, run_withdrawing
from tests.unit.engine.scheduler.test_refused_steps import now_and_then
from tests.unit.engine.spec_decode.test_speculation import Guesses, texts_of, use


class Listening(Driver):
    """Takes the events of each step, and compares what they say with the pool."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.manager = self.scheduler.memory
        self.log = self.manager.leader.pool.event_log = BlockEventLog()
        self.replayed = ReplayedBlocks(self.manager.block_size)

    def begin(self, num_withdrawn: int = 0) -> SchedulerOutput | None:
        output = super().begin(num_withdrawn)
        self.compare()
        return output

    def finish(self, output: SchedulerOutput | None = None) -> list[TokenEvent]:
        events = super().finish(output)
        self.compare()
        return events

    def compare(self) -> None:
        self.replayed.replay(self.log.take())
        self.replayed.check(self.manager)


def refusing(config, num_blocks: int, faults: Faults, window: int | None) -> Listening:
    faults.refuses = now_and_then
    return Listening(config, num_blocks, faults, window)


def with_drafts(scene: Scene, depth: int) -> Listening:
    guesses = Guesses(texts_of(run_scene(scene, 1)))

    def make(*arguments) -> Listening:
        driver = Listening(*arguments)
        use(driver, guesses)
        return driver

    return run_scene(scene, depth, make)


WAYS = {
    "one step": lambda scene: run_scene(scene, 1, Listening),
    "a step ahead": lambda scene: run_scene(scene, 2, Listening),
    "stages": lambda scene: run_scene(scene, None, Listening, stages=3),
    "refused steps": lambda scene: run_scene(scene, 2, refusing),
    "drafts": lambda scene: with_drafts(scene, 2),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "seeds", [(14, 31), pytest.param((2, *range(4, 13), 15, 28, 31), marks=pytest.mark.soak)], ids=["few", "many"]
)
@pytest.mark.slow
def test_replayed_events_are_the_pools_content(way: str, seeds: Sequence[int]) -> None:
    stored = removed = preemptions = 0
    for seed in seeds:
        driver = WAYS[way](make_scene(seed))
        driver.compare()
        stored, removed = stored + driver.replayed.num_stored, removed + driver.replayed.num_removed
        preemptions += driver.scheduler.stats.num_preemptions
    assert stored > removed > 10 * len(seeds) and preemptions


def test_blocks_of_withdrawn_steps_are_reported_as_removed() -> None:
    assert run_withdrawing(make_scene(31), Listening).replayed.num_removed


def test_each_event_in_order() -> None:
    """Two blocks of a prompt, a third of its answer; found by the next request, evicted by the last."""
    driver = Listening(make_config(block_size=4), 5)
    log = driver.log
    driver.add(make_request(1, range(10), max_tokens=5, cache_salt=b"tenant"))
    Driver.begin(driver)
    first, second = log.take()
    assert first == BlockStored(first.block_hash, None, [0, 1, 2, 3], b"tenant")
    assert second == BlockStored(second.block_hash, first.block_hash, [4, 5, 6, 7], b"tenant")
    while driver.scheduler.has_work or driver.in_flight:
        if not driver.in_flight:
            Driver.begin(driver)
        Driver.finish(driver)
    answer = [8, 9, *driver.tokens[1][:2]]
    (third,) = log.take()
    assert third == BlockStored(third.block_hash, second.block_hash, answer, b"tenant")
    driver.add(make_request(2, range(9), max_tokens=1, cache_salt=b"tenant"))
    Driver.begin(driver)
    Driver.finish(driver)
    assert log.take() == []  # it found what it needed
    driver.add(make_request(3, range(20, 34), max_tokens=1))
    Driver.begin(driver)
    Driver.finish(driver)
    events = log.take()
    assert events[:3] == [BlockRemoved(one.block_hash) for one in (third, second, first)]
    assert [type(event) for event in events[3:]] == [BlockStored] * 3
    driver.manager.reset_prefix_cache()
    assert log.take() == [AllBlocksCleared()]
