"""Several memory groups: a sequence has a table in each, and a prefix is found if all of them have it."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.engine.core.engine_core import live_state
from oarlock.engine.kv_cache.block_events import BlockEventLog
from oarlock.engine.kv_cache.sequence_memory import SequenceMemory
from oarlock.engine.scheduler.sequence import Sequence
from oarlock.workers.config import GroupInfo
from oarlock.workers.protocol import NULL_BLOCK, StepMetadata
from tests.unit.engine.engine_fakes import Driver, make_config, make_request
from tests.unit.engine.kv_cache.replayed_blocks import ReplayedBlocks
from tests.unit.engine.kv_cache.test_kv_cache_manager import CountedLookups
from tests.unit.engine.scheduler.test_pipeline_depth import Scene, make_scene, run_scene, run_withdrawing

SIZE = 4
FULL, WINDOW = GroupInfo(60, 0), GroupInfo(60, 0, span=10)
SLOTS = GroupInfo(40, 0, is_recurrent=True)
MODELS = {
    "full and window": (FULL, WINDOW),
    "window first, two full of other sizes": (WINDOW, FULL, GroupInfo(50, 0)),
    "two windows": (WINDOW, GroupInfo(45, 0, span=3)),
}


def sequence(memory: SequenceMemory, prompt) -> Sequence:
    tables = memory.new_tables()
    return Sequence(make_request(1, prompt), key=(0.0, 1), max_len=1000, arrival_s=0.0, tables=tables)


def memory_of(*groups: GroupInfo, max_step_tokens: int = 8) -> SequenceMemory:
    numbered = dict(enumerate(groups))
    return SequenceMemory(numbered, SIZE, enable_prefix_caching=True, max_step_tokens=max_step_tokens)


def compute(memory: SequenceMemory, seq: Sequence, step: int = 8) -> None:
    """Compute all tokens of `seq` in steps."""
    num_computed = memory.allocate(seq, seq.num_tokens, 0)
    assert num_computed is not None
    while num_computed < seq.num_tokens:
        seq.num_computed_tokens = num_computed
        memory.free_unread(seq, [])
        num_computed = memory.grow_up_to(seq, min(seq.num_tokens, num_computed + step), 0, [])
        memory.cache_blocks(seq, num_computed)
        memory.audit([seq])
    seq.num_computed_tokens = num_computed


def found(memory: SequenceMemory, prompt) -> int:
    return len(memory.find_prefix(sequence(memory, prompt), 1000)[0]) * SIZE


@pytest.mark.parametrize("name", MODELS)
def test_each_group_holds_what_its_tokens_read(name: str) -> None:
    driver = Driver(make_config(max_model_len=200), groups=MODELS[name])
    driver.add(make_request(1, [1, 2, 3], max_tokens=150))
    memory = driver.scheduler.memory
    most = dict.fromkeys(range(len(memory.managers)), 0)
    while driver.scheduler.has_work:
        output = driver.begin()
        (item,) = driver.items
        for manager in memory.managers:
            table = driver.executor.tables[0][manager.number][0].tolist()
            first = manager.first_column_read(item.start)
            assert all(block != NULL_BLOCK for block in table[first : item.start // SIZE + 1])
            most[manager.index] = max(most[manager.index], manager.pool.num_held)
        driver.finish(output)
    for manager in memory.managers:
        assert most[manager.index] == (38 if manager.span is None else (manager.span + SIZE - 2) // SIZE + 1)
    driver.check_outputs()
    driver.check_idle()


def test_a_prefix_is_as_long_as_all_groups_agree() -> None:
    memory = memory_of(FULL, WINDOW)
    window, full = memory.pools
    seq, prompt = sequence(memory, range(40)), [*range(40), 50]
    compute(memory, seq)
    memory.free(seq)
    assert found(memory, prompt) == 40 and memory.num_held == 0
    hashes = seq.block_hashes
    window.forget(hashes[0])  # no later token reads it
    assert found(memory, prompt) == 40
    window.forget(hashes[8])  # 36 to 40 tokens lack their window, 32 have it
    assert found(memory, prompt) == 32
    full.forget(hashes[6])
    assert found(memory, prompt) == 24
    window.forget(hashes[3])  # and now lengths of 16 to 24 do
    assert found(memory, prompt) == 0  # the first block is missing as well
    other = sequence(memory, prompt)
    assert memory.allocate(other, 1000, 0) == 0


def test_a_hit_takes_the_window_only() -> None:
    memory = memory_of(FULL, WINDOW)
    seq, other = sequence(memory, range(40)), sequence(memory, [*range(40), 50])
    compute(memory, seq)
    memory.free(seq)
    assert memory.allocate(other, 1000, 0) == 40
    by_window, by_full = other.tables
    assert by_window.block_ids[:7] == [NULL_BLOCK] * 7 and by_window.num_freed == 7
    assert len(by_window.block_ids) == 10 and NULL_BLOCK not in by_window.block_ids[7:]
    assert len(by_full.block_ids) == 11 and NULL_BLOCK not in by_full.block_ids
    memory.audit([other])


def test_a_search_reads_each_block_of_a_window_twice_and_no_others() -> None:
    memory = memory_of(GroupInfo(300, 0), GroupInfo(300, 0, span=10))
    seq = sequence(memory, range(1000))
    compute(memory, seq)
    memory.free(seq)
    window = memory.managers[0].pool
    window.block_of_hash = lookups = CountedLookups(window.block_of_hash)
    assert found(memory, range(1000)) == 996 and lookups.count == 2 * 3


def test_the_group_that_is_short_refuses_and_is_remembered() -> None:
    memory = memory_of(GroupInfo(30, 0), GroupInfo(9, 0, span=10))
    first, second = sequence(memory, range(20)), sequence(memory, range(100, 130))
    compute(memory, first)
    window = memory.managers[0]
    assert window.pool.num_held == 4 and memory.allocate(second, 1000, 0) is None
    assert second.shortage is not None and second.shortage.short_group == window.index
    assert memory.num_held == 9 and not any(table.block_ids for table in second.tables)
    memory.free_unread(first, [])  # one block of the window: six are needed, and five available
    assert window.pool.num_available == 5 and memory.can_allocate(second, 0) is False
    memory.free(first)
    assert memory.allocate(second, 1000, 0) == 0


def test_limits_of_requests_are_those_of_groups_without_a_window() -> None:
    config = make_config(max_model_len=4096, max_num_batched_tokens=16)
    assert Driver(config, groups=(GroupInfo(101, 0), GroupInfo(9, 0, span=10))).scheduler.limits.max_len == 400
    assert Driver(config, groups=(GroupInfo(101, 0), GroupInfo(8, 0, span=10))).scheduler.limits.max_len == 28
    assert Driver(config, groups=(WINDOW, GroupInfo(45, 0, span=3))).scheduler.limits.max_len == 4096
    assert Driver(config, groups=(SLOTS,)).scheduler.limits.max_len == 4096


def test_models_without_pages_name_blocks_and_send_no_tables() -> None:
    driver = Driver(make_config(), groups=(SLOTS, SLOTS))
    driver.add(make_request(1, range(9), max_tokens=8))
    output = driver.scheduler.schedule(0.0)
    assert output is not None and output.new_blocks
    assert not len(driver.input_batch.build(output).step.table_blocks)
    driver.scheduler.audit()
    (seq,) = driver.scheduler._running
    assert len(seq.block_hashes) == 2


def test_counts_are_totals_and_the_usage_is_that_of_the_scarcest_group() -> None:
    driver = Driver(make_config(), groups=(GroupInfo(60, 0), GroupInfo(21, 0, span=10)))
    driver.add(make_request(1, range(12), max_tokens=4))
    driver.step()
    stats, kv = driver.scheduler.refresh_gauges(), live_state(driver.scheduler, driver.now)["kv"]
    assert (stats.num_blocks_total, stats.num_blocks_held, stats.kv_cache_usage) == (79, 6, 3 / 20)
    assert (kv["total"], kv["held"], kv["map"]) == (79, 6, "h3f17h3f56")


@pytest.mark.parametrize("depth", [1, 2])
def test_prompts_that_wait_for_each_others_blocks_go_on_one_after_the_other(depth: int) -> None:
    """Each of two prompts has half of the blocks of a window, and needs more than half."""
    config = make_config(max_model_len=300, max_num_batched_tokens=4, max_num_seqs=2, pipeline_depth=depth)
    driver = Driver(config, groups=(GroupInfo(100, 0), GroupInfo(15, 0, span=40)))
    driver.add(make_request(1, [number % 60 for number in range(200)], max_tokens=3))
    driver.add(make_request(2, [number % 50 for number in range(90)], max_tokens=3))
    driver.run().check_outputs()
    assert driver.scheduler.stats.num_preemptions == 1
    driver.check_idle()


_MORE = [pytest.param(seed, marks=pytest.mark.soak) for seed in range(304, 330)]


def grouped(seed: int) -> Scene:
    """A random scene with two or three groups, of pools that are sometimes as small as possible."""
    scene, draw = replace(make_scene(seed), window=None), random.Random(seed)
    size, step = scene.config["block_size"], scene.config["max_num_batched_tokens"]
    groups = [GroupInfo(scene.num_blocks, 0)]
    for span in draw.choice([(5,), (2, 30), (12,)]):
        least = -(-(span + step) // size) + 2
        groups.append(GroupInfo(draw.choice([least, 2 * least, 100]), 0, span=span))
    if draw.random() < 0.3:
        groups.append(GroupInfo(scene.num_blocks + draw.choice([0, 5]), 0))
    draw.shuffle(groups)
    return replace(scene, groups=tuple(groups))


class Listening(Driver):
    """Compares the events with the blocks that the leader finds, after each step."""

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.log = self.scheduler.memory.leader.pool.event_log = BlockEventLog()
        self.replayed = ReplayedBlocks(self.info.block_size)

    def begin(self, num_withdrawn: int = 0):
        output = super().begin(num_withdrawn)
        memory = self.scheduler.memory
        self.replayed.replay(self.log.take())
        self.replayed.check(memory)
        leader = memory.leader
        for manager in memory.managers:  # groups without a window and of equal size find the same blocks
            if manager.span == leader.span and manager.pool.num_blocks == leader.pool.num_blocks:
                assert leader.pool.block_of_hash.keys() == manager.pool.block_of_hash.keys()
        return output


@pytest.mark.parametrize("kind", ["one step", "ahead", "stages", "withdrawn"])
@pytest.mark.parametrize(
    "seed", [*range(300, 304), *(pytest.param(n, marks=pytest.mark.soak) for n in range(304, 330))]
)
@pytest.mark.slow
def test_random_scenes_give_every_request_its_tokens(kind: str, seed: int) -> None:
    scene = grouped(seed)
    if kind == "withdrawn":
        run_withdrawing(scene, Listening)
        return
    depth, stages = {"one step": (1, 1), "ahead": (2, 1), "stages": (None, 2)}[kind]
    run_scene(scene, depth, Listening, stages=stages).check_outputs()


@pytest.mark.parametrize("depth", [1, 2])
def test_refused_steps_leave_no_block_in_any_group(depth: int) -> None:
    config = make_config(max_num_batched_tokens=16, max_num_seqs=4, pipeline_depth=depth)
    driver = Driver(config, groups=(GroupInfo(40, 0), GroupInfo(30, 0, span=6)))

    def refuses(step: StepMetadata) -> bool:
        return step.num_tokens > 9 or step.step_id % 7 == 0

    driver.executor.faults.refuses = refuses
    for number in range(1, 9):
        driver.add(make_request(number, [*range(8), *range(number, number + 9)], max_tokens=12))
    driver.run().check_outputs()
    assert driver.executor.num_refused > 3
    driver.check_idle()


_LOST = st.lists(st.integers(0, 9), max_size=8)
_SPANS = st.sampled_from([2, 5, 9, 16])


@given(st.integers(1, 40), st.lists(st.tuples(_SPANS, _LOST), max_size=2))
@settings(max_examples=80, deadline=None)
def test_a_prefix_is_found_exactly_if_every_read_block_is(
    num_tokens: int, windows: list[tuple[int, list[int]]]
) -> None:
    """`windows`: span and lost columns of each group with a window; the other group has the first eight columns."""
    memory = memory_of(GroupInfo(60, 0), *(GroupInfo(60, 0, span=span) for span, _ in windows))
    seq, prompt = sequence(memory, range(40)), range(num_tokens)
    compute(memory, seq)
    memory.free(seq)
    lost_of = {0: {8, 9}} | {number: set(lost) for number, (_, lost) in enumerate(windows, 1)}
    for manager in memory.managers:
        for column in lost_of[manager.number]:
            manager.pool.forget(seq.block_hashes[column])
    expected = 0
    for length in range(1, (num_tokens - 1) // SIZE + 1):
        read = [(one, range(one.first_column_read(length * SIZE), length)) for one in memory.managers]
        if all(lost_of[one.number].isdisjoint(columns) for one, columns in read):
            expected = length
    assert found(memory, prompt) == expected * SIZE


@pytest.mark.parametrize("sizes", [(30, 6), (6, 30)])
def test_a_sequence_grows_in_all_groups_or_in_none(sizes: tuple[int, int]) -> None:
    memory = memory_of(GroupInfo(sizes[0], 0), GroupInfo(sizes[1], 0, span=10))
    seq, entries = sequence(memory, range(8)), []
    assert memory.grow(seq, 20, entries) and len(entries) == 10
    assert not memory.grow(seq, 21, entries) and not memory.grow_by_one(seq, entries)
    assert memory.grow_up_to(seq, 40, 0, entries) == 20
    assert len(entries) == memory.num_held == 10
    memory.audit([seq])
