"""Masks that are filled after a step was submitted: ranks run the model before, sample after, and sample the same."""

import dataclasses
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from engine.sampling_params import Grammar, SamplingParams
from engine.types import Request
from tests.golden.tiny_models import make_tiny
from tests.parallel.direct_engine import DirectEngine
from tests.parallel.test_multiproc_executor import config_for, start, step_of
from workers.errors import WorkerError
from workers.executor import Executor, start_executor
from workers.protocol import StepMetadata, mask_words
from workers.worker.uniproc_executor import UniProcExecutor

PROMPT = [5, 9, 17, 3, 8, 21, 2]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen2")


@pytest.fixture(scope="module", params=["inline", 1, 2])
def executor(checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[Executor]:
    if request.param == "inline":
        made = start_executor(config_for(checkpoint), inline=True, on_progress=lambda phase, fraction: None)
    else:
        made = start(checkpoint, request.param)
    yield made
    made.close()


def masked_step(executor: Executor, step_id: int) -> StepMetadata:
    """A step whose masks are not filled yet."""
    bits = np.full((1, mask_words(executor.info.vocab_size)), 0xAAAAAAAA, np.uint32)
    return dataclasses.replace(step_of(step_id, PROMPT, 0), mask_rows=np.zeros(1, np.int32), mask_bits=bits)


def test_a_slow_mask_still_decides(executor: Executor) -> None:
    executor.submit(step_of(1, PROMPT, 0))
    free = executor.collect().token_ids.tolist()
    for number, only in enumerate([token for token in (3, 31, 32, 77, 200) if [token] != free], 2):

        def fill(bits: np.ndarray, only: int = only) -> None:
            time.sleep(0.05)  # longer than a tiny model takes
            bits[:] = 0
            bits[0, only // 32] = 1 << only % 32

        executor.submit(masked_step(executor, number), fill)
        assert executor.collect().token_ids.tolist() == [only]
        executor.submit(step_of(number, PROMPT, 0))  # nothing of it is left in the next step
        assert executor.collect().token_ids.tolist() == free
    executor.ping()


def test_masks_in_time_or_late_give_the_same_numbers(executor: Executor) -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, (1, mask_words(executor.info.vocab_size)), dtype=np.uint32)
    executor.submit(dataclasses.replace(masked_step(executor, 1), mask_bits=bits))
    whole = executor.collect()
    executor.submit(masked_step(executor, 2), lambda into: np.copyto(into, bits))
    late = executor.collect()
    assert whole.token_ids.tolist() == late.token_ids.tolist()
    assert whole.logprobs is not None and late.logprobs is not None
    np.testing.assert_array_equal(whole.logprobs, late.logprobs)


def test_an_inline_rank_runs_the_model_before_the_masks_and_samples_after(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = start_executor(config_for(checkpoint), inline=True, on_progress=lambda phase, fraction: None)
    assert isinstance(executor, UniProcExecutor) and executor._runner is not None
    runner, log, begun = executor._runner, [], threading.Event()
    decoder = type(runner.model)
    forward, sample = decoder.__call__, runner.sampler.sample

    def seen_forward(*arguments):
        log.append("model")
        begun.set()
        return forward(*arguments)

    def seen_sample(*arguments):
        log.append("sampler")
        return sample(*arguments)

    def fill(bits: np.ndarray) -> None:
        assert begun.wait(60), "the model waits for the masks"
        log.append("masks")
        bits[:] = 0xFFFFFFFF

    monkeypatch.setattr(decoder, "__call__", seen_forward)
    monkeypatch.setattr(runner.sampler, "sample", seen_sample)
    try:
        executor.submit(masked_step(executor, 1), fill)
        executor.collect()
        executor.submit(step_of(2, PROMPT, 0))
        executor.collect()
    finally:
        executor.close()
    assert log == ["model", "masks", "sampler", "model", "sampler"]


def test_a_step_with_complete_masks_starts_no_thread(checkpoint: Path) -> None:
    executor = start_executor(config_for(checkpoint), inline=True, on_progress=lambda phase, fraction: None)
    before = threading.active_count()
    executor.submit(masked_step(executor, 1))
    executor.submit(masked_step(executor, 2), lambda bits: bits.fill(0xFFFFFFFF))
    assert threading.active_count() == before + 1
    executor.close()
    assert threading.active_count() == before


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_are_at_work_before_the_masks(checkpoint: Path, size: int) -> None:
    executor = start(checkpoint, size)
    broken = masked_step(executor, 4)
    broken.slot_mapping[0] = 10**9  # the model fails on it: its report shows that the model has begun
    is_readable = []

    def fill(bits: np.ndarray) -> None:
        is_readable.append(bool(select.select(executor.fileno_for_death(), [], [], 60)[0]))
        bits[:] = 0xFFFFFFFF

    try:
        with pytest.raises(WorkerError, match="failed at step 4"):
            executor.submit(broken, fill)
            executor.collect()
    finally:
        executor.close()
    assert is_readable == [True]


@pytest.mark.parametrize("inline", [True, False])
def test_masks_that_cannot_be_filled_lose_the_step_and_no_more(checkpoint: Path, inline: bool) -> None:
    """The engine's own filler never raises; if one does, the ranks must not choose from what it left."""

    def fill(bits: np.ndarray) -> None:
        raise ZeroDivisionError("no such rule")

    executor = start_executor(config_for(checkpoint), inline=inline, on_progress=lambda phase, fraction: None)
    try:
        with pytest.raises((WorkerError, ZeroDivisionError), match="no such rule"):
            executor.submit(masked_step(executor, 1), fill)
    finally:
        executor.close()


class EverySecond:
    """A grammar of even and odd ids in turn, one of which breaks after some tokens."""

    def __init__(self, broken_after: int | None = None) -> None:
        self.num_accepted = 0
        self._broken_after = broken_after

    def fill_mask(self, into: np.ndarray) -> None:
        if self.num_accepted == self._broken_after:
            raise RuntimeError("no such rule")
        into[:] = 0xAAAAAAAA if self.num_accepted % 2 else 0x55555555

    def accept(self, token_ids) -> bool:
        self.num_accepted += len(token_ids)
        return False


def test_grammars_through_the_engine_and_one_that_breaks(executor: Executor) -> None:
    engine = DirectEngine(executor)
    matchers = {1: EverySecond(), 2: EverySecond(broken_after=2)}
    requests = [
        Request(
            number,
            (5, 9, number),
            SamplingParams(max_tokens=6, seed=number, grammar=Grammar("lark", "x") if number in matchers else None),
        )
        for number in (1, 2, 3)
    ]
    answers = engine.run(requests, matchers=matchers)
    assert [token % 2 for token in answers[1].token_ids] == [0, 1] * 3
    assert [token % 2 for token in answers[2].token_ids] == [0, 1] and answers[2].error is not None
    assert len(answers[3].token_ids) == 6 and answers[1].error is answers[3].error is None
