"""Steps in the persistent inputs of graphs: the same tensors as without, and behind them padding that goes nowhere."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from oarlock.workers.attention.blocks_by_slot import BLOCK_ROWS, NO_ROW, UNUSED, BlocksBySlot
from oarlock.workers.attention.forward_batch import BlockTables, ForwardBatch, state_step
from oarlock.workers.protocol import NULL_BLOCK, StepMetadata, empty_step
from oarlock.workers.recurrent.states import NULL_SLOT, StateStep
from oarlock.workers.runner.buckets import MOST_PROMPTS, bucket_of, bucket_sizes, prompt_bucket_of
from oarlock.workers.runner.step_inputs import Layout, Shape, StagingBuffer, StepInputs
from oarlock.workers.runner.trial_steps import ONE_GROUP, SequenceChunk, TrialMemory, greedy_step
from oarlock.workers.sampling.columns import SamplingColumns

CPU = torch.device("cpu")
BLOCK = 4
NAMES = ("token_ids", "positions", "query_start_loc", "seq_lens", "rows", "logits_indices")


@pytest.mark.parametrize(
    ("most", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (16, [1, 2, 4, 8, 16]),
        (30, [1, 2, 4, 8, 16, 24, 30]),
        (64, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]),
        (100, [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 100]),
    ],
)
def test_buckets_lie_close_where_rows_are_few(most: int, expected: list[int]) -> None:
    assert bucket_sizes(most) == expected


def decodes(contexts: list[int], first_block: int = 1) -> StepMetadata:
    """One token of each of some sequences that have `contexts` tokens after it."""
    chunks, block = [], first_block
    for number, context in enumerate(contexts):
        blocks = range(block, block + -(-context // BLOCK))
        chunks.append(SequenceChunk([number + 1], context - 1, blocks))
        block = blocks.stop
    return greedy_step(chunks, BLOCK, range(len(contexts)), step_id=1)


@pytest.mark.parametrize("count", range(1, 21))
def test_a_plain_decode_takes_the_smallest_bucket_that_holds_it(count: int) -> None:
    sizes = bucket_sizes(16)
    size = bucket_of(decodes([3] * count), sizes)
    assert size == (None if count > 16 else min(size for size in sizes if size >= count))


def test_other_steps_take_none() -> None:
    sizes, blocks = bucket_sizes(16), range(1, 5)
    assert bucket_of(greedy_step([SequenceChunk([5, 6, 7], 0, blocks)], BLOCK, [2]), sizes) is None  # a prompt
    assert bucket_of(greedy_step([SequenceChunk([5], 0, blocks)], BLOCK, []), sizes) is None  # a part of one
    drafted = greedy_step([SequenceChunk([5, 6], 3, blocks, num_drafts=1)], BLOCK, [0, 1])
    assert bucket_of(drafted, sizes) is None
    mixed = [SequenceChunk([5], 3, blocks), SequenceChunk([6, 7, 8], 0, range(5, 6))]
    assert bucket_of(greedy_step(mixed, BLOCK, [0, 3]), sizes) is None


def test_steps_of_any_kind_take_the_smallest_bucket_of_tokens() -> None:
    sizes = [16, 32, 64]
    prompts = [SequenceChunk([5, 6, 7], 0, [1]) for _ in range(MOST_PROMPTS + 1)]
    assert prompt_bucket_of(greedy_step(prompts[:-1], BLOCK), sizes) == 64
    assert prompt_bucket_of(greedy_step(prompts, BLOCK), sizes) is None, "tiles for one more prompt"
    assert prompt_bucket_of(decodes([3] * 17), sizes) == 32
    assert prompt_bucket_of(decodes([3] * 65), sizes) is None and prompt_bucket_of(decodes([3]), []) is None


def inputs_of(
    num_rows: int = 8, width: int = 8, memory: TrialMemory = ONE_GROUP, slots: int = 0
) -> tuple[StepInputs, BlockTables]:
    tables = BlockTables(num_rows, width, BLOCK, CPU, memory.pages_groups)
    groups, seqs = len(memory.pages_groups), num_rows if memory.has_states else 0
    largest = Shape(64, num_rows, 64, groups * num_rows * width, groups, seqs, 64 if seqs else 0, slots)
    return StepInputs(tables, largest, num_rows, 100), tables


MEMORIES = {"one group": ONE_GROUP, "two groups": TrialMemory((0, 2)), "with states": TrialMemory((1,), True),
            "only states": TrialMemory((), True)}  # fmt: skip


@pytest.mark.parametrize("memory", MEMORIES.values(), ids=MEMORIES)
@pytest.mark.parametrize("seed", range(3))
def test_staged_steps_match_steps_copied_array_by_array(seed: int, memory: TrialMemory) -> None:
    """Steps of any kind, one after the other through the same memory."""
    draw = np.random.default_rng(seed)
    inputs, tables = inputs_of(memory=memory)
    judged = BlockTables(8, 8, BLOCK, CPU, memory.pages_groups)
    for _ in range(6):
        chunks, block = [], 1
        for _ in range(draw.integers(1, 6)):
            start, count = int(draw.integers(0, 12)), int(draw.integers(1, 9))
            blocks = range(block, block + -(-(start + count) // BLOCK))
            saves = [(int(draw.integers(1, count + 1)), int(draw.integers(9)))] if draw.integers(2) else []
            slots = draw.integers(0, 9, 2).tolist()
            chunks.append(SequenceChunk(draw.integers(0, 99, count).tolist(), start, blocks, 0, *slots, saves))
            block = blocks.stop
        tokens = sum(len(chunk.token_ids) for chunk in chunks)
        rows = sorted(draw.choice(tokens, draw.integers(1, tokens + 1), replace=False))
        step = greedy_step(chunks, BLOCK, rows, memory=memory)
        if len(memory.pages_groups) == 2:  # the groups have different blocks
            step.table_blocks[len(step.table_blocks) // 2 :] += 3
        judged.write(step)
        expected = ForwardBatch.from_step(step, judged)
        got = inputs.stage(step).batch(expected.query_lens, expected.context_lens, torch.zeros(1, dtype=torch.int64))
        for name in NAMES:
            assert torch.equal(getattr(got, name), getattr(expected, name)), name
            assert getattr(got, name).dtype == getattr(expected, name).dtype, name
        assert got.slots.keys() == got.block_tables.keys() == set(memory.pages_groups)
        for group, slots in expected.slots.items():
            assert torch.equal(got.slots[group], slots)
            assert got.slots[group].data_ptr() % 16 == 0, "Triton would compile its kernels anew"
            rows_of_tokens = torch.repeat_interleave(got.rows.long(), torch.tensor(got.query_lens))
            held = tables.of_group[group][rows_of_tokens, got.positions // BLOCK]
            assert torch.equal(slots, held.long() * BLOCK + got.positions % BLOCK)
        assert (got.state is None) is (expected.state is None) is not memory.has_states
        if got.state is not None and expected.state is not None:
            for field in fields(StateStep):
                assert torch.equal(getattr(got.state, field.name), getattr(expected.state, field.name)), field.name
        assert (got.num_tokens, got.num_logits) == (expected.num_tokens, expected.num_logits)
        assert torch.equal(tables.tables, judged.tables)


@pytest.mark.parametrize("many_blocks", [False, True], ids=["a block each", "more blocks than room"])
def test_padding_is_a_token_in_the_null_block(many_blocks: bool) -> None:
    inputs, tables = inputs_of()
    step = decodes([9, 2, 17])  # 3 + 1 + 5 blocks
    if not many_blocks:
        step = replace(
            step,
            **{
                name: getattr(step, name)[:2]
                for name in ("table_groups", "table_rows", "table_columns", "table_blocks")
            },
        )
    judged = BlockTables(8, 8, BLOCK, CPU)
    judged.write(step)
    expected = ForwardBatch.from_step(step, judged)
    before = inputs.bucket(8).batch([1] * 8, [1] * 8, torch.zeros(1, dtype=torch.int64))
    batch = inputs.stage(step, 8).batch([1] * 8, [1] * 8, torch.zeros(1, dtype=torch.int64))
    for name in NAMES:
        here, only = getattr(batch, name), getattr(expected, name)
        assert torch.equal(here[: len(only)], only), name
        if name != "token_ids":  # made anew, as references are replaced
            assert here.data_ptr() == getattr(before, name).data_ptr(), name
    assert batch.seq_lens.tolist() == [9, 2, 17, 1, 1, 1, 1, 1]
    assert torch.equal(batch.slots[0][:3], expected.slots[0])
    assert batch.slots[0].data_ptr() == before.slots[0].data_ptr()
    assert batch.slots[0][3:].tolist() == [NULL_BLOCK * BLOCK] * 5
    assert batch.query_start_loc.tolist() == [*range(9)] and batch.logits_indices.tolist() == [*range(8)]
    assert (tables.of_group[0][batch.rows[3:].long()] == NULL_BLOCK).all()
    assert torch.equal(tables.tables, judged.tables)


@pytest.mark.parametrize(
    ("room", "left"), [(16, [1] * 6 + [3]), (8, [1, 0, 0, 0, 0, 0, 0]), (7, [0] * 7), (40, [1] * 6 + [27])]
)
def test_tokens_of_padding_match_sequences_of_padding(room: int, left: list[int]) -> None:
    """Two prompts in steps of `room` tokens and nine sequences: at addresses that rows of logits do not move."""
    inputs, tables = inputs_of()
    step = greedy_step([SequenceChunk([5, 6, 7], 2, [1, 2]), SequenceChunk([1, 2, 3, 4], 0, [3])], BLOCK, [6])
    empty = inputs.stage(empty_step(0), prompts=room)
    place = inputs.stage(step, prompts=room)
    for name in NAMES[:-1]:
        assert place.tensors[name].data_ptr() == empty.tensors[name].data_ptr(), name
        assert place.tensors[name].shape == empty.tensors[name].shape, name
    assert place.tensors["query_start_loc"].diff().tolist() == [3, 4, *left]
    assert place.tensors["seq_lens"].tolist() == [5, 4, *(max(1, count) for count in left)]
    assert place.tensors["rows"].tolist() == [0, 1] + [tables.null_row] * 7
    assert place.tensors["slots"][0, 7:room].tolist() == [NULL_BLOCK * BLOCK] * (room - 7)
    assert place.tensors["logits_indices"].tolist() == [6]


def test_references_become_the_tokens_of_the_step_before() -> None:
    inputs, _ = inputs_of()
    step = replace(decodes([3, 3, 3]), token_ids=np.array([-2, 7, -1], np.int32))
    place, sampled = inputs.stage(step, 4), torch.tensor([40, 50, 60])
    assert place.batch([1] * 4, [3] * 4, sampled).token_ids.tolist() == [50, 7, 40, 0]
    sampled[:2] = torch.tensor([41, 51])
    assert place.batch([1] * 4, [3] * 4, sampled).token_ids.tolist() == [51, 7, 41, 0]


def test_bias_and_masks_follow_a_step_that_has_them() -> None:
    inputs, _ = inputs_of()
    step = replace(
        decodes([3, 3, 3]),
        bias_rows=np.array([1, 1, 2], np.int32),
        bias_ids=np.array([7, 9, 7], np.int32),
        bias_values=np.array([0.5, -np.inf, 2.0], np.float32),
        mask_rows=np.array([0, 2], np.int32),
        mask_bits=np.arange(8, dtype=np.uint32).reshape(2, 4) + np.uint32(0xFFFFFFF0),
    )
    columns = inputs.stage(step, 4).columns
    inputs.stage_masks(step)
    expected = SamplingColumns.of_step(step, CPU)
    assert columns.bias_starts.tolist() == [0, 0, 2, 3, 3] and columns.mask_index.tolist() == [0, -1, 1, -1]
    assert torch.equal(columns.bias[:3], expected.bias) and torch.equal(columns.mask_bits[:2], expected.mask_bits)
    assert torch.equal(columns.keys[:3], expected.keys) and torch.equal(columns.temperature[:3], expected.temperature)
    plain = inputs.stage(decodes([4, 4, 4, 4]), 4).columns
    assert plain.bias_starts.tolist() == [0] * 5 and plain.mask_index.tolist() == [-1] * 4


def test_sections_share_no_byte() -> None:
    layout = Layout([("a", "|u1", (3,)), ("b", "<i8", (2, 2)), ("c", "<f4", (0,)), ("d", "<i4", (5,))])
    memory = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    arrays, tensors = layout.arrays(memory.numpy()), layout.tensors(memory)
    for value, array in enumerate(arrays.values()):
        array[...] = value + 1
    for value, (name, tensor) in enumerate(tensors.items()):
        assert (tensor == value + 1).all() and tuple(tensor.shape) == arrays[name].shape
        assert tensor.data_ptr() % 64 == memory.data_ptr() % 64 or not tensor.numel()


def test_a_half_that_is_being_copied_is_not_written_again() -> None:
    staging = StagingBuffer(64, CPU)
    first = staging.on_host
    staging.turn()
    second = staging.on_host
    staging.turn()
    assert not np.shares_memory(first, second) and np.shares_memory(first, staging.on_host)


def test_padding_sequences_read_the_null_slot_and_write_the_sink() -> None:
    inputs, _ = inputs_of(memory=TrialMemory((0,), True))
    inputs.sink = 7
    chunks = [SequenceChunk([5], 7, [1, 2], 0, 3, 4, [(1, 5)]), SequenceChunk([6], 0, [3], 0, NULL_SLOT, 6)]
    step = greedy_step(chunks, BLOCK, [0, 1], memory=TrialMemory((0,), True))
    addresses = [tensor.data_ptr() for tensor in inputs.bucket(4).tensors.values()]
    place = inputs.stage(step, 4)
    state = place.batch([1] * 4, [8] * 4, torch.zeros(1, dtype=torch.int64)).state
    assert state is not None and [tensor.data_ptr() for tensor in place.tensors.values()] == addresses
    assert (state.reads.tolist(), state.writes.tolist()) == ([3, 0, 0, 0], [4, 6, 7, 7])
    assert state.starts.tolist() == [0, 1, 2, 3, 4] and state.save_starts.tolist() == [0, 1, 1, 1, 1]
    assert (state.save_lens.tolist(), state.save_slots.tolist()) == ([1, 0, 0, 0], [5, 7, 7, 7])


def rows_of(blocks: BlocksBySlot) -> dict[int, list[int]]:
    """Return the rows of each slot."""
    found: dict[int, list[int]] = {}
    for slot, rows in zip(blocks.slots.tolist(), blocks.order.view(-1, BLOCK_ROWS).tolist(), strict=True):
        own = [row for row in rows if row != NO_ROW]
        assert bool(own) == (slot != UNUSED)
        found.setdefault(slot, []).extend(own)
    return {slot: rows for slot, rows in found.items() if rows}


def test_rows_of_adapters_are_at_fixed_addresses() -> None:
    """In decodes and in prompts, with padding that has no adapter; rows of logits move nothing that graphs read."""
    inputs, _ = inputs_of(slots=2)
    sampled = torch.zeros(1, dtype=torch.int64)

    def staged(slots: list[int], **size: int) -> tuple[BlocksBySlot, BlocksBySlot, list[int]]:
        logits = [5, 0] if "prompts" in size else [0, 1, 2]
        chunks = [SequenceChunk([5, 6, 7][: 3 if "prompts" in size else 1], 0, [1 + n]) for n in range(len(slots))]
        step = replace(greedy_step(chunks, BLOCK, logits), adapter_slots=np.array(slots, np.int32))
        place = inputs.stage(step, **size)
        adapters = place.batch([1] * 4, [1] * 4, sampled, adapts=True).adapters
        assert isinstance(adapters, BlocksBySlot)
        return adapters, place.logits_adapters(0), [adapters.order.data_ptr(), adapters.slots.data_ptr()]

    blocks, logits, addresses = staged([1, 0, 2], bucket=4)
    assert rows_of(blocks) == rows_of(logits) == {0: [1, 3], 1: [0], 2: [2]}
    blocks, _, again = staged([2, 2, 2], bucket=4)
    assert rows_of(blocks) == {0: [3], 2: [0, 1, 2]} and again == addresses
    blocks, logits, addresses = staged([0, 1], prompts=8)
    assert rows_of(blocks) == {0: [0, 1, 2, 6, 7], 1: [3, 4, 5]} and rows_of(logits) == {0: [1], 1: [0]}
    empty = inputs.stage(empty_step(0), prompts=8)
    assert [empty.tensors[name].data_ptr() for name in ("adapter_order", "adapter_blocks")] == addresses
    assert rows_of(empty.batch([1], [1], sampled, adapts=True).adapters) == {0: [*range(8)]}
    assert inputs.stage(decodes([3, 3])).shape.slots == 0, "a step without adapters has rows to sort"
    with pytest.raises(AssertionError, match="no adapters are served"):
        inputs_of()[0].stage(replace(decodes([3]), adapter_slots=np.ones(1, np.int32)))


def test_slots_of_states_follow_a_step_whose_arrays_are_reused() -> None:
    """As the arrays of a ring's slot are, for steps of the same shape."""

    def step_of(*slots: int) -> StepMetadata:
        first, second, third, fourth, saved = slots
        chunks = [SequenceChunk([5, 6], 0, [1], 0, first, second, [(1, saved)] if saved % 2 else [])]
        chunks.append(SequenceChunk([7, 8], 0, [2], 0, third, fourth, [] if saved % 2 else [(2, saved)]))
        return greedy_step(chunks, BLOCK, memory=TrialMemory((), True))

    used, following = step_of(1, 2, 3, 4, 9), step_of(5, 6, 7, 8, 10)
    before = state_step(used, CPU)
    for name in ("state_reads", "state_writes", "state_saves"):
        getattr(used, name)[...] = getattr(following, name)
    found, wanted = state_step(used, CPU), state_step(following, CPU)
    assert found is before
    for field in fields(StateStep):
        assert torch.equal(getattr(found, field.name), getattr(wanted, field.name)), field.name
    assert wanted.save_starts.tolist() == [0, 0, 1] and wanted.save_slots.tolist() == [10]
