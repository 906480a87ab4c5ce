"""The arrays of a step, entry by entry, against the scheduled tokens."""

import numpy as np
import pytest

from oarlock.engine.input_batch.input_batch import InputBatch
from oarlock.engine.scheduler.sequence import ScheduledTokens, SchedulerOutput, Sequence, Status
from oarlock.engine.types import Grammar
from oarlock.workers.protocol import StepMetadata, max_step_bytes, pack_step, unpack_step
from tests.unit.engine.engine_fakes import EOS, VOCAB, make_config, make_request
from tests.unit.engine.sampling_fakes import CountingGrammar

SIZE = 4


EVERYTHING = {
    "repetition_penalty": 1.5,
    "frequency_penalty": 0.25,
    "presence_penalty": -0.5,
    "logit_bias": ((9, 2.5), (4, -100.0), (60, 100.0), (33, 100.0)),
    "allowed_token_ids": (33, 5, 63, 4),
    "bad_words": ((5,), (7, 8, 33), (8, 7), (2, 11)),
}


def running(row: int, prompt, blocks, *, generated=(), **params) -> Sequence:
    seq = Sequence(make_request(row + 1, prompt, **params), key=(0.0, row), max_len=64, arrival_s=0.0)
    seq.row, seq.block_ids, seq.status = row, list(blocks), Status.RUNNING
    seq.token_ids.extend(generated)
    return seq


def output_of(*scheduled: ScheduledTokens, step_id: int = 1, new: bool = True) -> SchedulerOutput:
    seqs = [item.seq for item in scheduled] if new else []
    blocks = [(0, seq.row, column, block) for seq in seqs for column, block in enumerate(seq.block_ids)]
    return SchedulerOutput(step_id, list(scheduled), blocks, seqs)


class WholeSteps:
    """An `InputBatch` whose steps have their masks already, and the block tables that ranks have after each step."""

    def __init__(self) -> None:
        self.tables = np.full((4, 64 // SIZE), -1, np.int32)  # -1: never written
        self._input_batch = InputBatch(max_num_seqs=4, vocab_size=VOCAB)

    def build(self, output: SchedulerOutput) -> StepMetadata:
        step, masks = self._input_batch.build(output)
        if masks is not None:
            step.mask_bits = masks.compute()
        self.tables[step.table_rows, step.table_columns] = step.table_blocks
        return step

    def tables_of(self, step: StepMetadata) -> list[list[int]]:
        """The entries that the sequences of `step`, the one built last, read."""
        ends = -(-step.seq_lens // SIZE)
        return [self.tables[row, :end].tolist() for row, end in zip(step.rows, ends, strict=True)]


input_batch = WholeSteps


def test_a_mixed_step() -> None:
    decode = running(2, [1, 2, 3], [9, 4], generated=[7, 8], seed=-5, temperature=0.5, top_p=0.9, top_k=3, min_p=0.1)
    chunk = running(0, range(10, 20), [5, 6, 7])
    whole = running(1, [30, 31], [8], logprobs=2, seed=2**62)
    made = input_batch()
    step = made.build(
        output_of(
            ScheduledTokens(decode, 4, 1, True), ScheduledTokens(chunk, 3, 4, False), ScheduledTokens(whole, 0, 2, True)
        )
    )
    assert step.token_ids.tolist() == [8, 13, 14, 15, 16, 30, 31]
    assert step.positions.tolist() == [4, 3, 4, 5, 6, 0, 1]
    assert step.query_start_loc.tolist() == [0, 1, 5, 7]
    assert step.seq_lens.tolist() == [5, 7, 2]
    assert step.rows.tolist() == [2, 0, 1]
    assert made.tables_of(step) == [[9, 4], [5, 6], [8]]
    assert step.logits_indices.tolist() == [0, 6]
    assert step.target_ids.tolist() == [-1, -1]
    assert step.sample_positions.tolist() == [5, 2]
    assert step.seeds.tolist() == [-5, 2**62]
    assert step.num_logprobs.tolist() == [-1, 2]
    np.testing.assert_allclose(step.temperature, [0.5, 1.0])
    np.testing.assert_allclose(step.top_p, [0.9, 1.0])
    assert step.top_k.tolist() == [3, 0]
    np.testing.assert_allclose(step.min_p, [0.1, 0.0])
    assert len(step.bias_rows) == 0


@pytest.mark.parametrize(
    "params", [{"min_tokens": 1, "eos_token_ids": (EOS,)}, EVERYTHING], ids=["plain", "everything"]
)
def test_every_array_has_the_type_of_the_layout(params) -> None:
    step = input_batch().build(output_of(ScheduledTokens(running(0, [1, 2], [3], **params), 0, 2, True)))
    buffer = memoryview(bytearray(max_step_bytes(make_config().worker)))
    pack_step(step, buffer)
    back = unpack_step(buffer)
    for name in (name for name in step.__dataclass_fields__ if name not in ("step_id", "is_ahead", "kept")):
        ours, theirs = getattr(step, name), getattr(back, name)
        assert ours.dtype == theirs.dtype, name
        np.testing.assert_array_equal(ours, theirs)


def test_scored_rows_and_a_sampled_one() -> None:
    seq = running(3, [10, 11, 12, 13], [2], prompt_logprobs=1, logprobs=0)
    other = running(0, [5], [3])
    scheduled = ScheduledTokens(other, 0, 1, True), ScheduledTokens(seq, 1, 3, True, score_from=1, num_scored=2)
    step = input_batch().build(output_of(*scheduled))
    assert step.logits_indices.tolist() == [0, 1, 2, 3]
    assert step.target_ids.tolist() == [-1, 12, 13, -1]
    assert step.sample_positions.tolist() == [1, 2, 3, 4]
    assert step.num_logprobs.tolist() == [-1, 1, 1, 0]
    assert step.seeds.tolist() == [1, 4, 4, 4]


def test_a_chunk_without_logits_has_no_rows() -> None:
    step = input_batch().build(output_of(ScheduledTokens(running(0, range(8), [1, 2]), 0, 4, False)))
    assert len(step.logits_indices) == len(step.seeds) == 0


def test_bans_end_with_min_tokens() -> None:
    made = input_batch()
    seq = running(0, [1, 2], [1, 2], min_tokens=2, eos_token_ids=(EOS,), stop_token_ids=(9, 3))
    free = running(1, [1], [3])
    banned = []
    for count, token in enumerate([40, 41, 42]):
        scheduled = ScheduledTokens(free, 0, 1, True), ScheduledTokens(seq, 1 + count, 1, True)
        step = made.build(output_of(*scheduled, step_id=count + 1, new=count == 0))
        banned.append((step.bias_rows.tolist(), step.bias_ids.tolist()))
        assert np.isneginf(step.bias_values).all()
        seq.token_ids.append(token)
    assert banned == [([1, 1, 1], [3, 7, 9])] * 2 + [([], [])]


def bits(words: np.ndarray) -> list[int]:
    return [token for token in range(VOCAB) if int(words[token // 32]) >> token % 32 & 1]


def test_bias_penalties_and_masks_have_sections_of_their_own() -> None:
    everything = running(2, [1, 2, 1], [5], **EVERYTHING)
    present = running(0, [1, 2, 1], [6, 7], generated=[9, 8, 9], presence_penalty=1.0)
    masked = running(1, [1], [8], generated=[2], allowed_token_ids=(0, 31, 32, 63), bad_words=((2, 31), (1, 32)))
    scheduled = [
        ScheduledTokens(everything, 0, 3, True),
        ScheduledTokens(running(3, [4], [9]), 0, 1, True),
        ScheduledTokens(present, 5, 1, True),
    ]
    step = input_batch().build(output_of(*scheduled, ScheduledTokens(masked, 1, 1, True)))
    assert step.bias_rows.tolist() == [0, 0, 0]
    assert step.bias_ids.tolist() == [9, 4, 5]
    np.testing.assert_array_equal(step.bias_values, np.array([2.5, -np.inf, -np.inf], np.float32))
    assert step.penalty_rows.tolist() == [0, 2]
    assert step.repetition.tolist() == [1.5, 1.0]
    assert step.frequency.tolist() == [0.25, 0.0]
    assert step.presence.tolist() == [-0.5, 1.0]
    assert step.history_rows.tolist() == [2, 0]
    assert step.history_starts.tolist() == [0, 2, 4]
    assert step.history_ids.tolist() == [1, 2, 8, 9], "of the prompt only where repetition counts"
    assert step.history_counts.tolist() == [0, 0, 1, 2]
    assert step.mask_rows.tolist() == [0, 3]
    assert [bits(words) for words in step.mask_bits] == [[33], [0, 32, 63]], "the prompt completes no bad word"


def test_sections_follow_the_sequence_from_step_to_step() -> None:
    made = input_batch()
    seq = running(0, [1, 2, 1], [5, 6, 7], **{**EVERYTHING, "allowed_token_ids": None})
    seen = []
    for count, token in enumerate([7, 8, 8, 2]):
        start = 2 + count
        step = made.build(output_of(ScheduledTokens(seq, start, 1, True), step_id=count + 1, new=count == 0))
        again = made.build(output_of(ScheduledTokens(seq, start, 1, True), step_id=count + 1, new=count == 0))
        for name in step.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(again, name), getattr(step, name), err_msg=name)
        history = dict(zip(step.history_ids.tolist(), step.history_counts.tolist(), strict=True))
        assert step.bias_ids.tolist() == [9, 4, 5]
        seen.append((history, bits(step.mask_bits[0])))
        seq.token_ids.append(token)
    assert seen == [({1: 0, 2: 0}, [33, 60]), ({}, [33, 60]), ({}, [60]), ({}, [33, 60])]
    seq.row, seq.block_ids = 2, [1, 2, 3]  # as after a preemption
    step = made.build(output_of(ScheduledTokens(seq, 0, 7, True), step_id=9))
    assert step.history_rows.tolist() == [2]
    assert dict(zip(step.history_ids.tolist(), step.history_counts.tolist(), strict=True)) == {1: 0, 2: 1, 7: 1, 8: 2}


def test_a_ban_wins_over_what_is_forced_and_then_nothing_is() -> None:
    seq = running(0, [1], [5], logit_bias=((3, 100.0),), min_tokens=2, stop_token_ids=(3,))
    step = input_batch().build(output_of(ScheduledTokens(seq, 0, 1, True)))
    assert step.bias_ids.tolist() == [3] and np.isneginf(step.bias_values).all()
    assert bits(step.mask_bits[0]) == list(range(VOCAB))


def test_scored_rows_have_no_constraints() -> None:
    seq = running(3, [10, 11, 12], [2], prompt_logprobs=1, **EVERYTHING)
    step = input_batch().build(
        output_of(ScheduledTokens(running(0, [5], [3]), 0, 1, True), ScheduledTokens(seq, 0, 3, True, 0, 2))
    )
    assert step.target_ids.tolist() == [-1, 11, 12, -1]
    assert set(step.bias_rows.tolist()) == set(step.penalty_rows.tolist()) == set(step.mask_rows.tolist()) == {3}


def test_a_grammar_narrows_the_allowed_tokens() -> None:
    seq = running(0, [1], [5], allowed_token_ids=(3, 4, 5, 6))
    seq.grammar_matcher = CountingGrammar(Grammar("lark", "9"))
    assert bits(input_batch().build(output_of(ScheduledTokens(seq, 0, 1, True))).mask_bits[0]) == [3, 6]


def test_a_row_keeps_nothing_of_its_last_sequence() -> None:
    made = input_batch()
    last = running(0, range(12), [7, 8, 9], temperature=0.0, logprobs=3, **EVERYTHING)
    made.build(output_of(ScheduledTokens(last, 0, 12, True)))
    step = made.build(
        output_of(
            ScheduledTokens(running(0, range(3), [5]), 0, 3, True),
            ScheduledTokens(running(1, range(9), [1, 2, 3]), 0, 9, True),
        )
    )
    assert made.tables_of(step) == [[5], [1, 2, 3]]
    assert step.temperature[0] == 1.0 and step.num_logprobs[0] == -1
    assert len(step.bias_rows) == len(step.penalty_rows) == len(step.mask_rows) == 0


def test_only_new_entries_are_written_and_building_twice_is_harmless() -> None:
    made = input_batch()
    seq = running(0, range(4), [6])
    made.build(output_of(ScheduledTokens(seq, 0, 4, True)))
    seq.token_ids.append(50)
    seq.block_ids.append(3)
    output = SchedulerOutput(2, [ScheduledTokens(seq, 4, 1, True)], [(0, 0, 1, 3)])
    first, second = made.build(output), made.build(output)
    for step in (first, second):
        assert (step.table_rows.tolist(), step.table_columns.tolist(), step.table_blocks.tolist()) == ([0], [1], [3])
    assert made.tables_of(second) == [[6, 3]]


def test_a_step_keeps_its_numbers_when_the_tables_move_on() -> None:
    made = input_batch()
    step = made.build(output_of(ScheduledTokens(running(0, range(4), [6], temperature=0.25), 0, 4, True)))
    made.build(output_of(ScheduledTokens(running(0, range(4), [9], temperature=0.75), 0, 4, True), step_id=2))
    assert step.table_blocks.tolist() == [6] and step.temperature.tolist() == [0.25]


def test_the_last_of_two_writes_to_an_entry_is_sent() -> None:
    """A sequence that fails while it is admitted gives its row to the next one."""
    seq = running(1, range(8), [6, 7])
    output = output_of(ScheduledTokens(seq, 0, 8, True))
    output.new_blocks[:0] = [(0, 1, 2, 9), (0, 1, 0, 8), (0, 3, 0, 5), (2, 1, 0, 4), (2, 1, 0, 3)]
    made = input_batch()
    step = made.build(output)
    columns = step.table_groups, step.table_rows, step.table_columns, step.table_blocks
    entries = sorted(zip(*(column.tolist() for column in columns), strict=True))
    assert entries == [(0, 1, 0, 6), (0, 1, 1, 7), (0, 1, 2, 9), (0, 3, 0, 5), (2, 1, 0, 3)]


@pytest.mark.parametrize("value", ["hot", None])
def test_a_parameter_of_another_type_is_an_error_not_a_step(value) -> None:
    with pytest.raises((TypeError, ValueError)):
        input_batch().build(output_of(ScheduledTokens(running(0, [1], [1], top_k=value), 0, 1, True)))
