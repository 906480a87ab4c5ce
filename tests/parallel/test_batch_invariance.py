"""Batch invariance: a request's tokens and logprobs have the same bits whatever else the engine computes.

33 prompts on the demo model through the real scheduler, step builder and ranks, in every regime that cuts or
mixes steps otherwise. Reference: each request alone.
"""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from oarlock.engine.types import Request, SamplingParams
from oarlock.workers.config import WorkerConfig
from oarlock.workers.executor import Executor
from tests.parallel.direct_engine import Answer, DirectEngine
from tests.parallel.rank_threads import ThreadExecutor

DEMO = Path(__file__).resolve().parents[2] / "models" / "oarlock-demo"
SHARED = "Q: What does os.getcwd do?\nA: Return a string representing the current working directory.\n\nQ: "
NUMBERS = [("bfloat16", "auto"), ("float32", "auto"), ("bfloat16", "int8"), ("float32", "fp8")]  # and of the KV cache
PARAMETERS = [pytest.param(each, id=" ".join(each)) for each in NUMBERS[:3]]
PARAMETERS.append(pytest.param(NUMBERS[3], id=" ".join(NUMBERS[3]), marks=pytest.mark.soak))
COUNT = 33


def start(dtype: str, size: int = 1, cache: str = "auto") -> Executor:
    """Ranks that are threads; `test_pipeline_depth.py` compares processes with one of them."""
    config = WorkerConfig(
        str(DEMO),
        device="cpu",
        dtype=dtype,
        tensor_parallel_size=size,
        max_model_len=256,
        max_num_seqs=32,
        max_num_batched_tokens=1024,
        block_size=16,
        kv_cache_bytes=48 << 20,
        kv_cache_dtype=cache,
        num_threads=1,
    )
    return ThreadExecutor(config)


def make_requests(count: int) -> list[Request]:
    """Prompts of 30 to 60 tokens with a common prefix, half sampled greedily and half at random, all with logprobs."""
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    questions = [json.loads(line)["question"] for line in (DEMO / "questions.jsonl").read_text().splitlines()]
    assert len(questions) == 200
    requests = []
    for number, question in enumerate(questions[:count]):
        ids = tuple(tokenizer.encode(f"{SHARED}{question}\nA:", add_special_tokens=False).ids)
        params = SamplingParams(
            max_tokens=3 + number % 4,
            temperature=0.0 if number % 2 else 1.2,
            top_p=0.9 if number % 4 == 0 else 1.0,
            seed=number,
            logprobs=3,
            prompt_logprobs=1 if number % 10 == 0 else None,
            frequency_penalty=0.5 if number % 3 == 0 else 0.0,
        )
        requests.append(Request(number, ids, params))
    return requests


@pytest.fixture(scope="module", params=PARAMETERS)
def executor(request: pytest.FixtureRequest) -> Iterator[Executor]:
    dtype, cache = request.param
    started = start(dtype, cache=cache)
    if dtype == "float32" and started.info.attention_backend != "cpp":
        pytest.skip(f"float32 is batch-invariant with cpp attention only, here: {started.info.batch_invariant_reason}")
    yield started
    started.close()


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return make_requests(COUNT)


@pytest.fixture(scope="module")
def alone(executor: Executor, requests: list[Request]) -> dict[int, Answer]:
    """The answers of every request alone in the engine."""
    answers = run_alone(executor, requests)
    assert all(answer.error is None for answer in answers.values())
    assert all(len(answers[r.request_id].logprobs) == r.params.max_tokens for r in requests)
    return answers


def run_alone(executor: Executor, requests: list[Request]) -> dict[int, Answer]:
    engine = DirectEngine(executor)
    answers: dict[int, Answer] = {}
    for request in requests:
        answers |= engine.run([request])
    return answers


def differences(answers: dict[int, Answer], alone: dict[int, Answer]) -> list[int]:
    """Ids whose answers are not the same."""
    assert answers.keys() <= alone.keys()
    return [number for number, answer in answers.items() if answer != alone[number]]


def test_among_31_others(executor: Executor, requests: list[Request], alone: dict[int, Answer]) -> None:
    engine = DirectEngine(executor)
    assert differences(engine.run(requests), alone) == []
    assert engine.num_steps < sum(request.params.max_tokens for request in requests) / 8  # they ran together


def test_others_join_and_leave_at_any_step(
    executor: Executor, requests: list[Request], alone: dict[int, Answer]
) -> None:
    engine = DirectEngine(executor, max_num_seqs=24)
    answers = engine.run(reversed(requests), arrives_at=lambda number: number // 3 + number % 7)
    assert differences(answers, alone) == []


def test_after_a_prefix_hit(executor: Executor, requests: list[Request], alone: dict[int, Answer]) -> None:
    engine = DirectEngine(executor, enable_prefix_caching=True)
    assert differences(engine.run(requests), alone) == []
    hits = engine.num_cached_tokens
    assert differences(engine.run(requests), alone) == []
    assert engine.num_cached_tokens - hits > 16 * len(requests)  # more than the common prefix


def test_beside_equal_prompts(executor: Executor, requests: list[Request], alone: dict[int, Answer]) -> None:
    """Three of each: the second and third read what the first computes in the same step."""
    some = [r for r in requests[:20] if r.params.prompt_logprobs is None]
    copies = [replace(r, request_id=r.request_id + 1000 * copy) for r in some for copy in range(3)]
    engine = DirectEngine(executor, enable_prefix_caching=True)
    answers = engine.run(copies)
    assert differences(answers, {r.request_id: alone[r.request_id % 1000] for r in copies}) == []
    assert engine.num_cached_tokens > 16 * 2 * len(copies) * 2 // 3


def test_after_preemption(executor: Executor, requests: list[Request], alone: dict[int, Answer]) -> None:
    """Longer answers, so that running sequences need more blocks than there are."""
    some = [replace(r, params=replace(r.params, max_tokens=30)) for r in requests[::6]]
    engine = DirectEngine(executor, num_blocks=9)
    together = engine.run(some)
    assert engine.scheduler.stats.num_preemptions >= 2
    assert differences(together, run_alone(executor, some)) == []
    for r in some:  # and the answers begin as the shorter ones did
        assert together[r.request_id].token_ids[:3] == alone[r.request_id].token_ids[:3]


@pytest.mark.parametrize("budget", [16, 23])
def test_with_its_prompt_in_many_chunks(
    executor: Executor, requests: list[Request], alone: dict[int, Answer], budget: int
) -> None:
    some = requests[:: 1 if budget == 23 else 4]
    engine = DirectEngine(executor, max_num_seqs=min(budget, 16), max_num_batched_tokens=budget)
    answers = engine.run(some)
    assert differences(answers, {r.request_id: alone[r.request_id] for r in some}) == []


def test_the_executor_reports_it(executor: Executor) -> None:
    assert executor.info.batch_invariant, executor.info.batch_invariant_reason


def test_two_ranks_are_batch_invariant_too(executor: Executor, alone: dict[int, Answer]) -> None:
    """Two ranks also give the bits of one rank, where kernels compute everything."""
    ranks = start(executor.config.dtype, 2, executor.config.kv_cache_dtype)
    try:
        assert ranks.info.batch_invariant, ranks.info.batch_invariant_reason
        requests = make_requests(10)
        together = DirectEngine(ranks).run(requests)
        assert differences(together, run_alone(ranks, requests)) == []
        if executor.info.rank_invariant:
            assert ranks.info.rank_invariant, ranks.info.rank_invariant_reason
            assert differences(together, alone) == []
    finally:
        ranks.close()
