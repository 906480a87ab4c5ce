"""Real ranks, given each step while the one before runs, answer bit by bit as one rank without: they put in their own
ids."""

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from oarlock.engine.types import Grammar, Request, SamplingParams
from oarlock.workers.executor import Executor
from tests.parallel.direct_engine import Answer, DirectEngine
from tests.parallel.rank_threads import ThreadExecutor
from tests.parallel.test_multiproc_executor import start, step_of

DEMO = Path(__file__).resolve().parents[2] / "models" / "oarlock-demo"
POISONED = 4095  # a token id whose embedding is NaN; only the prompts that hold it reach it
IDS = tuple(range(2, 240))
KINDS = (
    {},
    {"temperature": 1.3, "top_p": 0.9},
    {"logprobs": 3},
    {"temperature": 0.8, "top_k": 20, "logprobs": 0},
    {"prompt_logprobs": 2, "min_tokens": 6},
    {"logit_bias": ((7, -100.0), (9, 2.0))},
    {"bad_words": ((7,),)},
    {"frequency_penalty": 0.7},
    {"repetition_penalty": 1.4, "temperature": 1.0},
)
LATE_KINDS = (
    {"bad_words": tuple((first, second) for first in range(2, 40) for second in (50, 60, 70))},
    {"grammar": Grammar("lark", "even, then odd")},
)


class Alternating:
    """A grammar of even and odd ids in turn."""

    expected_s = 0.0

    def __init__(self) -> None:
        self.accepted: list[int] = []

    def fill_masks(self, drafts, into: np.ndarray) -> int | None:
        into[:] = 0x55555555 << len(self.accepted) % 2
        return 0 if self.only_end_is_left() else None

    def accept(self, token_ids) -> bool:
        assert all(token % 2 == (len(self.accepted) + place) % 2 for place, token in enumerate(token_ids))
        self.accepted += token_ids
        return False

    def only_end_is_left(self) -> bool:
        return len(self.accepted) >= 12


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model with a NaN row in its embedding, and a head of its own, which is whole."""
    path = Path(shutil.copytree(DEMO, tmp_path_factory.mktemp("spoilt") / "model"))
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][POISONED] = math.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config = path / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    return path


@pytest.fixture(scope="module")
def executor(checkpoint: Path) -> Iterator[Executor]:
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "kv_cache_bytes": 16 << 20, "check_weights": False}
    started = start(checkpoint, 2, dtype="bfloat16", **limits)
    yield started
    started.close()


@pytest.fixture(scope="module")
def alone(executor: Executor) -> Iterator[Executor]:
    """One rank, a thread, where that has the same bits."""
    if not executor.info.rank_invariant:
        yield executor
        return
    started = ThreadExecutor(executor.config.with_(tensor_parallel_size=1, cpu_affinity="none"))
    yield started
    started.close()


def requests_of(kinds: tuple[dict, ...], count: int) -> list[Request]:
    """Prompts with a common beginning; three choices each of some; some hold the poisoned id."""
    draw = np.random.default_rng(len(kinds))
    begin = tuple(draw.choice(IDS, 20).tolist())
    requests = []
    for number in range(count):
        prompt = begin[: int(draw.choice([0, 7, 20]))] + tuple(draw.choice(IDS, 3 + number % 9).tolist())
        if number % 13 == 5:
            prompt += (POISONED,)
        if number % 5 and requests:
            prompt = requests[-1].prompt_token_ids
        params = {"temperature": 0.0, "allowed_token_ids": IDS, **kinds[number % len(kinds)]}
        stops = tuple(draw.choice(IDS, 8).tolist())
        params = SamplingParams(max_tokens=int(draw.integers(6, 24)), seed=number, stop_token_ids=stops, **params)
        requests.append(Request(number, prompt, params))
    return requests


def answers(executor: Executor, requests: list[Request], depth: int, num_blocks: int) -> tuple[dict, DirectEngine]:
    engine = DirectEngine(executor, num_blocks=num_blocks, enable_prefix_caching=True, pipeline_depth=depth)
    matchers = {request.request_id: Alternating() for request in requests if request.params.grammar is not None}
    found: dict[int, Answer] = engine.run(requests, arrives_at=lambda number: number // 2, matchers=matchers)
    return found, engine


@pytest.mark.parametrize("num_blocks", [100, 6])
@pytest.mark.parametrize(
    "kinds",
    [
        pytest.param(KINDS, id="whole", marks=pytest.mark.soak),
        pytest.param((*KINDS, *LATE_KINDS), id="late masks"),
    ],
)
def test_every_answer_has_the_bits_of_one_rank_at_depth_1(
    executor: Executor, alone: Executor, kinds: tuple[dict, ...], num_blocks: int
) -> None:
    if not executor.info.batch_invariant:
        pytest.skip(f"steps are put together otherwise, which shows here: {executor.info.batch_invariant_reason}")
    requests = requests_of(kinds, 40 if num_blocks == 6 else 24)  # so that some are preempted
    expected, one = answers(alone, requests, 1, num_blocks)
    got, two = answers(executor, requests, 2, num_blocks)
    assert one.num_ahead == 0 < two.num_ahead
    assert {number for number in expected if got[number] != expected[number]} == set()
    failed = [answer for answer in expected.values() if answer.error is not None]
    assert failed and all("not finite" in (answer.error or "") for answer in failed)
    if num_blocks == 6:
        assert two.scheduler.stats.num_preemptions > 0


def test_a_token_with_penalties_is_that_of_its_whole_history(executor: Executor) -> None:
    """Each token again as the first of a request whose prompt is everything before it: its history is sent whole."""
    if not executor.info.batch_invariant:
        pytest.skip(f"steps are put together otherwise, which shows here: {executor.info.batch_invariant_reason}")
    params = SamplingParams(repetition_penalty=1.6, temperature=0.9, max_tokens=12, logprobs=1)
    requests = [
        Request(number, tuple(range(3, 9 + number)), replace(params, seed=number, temperature=0.9 * (number % 2)))
        for number in range(5)
    ]
    got, engine = answers(executor, requests, 2, 10)
    assert engine.scheduler.stats.num_preemptions > 0 and engine.num_ahead > 0
    again = [
        Request(
            100 * one.request_id + count, (*one.prompt_token_ids, *got[one.request_id].token_ids[:count]),
            replace(one.params, max_tokens=1),
        )
        for one in requests for count in range(12)
    ]  # fmt: skip
    anew, _ = answers(executor, again, 1, 100)
    for one in requests:
        found = [anew[100 * one.request_id + count].token_ids[0] for count in range(12)]
        assert list(got[one.request_id].token_ids) == found


def test_a_reference_is_the_id_that_the_step_before_sampled(executor: Executor) -> None:
    """Steps of a known continuation, sent two at a time, with its last token as a number and as a reference."""
    executor.submit(step_of(1, [5, 9, 17], 0))
    first = executor.collect().token_ids.tolist()
    executor.submit(step_of(2, first, 3))
    known = executor.collect()
    executor.submit(step_of(1, [5, 9, 17], 0))
    executor.submit(replace(step_of(2, [-1], 3), is_ahead=True))
    assert executor.collect().token_ids.tolist() == first
    referred = executor.collect()
    assert referred.token_ids.tolist() == known.token_ids.tolist()
    assert referred.logprobs is not None and known.logprobs is not None
    np.testing.assert_array_equal(referred.logprobs, known.logprobs)
    executor.ping()
