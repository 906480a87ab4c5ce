"""Sequences of models with recurrent layers read the right state in every step, and get the same tokens as others.

The fake ranks keep the history of tokens in each slot. A slot that was not swapped, a state of another length or of
another sequence, a stale slot, and a slot that is written in the step that reads it fail at once: `state_fakes.py`.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oarlock.engine.config import EngineConfig
from oarlock.engine.kv_cache.state_slots import NULL_SLOT, StateSlots
from oarlock.engine.scheduler.sequence import Decodes, SchedulerOutput
from oarlock.engine.scheduler.state_steps import StateRows
from oarlock.engine.types import FinishReason
from oarlock.workers.config import GroupInfo
from oarlock.workers.protocol import StepMetadata
from tests.unit.engine.engine_fakes import Driver, Faults, make_config, make_request
from tests.unit.engine.scheduler.test_pipeline_depth import Scene, answer, make_scene, run_scene, run_withdrawing
from tests.unit.engine.scheduler.test_refused_steps import now_and_then


def make_groups(num_slots: int, num_blocks: int, window: int | None = None) -> tuple[GroupInfo, ...]:
    """Groups of a model with attention layers and two kinds of recurrent layers."""
    slots = GroupInfo(num_slots, 0, is_recurrent=True)
    return slots, GroupInfo(num_blocks, 0, span=window), slots


def only_recurrent(num_slots: int, num_blocks: int, window: int | None) -> tuple[GroupInfo, ...]:
    return make_groups(num_slots, num_blocks)[:1]


def make_driver(*, num_slots: int = 20, num_blocks: int = 200, window: int | None = None, **config) -> Driver:
    """Driver of a server whose prompts can be long."""
    sizes: dict[str, Any] = {"max_model_len": 6000, "block_size": 32, "max_num_batched_tokens": 512, **config}
    return Driver(make_config(**sizes), num_blocks, groups=make_groups(num_slots, num_blocks, window))


def random_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 64, count).tolist()


def num_computed(driver: Driver, request_id: int, prompt, **params) -> int:
    """Run a request alone; return the number of its prompt tokens that were computed."""
    driver.add(make_request(request_id, prompt, **params))
    driver.run().check_outputs()
    timeline = driver.scheduler.requests.log.ended[request_id]
    return timeline.prompt_tokens - timeline.cached_tokens


# -- random scenes


def with_states(scene: Scene, num_slots: int, groups: Callable[..., tuple[GroupInfo, ...]] = make_groups) -> Scene:
    return replace(scene, groups=groups(num_slots, scene.num_blocks, scene.window))


def run(scene: Scene, depth: int | None, stages: int, refuses: Callable[[StepMetadata], bool] | None) -> Driver:
    def make(config: EngineConfig, num_blocks: int, faults: Faults, *others) -> Driver:
        if refuses is not None:
            faults.refuses = refuses
        return Driver(config, num_blocks, faults, *others)

    return run_scene(scene, depth, make, stages=stages)


def check_equal(scene: Scene, expected: Driver, got: Driver) -> None:
    for number, request in expected.requests.items():
        one, other = answer(expected, number), answer(got, number)
        if FinishReason.ABORT in (one[3][0], other[3][0]):
            assert number in scene.aborts
            shorter, longer = sorted((one[0], other[0]), key=len)
            assert longer[: len(shorter)] == shorter
        else:
            assert one == other, f"request {number}: {request.params}"


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param((4, 12, 31), id="few"),
        *(
            pytest.param(range(first, first + 4), id=f"from {first}", marks=pytest.mark.soak)
            for first in range(0, 32, 4)
        ),
    ],
)
@pytest.mark.parametrize("groups", [make_groups, only_recurrent])
@pytest.mark.parametrize(("depth", "stages"), [(1, 1), (2, 1), (None, 3)])
@pytest.mark.parametrize("refuses", [None, now_and_then])
@pytest.mark.slow
def test_every_answer_is_that_of_a_model_without_recurrent_layers(
    monkeypatch: pytest.MonkeyPatch,
    seeds: Sequence[int],
    groups: Callable[..., tuple[GroupInfo, ...]],
    depth: int | None,
    stages: int,
    refuses: Callable[[StepMetadata], bool] | None,
) -> None:
    """Chunks of prompts, shared prefixes, windows, preemptions, aborts, grammars and refused steps among them."""
    monkeypatch.setattr("oarlock.engine.scheduler.refused_steps.GROW_AFTER_STEPS", 3)
    monkeypatch.setattr("oarlock.engine.kv_cache.sequence_memory.LEAST_AWAITED_TOKENS", 4)
    saved = resumed = 0
    for seed in seeds:
        scene, num_slots = make_scene(seed), (60, 14, 24, 3)[seed % 4]
        got = run(with_states(scene, num_slots, groups), depth, stages, refuses)
        check_equal(scene, run_scene(scene, 1), got)
        assert got.executor.states is not None
        saved, resumed = saved + got.executor.states.num_saved, resumed + got.executor.states.num_resumed
    assert saved > 20 * len(seeds) and resumed > len(seeds)


@pytest.mark.slow
def test_sequences_that_leave_a_step_before_it_is_sent_leave_no_slot() -> None:
    for seed in range(3):
        run_withdrawing(with_states(make_scene(seed), 14), Driver)


# -- prefix hits


def test_the_same_prompt_again_computes_less_than_a_block() -> None:
    driver, prompt = make_driver(), random_ids(2000)
    assert num_computed(driver, 1, prompt) == 2000
    assert num_computed(driver, 2, prompt) == 2000 % 32
    assert num_computed(driver, 3, [*prompt, 1, 2, 3]) == 2000 % 32 + 3
    assert num_computed(driver, 4, prompt[:1999]) == 1999 % 32
    assert num_computed(driver, 5, prompt, prompt_logprobs=0) == 2000  # all are scored


def test_prompts_with_the_same_beginning_meet_where_they_part() -> None:
    """The second prompt finds keys and values but no state, so it leaves a checkpoint there for the third."""
    driver, shared = make_driver(), random_ids(640)
    first, second, third = ([*shared, *random_ids(100, seed)] for seed in (1, 2, 3))
    assert num_computed(driver, 1, first) == 740
    assert num_computed(driver, 2, second) == 740
    assert num_computed(driver, 3, third) == 100


@pytest.mark.parametrize("depth", [1, 2])
def test_equal_prompts_wait_for_the_first_of_them(depth: int) -> None:
    """Eight choices of one request compute the prompt once; a short request behind them does not wait."""
    driver, prompt = make_driver(num_blocks=800, num_slots=40, pipeline_depth=depth, max_num_seqs=10), random_ids(2000)
    for number in range(1, 9):
        driver.add(make_request(number, prompt, max_tokens=4))
    driver.add(make_request(9, random_ids(20, 9)))
    driver.step()
    driver.step()
    assert [seq.request_id for seq in driver.scheduler.requests.running] == [1, 9]
    driver.run().check_outputs()
    stats = driver.scheduler.stats
    assert stats.prefix_cache_queries - stats.prefix_cache_hits == 2020 + 7 * (2000 % 32)


def test_a_prompt_does_not_wait_for_one_that_ends() -> None:
    driver, prompt = make_driver(), random_ids(2000)
    for number in (1, 2):
        driver.add(make_request(number, prompt))
    driver.step()
    driver.abort(1)
    driver.run().check_outputs()
    driver.check_idle()


def test_a_conversation_goes_on_from_its_last_full_block() -> None:
    driver, prompt = make_driver(), random_ids(100)
    assert num_computed(driver, 1, prompt, max_tokens=200) == 100
    text = [*prompt, *driver.tokens[1]]
    computed = (len(text) - 1) // 32 * 32  # the last token was never computed
    assert num_computed(driver, 2, [*text, 5, 6, 7], max_tokens=200) == len(text) + 3 - computed
    slots = driver.scheduler.memory.slots
    assert slots is not None and slots.num_checkpoints <= 5  # rolling checkpoints replace each other


def test_a_long_prompt_leaves_checkpoints_on_its_way() -> None:
    driver, prompt = make_driver(), random_ids(5000)
    assert num_computed(driver, 1, prompt) == 5000
    assert num_computed(driver, 2, [*prompt[:3000], *random_ids(500, 2)]) == 3500 - 2048
    assert num_computed(driver, 3, [*prompt[:2984], 1, 2, 3]) == 2987 - 2976  # where the second parted, to whole blocks


def test_groups_with_a_window_agree_with_a_checkpoint() -> None:
    """The window's blocks at the only checkpoint are gone, those at the end of the prompt are there."""
    driver, prompt = make_driver(window=64, num_blocks=40), random_ids(1000)
    assert num_computed(driver, 1, prompt) == 1000
    assert num_computed(driver, 2, prompt) == 1000 % 32
    slots = driver.scheduler.memory.slots
    assert slots is not None
    slots.forget_all()
    assert num_computed(driver, 3, prompt) == 1000
    assert num_computed(driver, 4, [*prompt, 1]) == 1000 % 32 + 1


def test_a_preempted_sequence_goes_on_from_its_last_checkpoint() -> None:
    driver = make_driver(num_blocks=14, block_size=4, max_model_len=64, max_num_seqs=2)
    for number in (1, 2):
        driver.add(make_request(number, random_ids(10, number), max_tokens=25))
    driver.run().check_outputs()
    assert driver.scheduler.stats.num_preemptions >= 1
    assert driver.executor.states is not None and driver.executor.states.num_resumed >= 1


def test_a_reset_cache_leaves_no_checkpoint() -> None:
    driver, prompt = make_driver(), random_ids(200)
    assert num_computed(driver, 1, prompt) == 200
    driver.scheduler.memory.reset_prefix_cache()
    assert num_computed(driver, 2, prompt) == 200


def test_without_a_prefix_cache_nothing_is_saved() -> None:
    driver, prompt = make_driver(enable_prefix_caching=False), random_ids(200)
    assert num_computed(driver, 1, prompt, max_tokens=100) == num_computed(driver, 2, prompt) == 200
    assert driver.executor.states is not None and driver.executor.states.num_saved == 0


def test_states_that_may_not_be_finite_are_forgotten() -> None:
    driver = make_driver()
    driver.executor.faults.poisoned_seeds = (1,)
    prompt = random_ids(2600)  # its first checkpoint is named before the step that shows the fault
    driver.add(make_request(1, prompt))
    driver.run()
    assert driver.ends[1].finish_reason is FinishReason.ERROR
    slots = driver.scheduler.memory.slots
    assert slots is not None and slots.num_checkpoints == 0
    assert num_computed(driver, 2, prompt) == 2600


def test_sequences_wait_for_slots() -> None:
    """Three slots: one sequence runs at a time, and the checkpoint of one is there for the next."""
    driver = make_driver(num_slots=4, max_num_seqs=8)
    for number in range(1, 7):
        driver.add(make_request(number, random_ids(100, number // 4), max_tokens=10))
    most = 0
    while driver.scheduler.has_work:
        driver.step()
        most = max(most, driver.scheduler.num_running)
    driver.check_outputs()
    driver.check_idle()
    stats = driver.scheduler.refresh_gauges()
    assert most == 1 and stats.num_state_slots_total == 3 and stats.num_state_slots_held == 0
    assert stats.num_state_checkpoints > 0 and stats.prefix_cache_hits > 0


def test_chunks_that_a_later_stage_refuses_start_again_from_a_checkpoint() -> None:
    """Three chunks of a prompt are in flight when the last stage refuses the first: others have run them all."""
    driver = make_driver(stages=3, block_size=4, max_num_batched_tokens=16)
    prompt = random_ids(200)
    assert num_computed(driver, 1, prompt[:40]) == 40
    driver.executor.faults.refuses = lambda step: step.positions[0] > 60 and driver.executor.num_refused < 3
    driver.add(make_request(2, prompt, max_tokens=8))
    driver.run().check_outputs()
    driver.check_idle()
    assert driver.executor.num_refused == 3 and driver.executor.states is not None
    assert driver.executor.states.num_resumed >= 2


# -- faults that must be found


def not_swapped(rows: StateRows, output: SchedulerOutput) -> None:
    assert output.states is not None
    in_step = [item.seq.row for item in output.items()]
    rows._reads[in_step], rows._writes[in_step] = output.states.reads, output.states.writes


def one_token_late(rows: StateRows, output: SchedulerOutput) -> None:
    assert output.states is not None
    saves = output.states.saves
    saves[:] = [save._replace(num_tokens=max(1, save.num_tokens - 1)) for save in saves]


def read_and_written(rows: StateRows, output: SchedulerOutput) -> None:
    assert output.states is not None
    output.states.writes[:] = np.where(output.states.reads == NULL_SLOT, output.states.writes, output.states.reads)


def of_another_sequence(rows: StateRows, output: SchedulerOutput) -> None:
    assert output.states is not None
    output.states.reads[:] = np.roll(output.states.reads, 1)


def stale(rows: StateRows, output: SchedulerOutput) -> None:
    """The step reads the slot that it should write, which holds an earlier state."""
    assert output.states is not None
    reads, writes, _ = output.states
    output.states = output.states._replace(reads=np.where(reads == NULL_SLOT, reads, writes), writes=reads.copy())


@pytest.mark.parametrize("fault", [not_swapped, one_token_late, read_and_written, of_another_sequence, stale])
def test_a_wrong_slot_is_found(monkeypatch: pytest.MonkeyPatch, fault: Callable[..., None]) -> None:
    schedule = StateRows.schedule

    def faulty(self: StateRows, output: SchedulerOutput) -> None:
        schedule(self, output)
        if output.states is not None:
            fault(self, output)

    monkeypatch.setattr(StateRows, "schedule", faulty)
    with pytest.raises(AssertionError):
        run_conversation(make_driver(block_size=4, max_num_batched_tokens=16))


@pytest.mark.parametrize("name", ["undo", "begin_step", "start", "give_back"])
def test_a_missing_change_is_found(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Slots that a refused step leaves as they are, and pins that are lost, kept or given back too early."""
    kind = StateRows if name == "undo" else StateSlots
    changes = {
        "undo": lambda self, outputs, state: [],
        "begin_step": lambda self: None,
        "start": lambda self, slot: self._unpin(slot),
        "give_back": lambda self, slots, *, has_started: None,
    }
    monkeypatch.setattr(kind, name, changes[name])
    driver = make_driver(block_size=4, max_num_batched_tokens=16, num_slots=4)
    driver.executor.faults.refuses = lambda step: step.step_id == 6
    with pytest.raises((AssertionError, KeyError)):
        run_conversation(driver)


def run_conversation(driver: Driver) -> None:
    """Run a sequence, and then two that continue its prompt."""
    prompt = random_ids(30)
    driver.add(make_request(1, prompt, max_tokens=1))
    driver.run()
    for number in (2, 3):
        driver.add(make_request(number, [*prompt, *random_ids(10, number)], max_tokens=12))
    driver.run().check_outputs()
    driver.check_idle()


# -- costs


def test_a_step_of_decodes_takes_the_same_calls_for_any_number_of_sequences() -> None:
    assert calls_of_a_step(3) == calls_of_a_step(300)


def calls_of_a_step(num_seqs: int) -> int:
    rows = StateRows(StateSlots(4), 512, 32, saves_checkpoints=True, has_stages=False)
    rows._reads[:], rows._others[:], rows._writes[:] = 1, 1, 2
    order = np.arange(num_seqs)
    output = SchedulerOutput(1, [], decodes=Decodes(order, order * 0, order.astype(np.int32), 0, []))
    count = 0

    def profile(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        rows.schedule(output)
    finally:
        sys.setprofile(None)
    return count
