"""Classes that transformers' code computes, on real ranks: tokens do not depend on how requests are scheduled."""

from collections.abc import Iterator
from typing import Any

import pytest

from oarlock.base.errors import StartupError
from oarlock.engine.config import SpeculativeConfig
from oarlock.engine.types import Request, SamplingParams
from oarlock.workers.config import WorkerConfig
from oarlock.workers.preflight import preflight
from tests.golden.class_models import make_class
from tests.parallel.class_ranks import ClassRunner, look_in_this_process
from tests.parallel.direct_engine import Answer, DirectEngine
from tests.parallel.rank_threads import ThreadExecutor

REQUESTS = [
    Request(
        number,
        tuple(3 + (7 * (index if index < 40 else number * index)) % 1000 for index in range(50 + 9 * number)),
        SamplingParams(max_tokens=20, seed=number, temperature=0.0, logprobs=1),
    )
    for number in range(1, 5)
]
# A dense class, a mixture whose values are narrower than its keys, and a recurrent class, whose start takes longer.
CLASSES = ("nanochat", *(pytest.param(one, marks=pytest.mark.soak) for one in ("deepseek_v3", "kimi_linear")))


def tokens(answers: dict[int, Answer]) -> list[list[int]]:
    """Return the tokens of each answer, none of which may have failed."""
    assert not any(answer.error for answer in answers.values())
    return [list(answer.token_ids) for _, answer in sorted(answers.items())]


@pytest.fixture(scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        look_in_this_process(patch)
        yield patch


@pytest.fixture(scope="module", params=CLASSES)
def config(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, patch: Any) -> WorkerConfig:
    model = make_class(tmp_path_factory.mktemp("model"), request.param)
    return WorkerConfig(
        str(model), device="cpu", dtype="float32", max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64,
        num_speculative_tokens=3, block_size=16, num_kv_blocks=80, num_threads=1, tensor_parallel_size=2,
        model_impl="transformers",
    )  # fmt: skip


@pytest.fixture(scope="module")
def executor(config: WorkerConfig) -> Iterator[ThreadExecutor]:
    drafts = config.num_speculative_tokens if "kimi" not in config.model_path else 0
    executor = ThreadExecutor(config.with_(num_speculative_tokens=drafts), make=ClassRunner)
    yield executor
    executor.close()


@pytest.fixture(scope="module")
def expected(executor: ThreadExecutor) -> list[list[int]]:
    """The tokens of each request by itself, with its whole prompt in one step."""
    found = [DirectEngine(executor, max_num_batched_tokens=128).run([one]) for one in REQUESTS]
    return [texts for one in found for texts in tokens(one)]


@pytest.mark.parametrize("depth", [1, 2])
def test_batches_and_cuts_of_prompts(executor: ThreadExecutor, expected: list[list[int]], depth: int) -> None:
    engine = DirectEngine(executor, max_num_batched_tokens=11, pipeline_depth=depth)
    assert tokens(engine.run(REQUESTS)) == expected


def test_prefixes_are_not_computed_again(executor: ThreadExecutor, expected: list[list[int]]) -> None:
    engine = DirectEngine(executor, enable_prefix_caching=True, max_num_batched_tokens=24)
    assert tokens(engine.run(REQUESTS)) == expected
    first = engine.num_cached_tokens
    assert tokens(engine.run(REQUESTS)) == expected and engine.num_cached_tokens - first > 100


def test_few_blocks_preempt(executor: ThreadExecutor, expected: list[list[int]]) -> None:
    engine = DirectEngine(executor, num_blocks=13, max_num_batched_tokens=16)
    assert tokens(engine.run(REQUESTS)) == expected and engine.scheduler.stats.num_preemptions > 0


def test_drafts_change_no_token(executor: ThreadExecutor, config: WorkerConfig) -> None:
    if not executor.config.num_speculative_tokens:
        with pytest.raises(StartupError, match="recurrent"):
            preflight(config)
        return
    repeated = [Request(9, (5, 6, 7, 8, 9, 10) * 8, SamplingParams(max_tokens=40, temperature=0.0))]
    drafts = DirectEngine(executor, speculative=SpeculativeConfig(3, 4, 1))
    plain = DirectEngine(executor)
    assert tokens(drafts.run(repeated)) == tokens(plain.run(repeated))
    assert drafts.scheduler.stats.num_draft_tokens > 0


def test_another_number_of_ranks(config: WorkerConfig, expected: list[list[int]]) -> None:
    other = ThreadExecutor(config.with_(tensor_parallel_size=1, num_speculative_tokens=0), make=ClassRunner)
    assert tokens(DirectEngine(other).run(REQUESTS)) == expected
    other.close()
