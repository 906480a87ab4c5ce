"""A real rank behind the real scheduler: penalties, bans and scores against transformers, and after preemption."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from oarlock.engine.config import EngineConfig
from oarlock.engine.core.engine_core import EngineCore
from oarlock.engine.types import FinishReason, Request, SamplingParams, TokenEvent
from oarlock.workers.config import WorkerConfig
from oarlock.workers.executor import Executor
from tests.golden.tiny_models import make_tiny
from tests.parallel.rank_threads import ThreadExecutor

pytestmark = pytest.mark.slow

BLOCK_SIZE, MAX_LEN, VOCAB = 4, 64, 320
PROMPTS = [[7, 8, 9, 7], [100, 3, 5, 100, 250, 9, 9], [20 + i for i in range(11)], [4]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("model"), "qwen2")


def group_with(checkpoint: Path, num_blocks: int) -> Executor:
    config = WorkerConfig(
        str(checkpoint),
        device="cpu",
        dtype="float32",
        max_model_len=MAX_LEN,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        block_size=BLOCK_SIZE,
        kv_cache_bytes=num_blocks * BLOCK_SIZE * 3 * 2 * 4 * 8 * 4,  # layers, K and V, KV heads, head size, float32
        num_threads=1,
    )
    return ThreadExecutor(config)


@pytest.fixture(scope="module")
def ample(checkpoint: Path) -> Executor:
    return group_with(checkpoint, 200)


@pytest.fixture(scope="module")
def narrow(checkpoint: Path) -> Executor:
    return group_with(checkpoint, 20)


def run(executor: Executor, requests: list[Request]) -> tuple[dict[int, list[TokenEvent]], EngineCore]:
    stepper = EngineCore(EngineConfig(executor.config), executor, lambda: 0.0)
    events: dict[int, list[TokenEvent]] = {request.request_id: [] for request in requests}
    for request in requests:
        stepper.scheduler.add(request, 0.0)
    while stepper.scheduler.has_work:
        begun = stepper.begin() is not None
        for event in [*stepper.take_events(), *(stepper.finish() if begun else [])]:
            events[event.request_id].append(event)
    return events, stepper


def tokens_of(events: dict[int, list[TokenEvent]]) -> list[list[int]]:
    assert all(some[-1].finish_reason is FinishReason.LENGTH for some in events.values())
    return [[token for event in some for token in event.token_ids] for some in events.values()]


def requests_with(params: SamplingParams) -> list[Request]:
    return [Request(number, tuple(prompt), params) for number, prompt in enumerate(PROMPTS)]


def test_greedy_tokens_equal_transformers(checkpoint: Path, ample: Executor) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)

    def generate(**options) -> list[list[int]]:
        outs = []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20,
                                 eos_token_id=None, pad_token_id=0, **options)  # fmt: skip
            outs.append(out[0, len(prompt) :].tolist())
        return outs

    plain = generate()
    words = [[plain[0][0]], [plain[1][0], plain[1][1]], [plain[2][0], plain[2][1], plain[2][2]]]
    bias = {(plain[3][0],): -4.0, (300,): 1.5}
    cases = [
        (SamplingParams(max_tokens=20, temperature=0.0), {}),
        (SamplingParams(max_tokens=20, temperature=0.0, repetition_penalty=1.4), {"repetition_penalty": 1.4}),
        (SamplingParams(max_tokens=20, temperature=0.0, repetition_penalty=0.8), {"repetition_penalty": 0.8}),
        (
            SamplingParams(max_tokens=20, temperature=0.0, bad_words=tuple(map(tuple, words))),
            {"bad_words_ids": words},
        ),
        (
            SamplingParams(max_tokens=20, temperature=0.0, logit_bias=tuple((k, v) for (k,), v in bias.items())),
            {"sequence_bias": bias},
        ),
    ]
    seen = []
    for params, options in cases:
        seen.append(tokens_of(run(ample, requests_with(params))[0]))
        assert seen[-1] == generate(**options), options
    assert all(seen.count(tokens) == 1 for tokens in seen), "each of them changed something"


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"logit_bias": ((5, 3.0), (6, -100.0)), "bad_words": ((5, 5), (9,)), "top_p": 0.9},
        {"allowed_token_ids": tuple(range(3, 40)), "min_tokens": 30, "stop_token_ids": (3, 4, 5), "top_k": 7},
        {"logit_bias": ((11, 100.0), (12, 100.0), (13, 100.0))},
    ],
    ids=lambda params: ",".join(params),
)
def test_preemption_changes_no_token(params: dict, ample: Executor, narrow: Executor) -> None:
    requests = requests_with(SamplingParams(max_tokens=36, temperature=1.5, seed=3, logprobs=2, **params))
    alone, _ = run(ample, requests)
    crowded, stepper = run(narrow, requests)
    assert stepper.scheduler.stats.num_preemptions > 0
    assert tokens_of(crowded) == tokens_of(alone)
    if "allowed_token_ids" in params:
        assert all(3 <= token < 40 for tokens in tokens_of(alone) for token in tokens)
    if "logit_bias" in params and "bad_words" not in params:
        assert {token for tokens in tokens_of(alone) for token in tokens} == {11, 12, 13}


@pytest.mark.parametrize("top", [0, 20])
def test_prefill_only_scores_match_transformers(checkpoint: Path, ample: Executor, top: int) -> None:
    params = SamplingParams(max_tokens=0, prompt_logprobs=top, presence_penalty=2.0, logit_bias=((3, 50.0),))
    events, stepper = run(ample, requests_with(params))
    assert stepper.scheduler.stats.step_id == 1, "one step for all of them, and none to decode"
    assert stepper.scheduler.stats.generation_tokens == 0
    assert not any(tokens_of(events))
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    for prompt, some in zip(PROMPTS, events.values(), strict=True):
        with torch.no_grad():
            truth = model(torch.tensor([prompt])).logits[0].double().log_softmax(-1)
        entries = some[-1].prompt_logprobs
        assert [entry.token_id for entry in entries] == prompt[1:]
        for position, entry in enumerate(entries):
            row = truth[position]
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
            assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
            assert [token for token, _ in entry.top] == row.topk(top).indices.tolist()
            assert [value for _, value in entry.top] == pytest.approx(row.topk(top).values.tolist(), abs=1e-4)
