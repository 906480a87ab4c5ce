"""A model whose layers all have a window or chunks keeps only the blocks in it, with the same results as with all."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oarlock.engine.types import Request, SamplingParams
from oarlock.workers.config import GroupInfo, WorkerConfig, WorkerInfo
from oarlock.workers.executor import Executor
from tests.golden.tiny_models import make_tiny
from tests.parallel.direct_engine import Answer, DirectEngine
from tests.parallel.rank_threads import ThreadExecutor

WINDOW, BLOCK = 24, 8
# Models, and their attention backends.
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "window, reference": ("mistral", {"sliding_window": WINDOW}, "reference"),
    "window, torch": ("mistral", {"sliding_window": WINDOW}, "torch"),
    "chunks, torch": ("llama4_text", {"attention_chunk_size": WINDOW, "no_rope_layers": [1, 1, 1]}, "torch"),
}


@pytest.fixture(scope="module", params=MODELS)
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    family, special, backend = MODELS[request.param]
    started = executor_of(make_tiny(tmp_path_factory.mktemp("model"), family, **special), attention_backend=backend)
    yield started
    started.close()


def executor_of(model: Path, **options: Any) -> ThreadExecutor:
    config = WorkerConfig(
        str(model),
        device="cpu",
        dtype="float32",
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=BLOCK,
        num_kv_blocks=200,
        num_threads=1,
        **options,
    )
    return ThreadExecutor(config)


def _without_windows(info: WorkerInfo) -> tuple[GroupInfo, ...]:
    return tuple(replace(group, span=None) for group in info.groups)


REQUESTS = [
    Request(
        number,
        tuple(2 + (7 * number + 5 * index) % 300 for index in range(30 + 30 * number)),
        SamplingParams(max_tokens=25, seed=number, temperature=0.0, logprobs=1),
    )
    for number in range(1, 5)
]


@pytest.fixture(scope="module")
def expected(executor: Executor) -> dict[int, Answer]:
    """Answers with every block kept."""
    info = replace(executor.info, sliding_window=None, groups=_without_windows(executor.info))
    engine = DirectEngine(executor, info=info)
    answers = engine.run(REQUESTS)
    assert not any(answer.error for answer in answers.values())
    assert engine.most_blocks_held > 50
    return answers


def test_blocks_outside_the_window_are_given_back(executor: Executor, expected: dict[int, Answer]) -> None:
    assert executor.info.sliding_window == WINDOW
    engine = DirectEngine(executor, enable_prefix_caching=True)
    assert engine.run(REQUESTS) == expected
    # four windows of four blocks, and what was computed since each last grew
    assert engine.most_blocks_held <= 30
    again = engine.run(REQUESTS)
    assert engine.num_cached_tokens > 200
    assert [answer.token_ids for answer in again.values()] == [answer.token_ids for answer in expected.values()]


def test_a_pool_that_is_too_small_gives_the_same_tokens(executor: Executor, expected: dict[int, Answer]) -> None:
    engine = DirectEngine(executor, num_blocks=24)
    answers = engine.run([replace(r, params=replace(r.params, logprobs=None)) for r in REQUESTS])
    assert [answer.token_ids for answer in answers.values()] == [answer.token_ids for answer in expected.values()]


def test_layers_with_a_window_keep_few_blocks_beside_layers_that_keep_all(tmp_path: Path) -> None:
    executor = executor_of(make_tiny(tmp_path, "gemma3_text", sliding_window=WINDOW, head_dim=16))
    assert [(group.span, group.num_blocks) for group in executor.info.groups] == [(WINDOW, 200), (None, 200)]
    assert executor.info.sliding_window is None
    all_kept = DirectEngine(executor, info=replace(executor.info, groups=_without_windows(executor.info)))
    expected = all_kept.run(REQUESTS)
    engine = DirectEngine(executor, enable_prefix_caching=True)
    assert engine.run(REQUESTS) == expected and engine.most_blocks_held < all_kept.most_blocks_held - 20
    again = engine.run(REQUESTS)
    assert engine.num_cached_tokens > 200
    assert [answer.token_ids for answer in again.values()] == [answer.token_ids for answer in expected.values()]
    groups = tuple(replace(group, num_blocks=40 if group.span is None else 14) for group in executor.info.groups)
    small = DirectEngine(executor, info=replace(executor.info, num_blocks=40, groups=groups))
    answers = small.run(REQUESTS)
    assert [answer.token_ids for answer in answers.values()] == [answer.token_ids for answer in expected.values()]
    executor.close()
