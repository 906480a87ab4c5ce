"""A made-up model with pages and recurrent states, on real ranks: tokens do not depend on how its states are kept."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from oarlock.engine.types import Request, SamplingParams
from oarlock.workers import preflight
from oarlock.workers.config import WorkerConfig
from oarlock.workers.models import decoder as decoder_module
from oarlock.workers.runner import decoder_loading
from oarlock.workers.runner.model_runner import ModelRunner
from oarlock.workers.transformers_backend.choice import ChosenCode
from tests.golden.tiny_models import make_tiny
from tests.parallel.direct_engine import Answer, DirectEngine
from tests.parallel.graph_ranks import GraphRunner
from tests.parallel.rank_threads import ThreadExecutor
from tests.unit.workers.layers.test_memory_groups import MODELS, RunningMean, RunningMeanSpec

SPECS = {name: replace(MODELS[name], tie_word_embeddings=True) for name in ("pages and states", "no attention")}
REQUESTS = [
    Request(
        number,
        tuple(2 + (7 * (index if index < 40 else number * index)) % 47 for index in range(50 + 9 * number)),
        SamplingParams(max_tokens=20, seed=number, temperature=0.0, logprobs=1),
    )
    for number in range(1, 5)
]


@pytest.fixture(scope="module", params=SPECS)
def spec(request: pytest.FixtureRequest) -> Any:
    return SPECS[request.param]


@pytest.fixture(scope="module")
def executor(spec: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadExecutor]:
    with pytest.MonkeyPatch.context() as patch:
        yield from started(spec, str(make_tiny(tmp_path_factory.mktemp("model"), "qwen2")), patch)


def started(
    spec: Any, model: str, patch: pytest.MonkeyPatch, make: type[ModelRunner] = ModelRunner, **changes: Any
) -> Iterator[ThreadExecutor]:
    patch.setitem(decoder_module._SUBLAYERS, RunningMeanSpec, RunningMean)
    patch.setattr(preflight, "chosen_code", lambda config: ChosenCode(spec, None))
    patch.setattr(decoder_loading, "resolved_spec", lambda config: spec)
    config = WorkerConfig(
        model, device="cpu", dtype="float32", max_model_len=128, max_num_seqs=4, max_num_batched_tokens=64,
        block_size=8, num_kv_blocks=80, num_threads=1, attention_backend="torch", load_format="dummy",
    )  # fmt: skip
    executor = ThreadExecutor(config.with_(**changes), make=make)
    yield executor
    executor.close()


def tokens(answers: dict[int, Answer]) -> list[list[int]]:
    assert not any(answer.error for answer in answers.values())
    return [list(answer.token_ids) for _, answer in sorted(answers.items())]


@pytest.fixture(scope="module")
def expected(executor: ThreadExecutor) -> list[list[int]]:
    """The tokens of each request by itself, with its whole prompt in one step."""
    found = [DirectEngine(executor, max_num_batched_tokens=128).run([one]) for one in REQUESTS]
    return [texts for one in found for texts in tokens(one)]


def test_ranks_report_slots(executor: ThreadExecutor) -> None:
    (slots,) = [group for group in executor.info.groups if group.is_recurrent]
    assert slots.num_blocks == 17 and slots.bytes_per_block == 2 * 48 * 4
    assert executor.info.sliding_window is None and executor.info.max_model_len == 128


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("tokens_of_step", [64, 11])
def test_batches_and_cuts_of_prompts(
    executor: ThreadExecutor, expected: list[list[int]], tokens_of_step: int, depth: int
) -> None:
    engine = DirectEngine(executor, max_num_batched_tokens=tokens_of_step, pipeline_depth=depth)
    assert tokens(engine.run(REQUESTS)) == expected


def test_prefixes_are_continued_from_saved_states(executor: ThreadExecutor, expected: list[list[int]]) -> None:
    engine = DirectEngine(executor, enable_prefix_caching=True, max_num_batched_tokens=24)
    assert tokens(engine.run(REQUESTS)) == expected
    first = engine.num_cached_tokens
    assert tokens(engine.run(REQUESTS)) == expected and engine.num_cached_tokens - first > 100


def test_few_blocks_preempt(executor: ThreadExecutor, expected: list[list[int]]) -> None:
    if not executor.info.groups[0].is_recurrent or len(executor.info.groups) > 1:
        engine = DirectEngine(executor, num_blocks=30, max_num_batched_tokens=16)
        assert tokens(engine.run(REQUESTS)) == expected and engine.scheduler.stats.num_preemptions > 0


@pytest.mark.parametrize("sizes", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
def test_any_number_of_ranks(
    spec: Any,
    executor: ThreadExecutor,
    expected: list[list[int]],
    sizes: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for other in started(spec, executor.config.model_path, monkeypatch, **sizes):
        assert tokens(DirectEngine(other, max_num_batched_tokens=24).run(REQUESTS)) == expected


def test_graphs_with_padding_sequences(
    spec: Any, executor: ThreadExecutor, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for other in started(spec, executor.config.model_path, monkeypatch, GraphRunner):
        engine = DirectEngine(other, max_num_batched_tokens=24, enable_prefix_caching=True, pipeline_depth=2)
        assert tokens(engine.run(REQUESTS[:3])) == expected[:3] and tokens(engine.run(REQUESTS)) == expected
        (runner,) = other.ranks
        states = next(one.states for one in runner.layer_memory if one.states is not None)
        assert not states.parts[0][0].any(), "the null slot is never written"
