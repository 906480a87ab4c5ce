"""Masks that are filled after a step was submitted: ranks run the model before, sample after, and sample the same."""

import dataclasses
import select
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from oarlock.engine.types import Grammar, Request, SamplingParams
from oarlock.workers.errors import WorkerError
from oarlock.workers.executor import Executor
from oarlock.workers.protocol import StepMetadata, mask_words
from tests.golden.tiny_models import make_tiny
from tests.parallel.direct_engine import DirectEngine
from tests.parallel.test_multiproc_executor import start, step_of

PROMPT = [5, 9, 17, 3, 8, 21, 2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module")
def executor(checkpoint: Path) -> Iterator[Executor]:
    made = start(checkpoint, 2)
    yield made
    made.close()


def masked_step(executor: Executor, step_id: int) -> StepMetadata:
    """A step whose masks are not filled yet."""
    bits = np.full((1, mask_words(executor.info.vocab_size)), 0xAAAAAAAA, np.uint32)
    return dataclasses.replace(step_of(step_id, PROMPT, 0), mask_rows=np.zeros(1, np.int32), mask_bits=bits)


def only(token: int, executor: Executor) -> np.ndarray:
    """The masks of one row that allow one id."""
    bits = np.zeros((1, mask_words(executor.info.vocab_size)), np.uint32)
    bits[0, token // 32] = 1 << token % 32
    return bits


def test_a_slow_mask_still_decides(executor: Executor) -> None:
    executor.submit(step_of(1, PROMPT, 0))
    free = executor.collect().token_ids.tolist()
    for number, token in enumerate([token for token in (3, 31, 32, 77, 200) if [token] != free], 2):
        executor.submit(masked_step(executor, number), masks_follow=True)
        time.sleep(0.05)  # longer than a tiny model takes
        executor.send_masks(only(token, executor))
        assert executor.collect().token_ids.tolist() == [token]
        executor.submit(step_of(number, PROMPT, 0))  # nothing of it is left in the next step
        assert executor.collect().token_ids.tolist() == free
    executor.ping()


def test_masks_in_time_or_late_give_the_same_numbers(executor: Executor) -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, (1, mask_words(executor.info.vocab_size)), dtype=np.uint32)
    executor.submit(dataclasses.replace(masked_step(executor, 1), mask_bits=bits))
    whole = executor.collect()
    executor.submit(masked_step(executor, 2), masks_follow=True)
    executor.send_masks(bits)
    late = executor.collect()
    assert whole.token_ids.tolist() == late.token_ids.tolist()
    assert whole.logprobs is not None and late.logprobs is not None
    np.testing.assert_array_equal(whole.logprobs, late.logprobs)


def test_masks_come_after_the_answer_to_the_step_before(executor: Executor) -> None:
    """The step before may have waited for its masks as well."""
    executor.submit(masked_step(executor, 1), masks_follow=True)
    executor.send_masks(only(77, executor))
    for number in range(2, 8):
        executor.submit(masked_step(executor, number), masks_follow=True)
        assert executor.collect().token_ids.tolist() == [75 + number]
        if number % 2:
            time.sleep(0.02)  # the ranks wait
        executor.send_masks(only(76 + number, executor))
    assert executor.collect().token_ids.tolist() == [83]
    executor.ping()


def test_masks_that_never_come_are_an_error_of_that_step(checkpoint: Path) -> None:
    executor = start(checkpoint, 1, step_timeout_s=0.5)
    try:
        executor.submit(masked_step(executor, 1), masks_follow=True)
        with pytest.raises(WorkerError, match="step 1"):
            executor.collect()
    finally:
        executor.close()


class EverySecond:
    """A grammar of even and odd ids in turn, which may break or end after some tokens."""

    expected_s = 0.0

    def __init__(self, broken_after: int | None = None, only_end_after: int | None = None) -> None:
        self.num_accepted = 0
        self._broken_after, self._only_end_after = broken_after, only_end_after

    def fill_masks(self, drafts, into: np.ndarray) -> int | None:
        if self.num_accepted == self._broken_after:
            raise RuntimeError("no such rule")
        into[:] = 0xAAAAAAAA if self.num_accepted % 2 else 0x55555555
        return 0 if self.num_accepted == self._only_end_after else None

    def accept(self, token_ids) -> bool:
        self.num_accepted += len(token_ids)
        return False

    def only_end_is_left(self) -> bool:
        return self.num_accepted == self._only_end_after


@pytest.mark.parametrize("depth", [1, 2])
def test_grammars_through_the_engine_and_one_that_breaks(executor: Executor, depth: int) -> None:
    engine = DirectEngine(executor, pipeline_depth=depth)
    matchers = {1: EverySecond(), 2: EverySecond(broken_after=2), 4: EverySecond(only_end_after=3)}
    requests = [
        Request(
            number,
            (5, 9, number),
            SamplingParams(max_tokens=6, seed=number, grammar=Grammar("lark", "x") if number in matchers else None),
        )
        for number in (1, 2, 3, 4)
    ]
    answers = engine.run(requests, matchers=matchers)
    assert [token % 2 for token in answers[1].token_ids] == [0, 1] * 3
    assert [token % 2 for token in answers[2].token_ids] == [0, 1] and answers[2].error is not None
    assert len(answers[3].token_ids) == 6 and answers[1].error is answers[3].error is None
    assert [token % 2 for token in answers[4].token_ids] == [0, 1, 0] and answers[4].error is None
    assert engine.num_ahead >= (depth - 1) * 4


def test_ranks_are_at_work_before_the_masks(executor: Executor) -> None:
    """The last test of these ranks, which end in it."""
    broken = masked_step(executor, 4)
    broken.rows[0] = 10**9  # the model fails on it: its report shows that the model has begun
    executor.submit(broken, masks_follow=True)
    assert select.select(executor.fileno_for_death(), [], [], 60)[0]
    with pytest.raises(WorkerError, match="failed at step 4"):
        executor.send_masks(broken.mask_bits)
        executor.collect()
