"""Requests for vectors and scores of encoders, through the scheduler and the ranks: each text whole in one step."""

import random
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from oarlock.engine.types import POOLS, PoolingParams, Request
from oarlock.workers.config import WorkerConfig
from tests.golden.tiny_encoders import hidden_of, load_encoder, make_encoder, score_of
from tests.parallel.direct_engine import DirectEngine
from tests.parallel.rank_threads import ThreadExecutor

HIDDEN = 64
KINDS = ("last", "mean", "cls", "token", "labels")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., ThreadExecutor]]:
    folder, executors = tmp_path_factory.mktemp("encoders"), list[ThreadExecutor]()

    @cache
    def path_of(name: str) -> Path:
        return make_encoder(folder, name)

    @cache
    def executor(name: str, ranks: int = 1) -> ThreadExecutor:
        config = WorkerConfig(
            str(path_of(name)),
            device="cpu",
            tensor_parallel_size=ranks,
            max_num_seqs=6,
            max_num_batched_tokens=300,
            lower_step_size=name == "modernbert",  # of which a text is longer than that
            num_threads=1,
        )
        executors.append(ThreadExecutor(config))
        return executors[-1]

    yield executor
    for one in executors:
        one.close()


def requests_of(kinds: tuple[str, ...], second: int = 0) -> list[Request]:
    draw = random.Random(1)
    found = []
    for number in range(3 * len(kinds)):
        ids = tuple(draw.randrange(4, 160) for _ in range(draw.choice((1, 12, 70, 200))))
        own = second if len(ids) > second else 0
        found.append(Request(number, ids, POOLS, pooling=PoolingParams(kinds[number % len(kinds)], (), own)))
    return found


def pooled(engine: DirectEngine, requests: list[Request]) -> dict[int, bytes]:
    answers = engine.run(requests, arrives_at=lambda number: number // 4)
    assert not any(answer.error for answer in answers.values())
    return {number: np.array(one.pooled, np.float32).tobytes() for number, one in answers.items()}


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", ["bert-score", "modernbert-score"])
def test_vectors_are_right_and_depend_on_nothing_else(start: Callable, name: str, ranks: int) -> None:
    executor = start(name, ranks)
    second = 5 if name.startswith("bert") else 0
    requests = requests_of(KINDS, second)
    assert executor.info.whole_texts and executor.info.num_labels == 1
    if executor.info.batch_invariant:
        alone: dict[int, bytes] = {}
        for request in requests:
            alone |= pooled(DirectEngine(executor), [request])
        for regime in ({}, {"pipeline_depth": 2}, {"enable_prefix_caching": True}, {"max_num_seqs": 2}):
            assert pooled(DirectEngine(executor, **regime), requests) == alone
    exact = load_encoder(Path(executor.config.model_path), torch.float64)
    for number, found in pooled(DirectEngine(executor), requests).items():
        request = requests[number]
        assert request.pooling is not None
        states = hidden_of(exact, request.prompt_token_ids, request.pooling.second_text).numpy()
        truth = {
            "last": lambda states: states[-1],
            "mean": lambda states: states.mean(0),
            "cls": lambda states: states[0],
            "token": lambda states: states.ravel(),
            "labels": lambda _, one=request: [
                score_of(exact, one.prompt_token_ids, one.pooling.second_text if one.pooling else 0)
            ],
        }[request.pooling.kind](states)
        np.testing.assert_allclose(np.frombuffer(found, np.float32), truth, atol=2e-5, rtol=1e-4)


def test_a_step_holds_whole_texts_as_many_as_fit(start: Callable) -> None:
    executor = start("bert-score")
    assert executor.config.max_num_batched_tokens == 300 and executor.config.max_model_len == 256
    sizes = []
    submit = executor.submit

    def spy(step, *, masks_follow=False):
        sizes.append(np.diff(step.query_start_loc).tolist())
        submit(step, masks_follow=masks_follow)

    executor.submit = spy
    try:
        lens = [200, 90, 11, 256, 40, 4, 1]
        requests = [Request(n, (7,) * length, POOLS, pooling=PoolingParams("cls")) for n, length in enumerate(lens)]
        DirectEngine(executor).run(requests)
    finally:
        executor.submit = submit
    assert [size for size in sizes if size] == [[200, 90], [11, 256], [40, 4, 1]]


def test_a_step_is_as_large_as_the_longest_text(start: Callable, tmp_path: Path) -> None:
    executor = start("modernbert")
    assert executor.config.max_model_len == executor.config.max_num_batched_tokens == 2048
    request = Request(1, tuple(range(4, 154)) * 13, POOLS, pooling=PoolingParams("token"))
    answer = DirectEngine(executor).run([request])[1]
    assert len(answer.pooled) == len(request.prompt_token_ids) * HIDDEN


def test_texts_go_on_when_memory_is_short(start: Callable) -> None:
    """A text that cannot be divided is tried again, alone; one that never fits fails, and no other."""
    executor = start("bert-score")
    lens = [100, 80, 60, 33]
    requests = [Request(n, (7,) * length, POOLS, pooling=PoolingParams("mean")) for n, length in enumerate(lens)]
    expected = {number: DirectEngine(executor).run([requests[number]])[number].pooled for number in range(4)}
    executor.refuse(lambda stage, step: step.num_tokens > 90)
    try:
        answers = DirectEngine(executor).run(requests)
    finally:
        executor._guards = [None]
    assert answers[0].error and "memory" in answers[0].error
    assert {n: answers[n].pooled for n in (1, 2, 3)} == {n: expected[n] for n in (1, 2, 3)}
