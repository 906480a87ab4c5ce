"""One rank's steps without processes: chunks of logits rows join to what one piece would have given."""

import dataclasses

import numpy as np
import pytest

from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.preflight import preflight
from oarlock.workers.protocol import StepMetadata, empty_step
from oarlock.workers.runner import eager_steps
from oarlock.workers.runner.model_runner import ModelRunner
from oarlock.workers.runner.trial_steps import SequenceChunk, greedy_step
from oarlock.workers.sampling.row_chunks import logits_rows
from tests.golden.tiny_models import make_tiny


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    checkpoint = make_tiny(tmp_path_factory.mktemp("model"), "qwen2")
    config = WorkerConfig(
        str(checkpoint),
        device="cpu",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=2,
        max_num_batched_tokens=256,
        block_size=16,
        kv_cache_bytes=1 << 20,
        num_threads=1,
    )
    one = ModelRunner(preflight(config), TensorParallel.solo())
    one.load(lambda fraction: None)
    one.allocate(one.num_blocks_that_fit())
    return one


def scoring_step(num_tokens: int) -> StepMetadata:
    """A prompt whose every token but the first is scored, with different numbers of logprobs; the last row samples.

    Row 3 may not choose id 7, and row 150 is pushed to id 11.
    """
    tokens = (np.arange(num_tokens) * 7 % 300).astype(np.int32)
    step = greedy_step([SequenceChunk(tokens, 0, range(1, 17))], 16, range(num_tokens), step_id=3)
    rows = np.arange(num_tokens)
    return dataclasses.replace(
        step,
        target_ids=np.append(tokens[1:], -1).astype(np.int32),
        num_logprobs=np.where(rows < 100, 2, np.where(rows < 140, -1, 5)).astype(np.int32),
        bias_rows=np.array([3, 150], np.int32),
        bias_ids=np.array([7, 11], np.int32),
        bias_values=np.array([-np.inf, 50.0], np.float32),
    )


@pytest.mark.parametrize("chunk", [1, 2, 64, 128, 199])
def test_chunks_of_rows_join_to_the_whole(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    step = scoring_step(200)
    monkeypatch.setattr(eager_steps, "MAX_LOGITS_ROWS", 1000)
    whole = runner.execute(step)
    monkeypatch.setattr(eager_steps, "MAX_LOGITS_ROWS", chunk)
    joined = runner.execute(step)
    assert whole is not None and joined is not None
    np.testing.assert_array_equal(joined.token_ids, whole.token_ids)
    np.testing.assert_array_equal(joined.token_ids[:-1], step.target_ids[:-1])
    np.testing.assert_array_equal(joined.ranks, whole.ranks)
    np.testing.assert_array_equal(joined.top_ids, whole.top_ids)
    assert joined.logprobs is not None and whole.logprobs is not None
    np.testing.assert_allclose(joined.logprobs, whole.logprobs, atol=2e-6)
    assert (whole.logprobs[:100] < 0).all()


def test_rows_carry_their_choices_along() -> None:
    step = scoring_step(200)
    step.penalty_rows = np.array([2, 141, 150, 170], np.int32)
    step.repetition, step.frequency, step.presence = (np.arange(4, dtype=np.float32) + k for k in (1, 10, 20))
    step.history_rows = np.array([5, 6], np.int32)
    step.history_starts = np.array([0, 3, 10], np.int32)
    step.history_ids = np.arange(10, dtype=np.int32)
    step.history_counts = np.arange(10, dtype=np.int32) + 50
    step.mask_rows = np.array([139, 159], np.int32)
    step.mask_bits = np.array([[1, 2], [3, 4]], np.uint32)
    part = logits_rows(step, 140, 160)
    np.testing.assert_array_equal(part.logits_indices, np.arange(140, 160))
    np.testing.assert_array_equal(part.bias_rows, [10])
    np.testing.assert_array_equal(part.bias_ids, [11])
    np.testing.assert_array_equal(part.penalty_rows, [1, 10])
    np.testing.assert_array_equal(part.repetition, [2, 3])
    np.testing.assert_array_equal(part.frequency, [11, 12])
    np.testing.assert_array_equal(part.presence, [21, 22])
    np.testing.assert_array_equal(part.history_starts, step.history_starts)
    np.testing.assert_array_equal(part.mask_rows, [19])
    np.testing.assert_array_equal(part.mask_bits, [[3, 4]])
    nothing = logits_rows(step, 4, 100)
    assert len(nothing.bias_rows) == len(nothing.penalty_rows) == len(nothing.mask_rows) == 0


def test_a_heartbeat_is_answered_with_nothing(runner: ModelRunner) -> None:
    output = runner.execute(empty_step(9))
    assert output is not None and output.step_id == 9 and len(output.token_ids) == 0
