"""The bytes of a step: every rank reads the step that was packed, and foreign bytes are refused."""

import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.workers import protocol
from oarlock.workers.adapters import MAX_LOADING, MAX_REASON_BYTES, MAX_TEXT_BYTES, max_commands
from oarlock.workers.config import MAX_POOLED_IDS, WorkerConfig
from oarlock.workers.protocol import (
    MAX_BIAS_PER_ROW,
    MAX_LOGPROBS,
    MAX_VOCAB_SIZE,
    NOT_POOLED,
    ProtocolError,
    StepMetadata,
    StepOutput,
    StepReader,
    empty_step,
    mask_words,
    max_output_bytes,
    max_step_bytes,
    pack_output,
    pack_step,
    refusal,
    unpack_output,
    unpack_step,
)

CONFIG = WorkerConfig(
    "model",
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=64,
    block_size=16,
    hidden_size=96,
    max_loras=3,
    max_cpu_loras=5,
)
NO_CHOICES = (0, 0, 0, 0)
WIDTH = 512 // 16


def random_step(
    rng: np.random.Generator,
    num_seqs: int,
    per_seq: int,
    rows: int,
    bias: int,
    choices: tuple[int, int, int, int],
    entries: int = 0,
) -> StepMetadata:
    """`entries` of block tables. `choices`: rows with penalties, ids of each, rows with a mask, words of each."""
    tokens = num_seqs * per_seq
    penalties, history, masks, words = choices
    ints = lambda *shape: rng.integers(0, 1000, shape).astype(np.int32)  # noqa: E731
    return StepMetadata(
        step_id=int(rng.integers(1, 2**62)),
        is_ahead=bool(num_seqs % 2),
        token_ids=ints(tokens),
        positions=ints(tokens),
        query_start_loc=(np.arange(num_seqs + 1) * per_seq).astype(np.int32),
        seq_lens=ints(num_seqs),
        rows=ints(num_seqs),
        table_groups=ints(entries).astype(np.uint8),
        table_rows=ints(entries),
        table_columns=ints(entries),
        table_blocks=ints(entries),
        num_drafts=ints(num_seqs * (bias % 2)),
        logits_indices=ints(rows),
        target_ids=ints(rows),
        sample_positions=ints(rows),
        temperature=rng.random(rows).astype(np.float32),
        top_p=rng.random(rows).astype(np.float32),
        top_k=ints(rows),
        min_p=rng.random(rows).astype(np.float32),
        top_n_sigma=rng.random(rows).astype(np.float32),
        seeds=rng.integers(-(2**62), 2**62, rows),
        num_logprobs=rng.integers(-1, 21, rows).astype(np.int32),
        bias_rows=np.sort(ints(bias)),
        bias_ids=ints(bias),
        bias_values=rng.random(bias).astype(np.float32),
        penalty_rows=np.sort(ints(penalties)),
        repetition=rng.random(penalties).astype(np.float32),
        frequency=rng.random(penalties).astype(np.float32),
        presence=rng.random(penalties).astype(np.float32),
        history_rows=ints(penalties),
        history_starts=(np.arange(penalties + 1) * history).astype(np.int32),
        history_ids=ints(penalties * history),
        history_counts=ints(penalties * history),
        mask_rows=np.sort(ints(masks)),
        mask_bits=rng.integers(0, 2**32, (masks, words), dtype=np.uint32),
        pool_seqs=ints(num_seqs),
        pool_kinds=ints(num_seqs),
        pool_lens=ints(num_seqs),
        pool_second=ints(num_seqs),
        pool_num_ids=ints(num_seqs),
        pool_ids=ints(num_seqs * MAX_POOLED_IDS),
        state_reads=ints(num_seqs * (rows % 2)),
        state_writes=ints(num_seqs * (rows % 2)),
        state_saves=ints(num_seqs * (rows % 2), 3),
        adapter_slots=ints(num_seqs * (bias % 2)),
        adapter_commands=ints(bias % 3, 3),
        adapter_digests=ints(bias % 3, 16).astype(np.uint8),
        adapter_texts=ints(bias % 5).astype(np.uint8),
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**31),
    st.integers(0, 8),
    st.integers(1, 8),
    st.integers(0, 64),
    st.integers(0, 100),
    st.tuples(st.integers(0, 8), st.integers(0, 50), st.integers(0, 8), st.integers(0, 40)),
)
def test_a_step_survives_the_trip(
    seed: int, num_seqs: int, per_seq: int, rows: int, bias: int, choices: tuple[int, int, int, int]
) -> None:
    step = random_step(np.random.default_rng(seed), num_seqs, per_seq, rows, bias, choices, entries=bias // 2)
    buffer = memoryview(bytearray(1 << 16))
    used = pack_step(step, buffer)
    read = unpack_step(buffer[:used])
    assert read.step_id == step.step_id
    for name in StepMetadata.__dataclass_fields__:
        np.testing.assert_array_equal(getattr(read, name), getattr(step, name), err_msg=name)


def test_the_bytes_of_a_step_are_those_that_older_recordings_hold() -> None:
    """A recording holds packed steps: with other bytes its format needs another number."""
    rng, buffer, checksum = np.random.default_rng(5), memoryview(bytearray(1 << 16)), 0
    for choices in (NO_CHOICES, (2, 3, 2, 5)):
        step = random_step(rng, 5, 3, 7, 9, choices, entries=4)
        checksum = zlib.crc32(buffer[: pack_step(step, buffer)], checksum)
    assert checksum == 3137597019


def test_steps_of_one_shape_share_the_offsets_of_their_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = memoryview(bytearray(1 << 16))
    pack_step(random_step(np.random.default_rng(0), 2, 1, 3, 4, (1, 2, 2, 5)), buffer)
    monkeypatch.setattr(protocol, "_layout", lambda arrays: pytest.fail("offsets were computed again"))
    again = random_step(np.random.default_rng(1), 2, 1, 3, 4, (1, 2, 2, 5))
    pack_step(again, buffer)
    np.testing.assert_array_equal(unpack_step(buffer).mask_bits, again.mask_bits)


def test_offsets_are_kept_of_a_bounded_number_of_shapes() -> None:
    for num_tokens in range(1000):
        protocol.step_layout(protocol.StepShape(num_tokens=num_tokens))
    assert protocol.step_layout.cache_info().currsize <= 256


def test_a_reader_keeps_the_arrays_of_a_slot_while_lengths_stay() -> None:
    rng, reader = np.random.default_rng(0), StepReader()
    slots = [memoryview(bytearray(1 << 16)) for _ in range(2)]
    made: list[StepMetadata] = []

    def address(step: StepMetadata) -> int:
        made.append(step)
        return step.token_ids.ctypes.data

    def read(slot: memoryview, num_seqs: int) -> StepMetadata:
        step = random_step(rng, num_seqs, 1, 3, 4, (1, 2, 2, 5))
        pack_step(step, slot)
        found = reader.read(slot)
        for name in StepMetadata.__dataclass_fields__:
            if name != "kept":
                np.testing.assert_array_equal(getattr(found, name), getattr(step, name), err_msg=name)
        return found

    first, other = read(slots[0], 2), read(slots[1], 2)
    assert other is not first and other.made_once(address) != first.made_once(address)
    assert read(slots[0], 2) is first
    assert first.made_once(address) == first.token_ids.ctypes.data and len(made) == 2
    longer = read(slots[0], 3)
    assert longer is not first and longer.made_once(address) and len(made) == 3
    assert read(slots[0], 2) is not first, "only the last step of a slot is kept"
    slots[0][8] ^= 1
    with pytest.raises(ProtocolError):
        reader.read(slots[0])


def test_masks_may_follow_the_step() -> None:
    step = random_step(np.random.default_rng(0), 2, 1, 3, 4, (1, 2, 2, 5))
    buffer = memoryview(bytearray(b"\xff" * (1 << 16)))
    pack_step(step, buffer, without_masks=True)
    early = unpack_step(buffer)
    assert early.mask_bits.shape == (2, 5) and (early.mask_bits == 0xFFFFFFFF).all(), "left as it was"
    for name in (name for name in step.__dataclass_fields__ if name not in ("step_id", "mask_bits")):
        np.testing.assert_array_equal(getattr(early, name), getattr(step, name), err_msg=name)
    unpack_step(buffer).mask_bits[:] = step.mask_bits
    np.testing.assert_array_equal(early.mask_bits, step.mask_bits)


def test_the_largest_step_fits_its_slot() -> None:
    rng = np.random.default_rng(0)
    seqs, rows = CONFIG.max_num_seqs, CONFIG.max_num_batched_tokens
    choices = (seqs, CONFIG.max_model_len, seqs, mask_words(MAX_VOCAB_SIZE))
    step = random_step(rng, seqs, 8, rows, seqs * MAX_BIAS_PER_ROW, choices, seqs * WIDTH)
    step.num_drafts = step.state_reads = step.state_writes = step.seq_lens
    step.state_saves = np.zeros((2 * seqs + rows // CONFIG.block_size, 3), np.int32)
    step.adapter_slots = step.seq_lens
    step.adapter_commands = np.zeros((max_commands(CONFIG), 3), np.int32)
    step.adapter_digests = np.zeros((max_commands(CONFIG), 16), np.uint8)
    step.adapter_texts = np.zeros(MAX_LOADING * MAX_TEXT_BYTES, np.uint8)
    assert pack_step(step, memoryview(bytearray(max_step_bytes(CONFIG)))) == max_step_bytes(CONFIG)


def test_a_vocabulary_beyond_the_slots_is_refused() -> None:
    assert mask_words(33) == 2 and mask_words(64) == 2
    with pytest.raises(ProtocolError, match=str(MAX_VOCAB_SIZE)):
        mask_words(MAX_VOCAB_SIZE + 1)


def test_a_heartbeat_has_no_work() -> None:
    buffer = memoryview(bytearray(4096))
    pack_step(empty_step(7), buffer)
    read = unpack_step(buffer)
    assert (read.step_id, read.num_seqs, read.num_tokens, read.max_num_logprobs) == (7, 0, 0, -1)


@pytest.mark.parametrize("k", [-1, 0, MAX_LOGPROBS])
def test_an_answer_survives_the_trip(k: int) -> None:
    rng = np.random.default_rng(1)
    rows = CONFIG.max_num_batched_tokens
    output = StepOutput(9, rng.integers(0, 99, rows).astype(np.int32), rng.random(rows) > 0.5)
    if k >= 0:
        output.logprobs = rng.random(rows).astype(np.float32)
        output.ranks = rng.integers(1, 9, rows).astype(np.int32)
        output.top_ids = rng.integers(0, 99, (rows, k)).astype(np.int32)
        output.top_logprobs = rng.random((rows, k)).astype(np.float32)
        output.pooled_lens = np.array([96, 0, NOT_POOLED], np.int32)
        output.adapter_digests = rng.integers(0, 255, (MAX_LOADING, 16)).astype(np.uint8)
        output.adapter_failures = np.full(MAX_LOADING, MAX_REASON_BYTES, np.int32)
        output.adapter_reasons = rng.integers(0, 255, MAX_LOADING * MAX_REASON_BYTES).astype(np.uint8)
        output.pooled = rng.random((rows + CONFIG.max_num_seqs) * 96).astype(np.float32)  # of tokens and of sequences
    buffer = memoryview(bytearray(max_output_bytes(CONFIG)))
    read = unpack_output(buffer[: pack_output(output, buffer)])
    for name in StepOutput.__slots__:
        np.testing.assert_array_equal(getattr(read, name), getattr(output, name), err_msg=name)


def test_a_refusal_survives_the_trip() -> None:
    buffer = memoryview(bytearray(4096))
    read = unpack_output(buffer[: pack_output(refusal(9), buffer)])
    assert read.out_of_memory and read.step_id == 9 and not len(read.token_ids)


def test_a_step_that_does_not_fit_is_refused() -> None:
    step = random_step(np.random.default_rng(0), 8, 8, 64, 0, NO_CHOICES)
    with pytest.raises(ProtocolError, match="the slot holds 256"):
        pack_step(step, memoryview(bytearray(256)))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=600))
def test_foreign_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        unpack_step(memoryview(bytearray(data)))


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 55), st.integers(1, 255))
@pytest.mark.slow
def test_a_damaged_header_is_refused(position: int, flip: int) -> None:
    buffer = bytearray(1 << 14)
    pack_step(random_step(np.random.default_rng(2), 4, 4, 4, 4, (2, 3, 2, 5)), memoryview(buffer))
    buffer[position] ^= flip
    with pytest.raises(ProtocolError):
        unpack_step(memoryview(buffer))
