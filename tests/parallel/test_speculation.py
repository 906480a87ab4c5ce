"""With drafts, ranks answer bit by bit as without: every kind of request, one rank and two, both depths."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from oarlock.engine.config import SpeculativeConfig
from oarlock.engine.types import Grammar, Request, SamplingParams
from tests.parallel.direct_engine import Answer, DirectEngine
from tests.parallel.rank_threads import ThreadExecutor
from tests.parallel.test_multiproc_executor import config_for
from tests.parallel.test_pipeline_depth import Alternating

DEMO = Path(__file__).resolve().parents[2] / "models" / "oarlock-demo"
CONFIG = SpeculativeConfig(num_speculative_tokens=5, prompt_lookup_max=3, prompt_lookup_min=1)
IDS = tuple(range(2, 60))  # so few that the ids of an answer come again
KINDS = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 0.5, "top_k": 5, "logprobs": 0},
    {"prompt_logprobs": 2, "min_tokens": 6, "temperature": 0.0},
    {"logit_bias": ((7, -100.0), (9, 2.0)), "temperature": 0.3},
    {"frequency_penalty": 0.2, "temperature": 0.0},
    {"repetition_penalty": 1.1, "presence_penalty": 0.1, "temperature": 0.4},
    {"bad_words": tuple((first, second) for first in range(2, 20) for second in range(2, 20)), "temperature": 0.0},
    {"grammar": Grammar("lark", "even, then odd"), "temperature": 0.0},
)


class Loop(Alternating):
    """Grammar like `Alternating`, with masks after drafts."""

    knows_end = False

    def fill_masks(self, drafts, into: np.ndarray) -> int | None:
        for row, mask in enumerate(into):
            count = len(self.accepted) + row
            if count >= 12:
                into[row:] = 0xFFFFFFFF
                self.knows_end = True
                return row
            mask[:] = 0x55555555 << count % 2
            if row < len(drafts) and drafts[row] % 2 != count % 2:
                into[row + 1 :] = 0xFFFFFFFF
                break
        return None

    def accept(self, token_ids) -> bool:
        super().accept(token_ids)
        return self.knows_end and self.only_end_is_left()


@pytest.fixture(scope="module", params=[1, 2])
def executor(request: pytest.FixtureRequest) -> Iterator[ThreadExecutor]:
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "kv_cache_bytes": 16 << 20, "max_model_len": 96}
    config = config_for(DEMO, tensor_parallel_size=request.param, dtype="bfloat16", num_speculative_tokens=5, **limits)
    started = ThreadExecutor(config)
    yield started
    started.close()


def make_requests(count: int) -> list[Request]:
    """Prompts that repeat a phrase, some with a common beginning."""
    draw = np.random.default_rng(7)
    requests = []
    for number in range(count):
        phrase = tuple(draw.choice(IDS, 4 + number % 5).tolist())
        params = {"allowed_token_ids": IDS, **KINDS[number % len(KINDS)]}
        stops = tuple(draw.choice(IDS, 1).tolist())
        params = SamplingParams(max_tokens=int(draw.integers(8, 48)), seed=number, stop_token_ids=stops, **params)
        requests.append(Request(number, phrase * 3, params))
    return requests


def answers(
    executor: ThreadExecutor, requests: list[Request], drafts: SpeculativeConfig | None, depth: int, num_blocks: int
) -> tuple[dict[int, Answer], DirectEngine]:
    engine = DirectEngine(
        executor, num_blocks=num_blocks, enable_prefix_caching=True, pipeline_depth=depth, speculative=drafts
    )
    matchers = {request.request_id: Loop() for request in requests if request.params.grammar is not None}
    return engine.run(requests, arrives_at=lambda number: number // 2, matchers=matchers), engine


@pytest.mark.parametrize("num_blocks", [100, 20])
def test_every_answer_has_the_bits_as_without_drafts(executor: ThreadExecutor, num_blocks: int) -> None:
    if not executor.info.batch_invariant:
        pytest.skip(f"steps are put together otherwise, which shows here: {executor.info.batch_invariant_reason}")
    requests = make_requests(20)
    expected, plain = answers(executor, requests, None, 1, num_blocks)
    assert plain.scheduler.stats.num_drafts == 0
    for depth in (1, 2):
        got, drafted = answers(executor, requests, CONFIG, depth, num_blocks)
        stats = drafted.scheduler.stats
        assert {number for number in expected if got[number] != expected[number]} == set()
        assert stats.num_accepted_draft_tokens > 15 and drafted.num_steps < plain.num_steps
        assert (drafted.num_ahead > 0) == (depth == 2)
