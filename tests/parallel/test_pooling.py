"""Vectors of prompts through the scheduler and the ranks: equal bits alone, in a batch and however prompts are cut,
with any number of ranks and stages, and right by transformers' hidden states in float64.
"""

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from oarlock.engine.errors import NOT_FINITE
from oarlock.engine.types import KINDS as ALL_KINDS
from oarlock.engine.types import POOLS, PoolingParams, Request, SamplingParams
from oarlock.workers.config import WorkerConfig
from oarlock.workers.verify.exact_modules import in_float64
from tests.golden.exact_reference import ExactReference
from tests.golden.tiny_models import make_tiny
from tests.parallel.direct_engine import Answer, DirectEngine
from tests.parallel.graph_ranks import GraphRunner
from tests.parallel.rank_threads import ThreadExecutor

KINDS = tuple(kind for kind in ALL_KINDS if kind != "labels")  # those are of encoders

NAMED = (5, 319, 160, 5)
HIDDEN = 64
POISON = 317  # an id whose embedding is made infinite


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("models"), "qwen3", head_dim=32)


def config_of(
    path: Path, *, dtype: str = "float32", ranks: int = 1, stages: int = 1, backend: str = "auto", **changes
) -> WorkerConfig:
    config = WorkerConfig(
        str(path),
        device="cpu",
        dtype=dtype,
        tensor_parallel_size=ranks,
        pipeline_parallel_size=stages,
        attention_backend=backend,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        block_size=16,
        num_kv_blocks=200,
        num_threads=1,
    )
    return config.with_(**changes)


def start(path: Path, **settings) -> ThreadExecutor:
    return ThreadExecutor(config_of(path, **settings))


@pytest.fixture(scope="module")
def executor(path: Path) -> Iterator[ThreadExecutor]:
    started = start(path)
    if not started.info.batch_invariant:
        pytest.skip(started.info.batch_invariant_reason)
    yield started
    started.close()


@pytest.fixture(scope="module")
def spoilt(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadExecutor]:
    """The model with one embedding that is not finite."""
    folder = Path(shutil.copytree(path, tmp_path_factory.mktemp("spoilt") / "model"))
    weights = load_file(folder / "model.safetensors")
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"].clone())
    weights["model.embed_tokens.weight"][POISON] = math.inf
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    started = start(folder, check_weights=False, tie_word_embeddings=False)
    yield started
    started.close()


ROUNDING = {"float32": 2.0**-25, "bfloat16": 2.0**-9}  # of one number
NUMBERS_OF = {kind: range(place, 2 * len(KINDS), len(KINDS)) for place, kind in enumerate(KINDS)}


def prompt_of(number: int) -> tuple[int, ...]:
    """Prompts of 1 to 151 tokens, half of which begin with the same 40."""
    rng = np.random.default_rng(number)
    shared = range(40) if number % 2 else ()
    return (*shared, *rng.integers(0, 320, 1 + 37 * (number % 4)).tolist())


def pooling_requests() -> list[Request]:
    """Two requests of each kind of pooling."""
    return [Request(n, prompt_of(n), POOLS, pooling=params_of(KINDS[n % len(KINDS)])) for n in range(2 * len(KINDS))]


def params_of(kind: str) -> PoolingParams:
    return PoolingParams(kind, NAMED if kind == "logits" else ())


def generating_requests() -> list[Request]:
    return [Request(100 + n, prompt_of(n), SamplingParams(max_tokens=40, seed=n, logprobs=1)) for n in range(4)]


def pooled_of(answers: dict[int, Answer]) -> dict[int, bytes]:
    assert not any(answer.error for answer in answers.values())
    return {number: np.array(one.pooled, np.float32).tobytes() for number, one in answers.items() if one.pooled}


def alone_with(executor: ThreadExecutor) -> dict[int, bytes]:
    found = {}
    for request in pooling_requests():
        found |= pooled_of(DirectEngine(executor).run([request]))
    return found


@pytest.fixture(scope="module")
def alone(executor: ThreadExecutor) -> dict[int, bytes]:
    found = alone_with(executor)
    for request in pooling_requests():
        assert request.pooling is not None
        sizes = {"token": len(request.prompt_token_ids) * HIDDEN, "logits": len(NAMED)}
        assert len(found[request.request_id]) == 4 * sizes.get(request.pooling.kind, HIDDEN)
    return found


REGIMES = {
    "together": {},
    "in chunks": {"max_num_batched_tokens": 24},
    "in chunks of a few tokens": {"max_num_batched_tokens": 9},
    "a step ahead": {"max_num_batched_tokens": 40, "pipeline_depth": 2},
    "with a prefix cache": {"enable_prefix_caching": True, "max_num_batched_tokens": 64},
    "with few blocks": {"enable_prefix_caching": True, "max_num_batched_tokens": 12, "num_blocks": 14},
}


@pytest.mark.parametrize("regime", REGIMES.values(), ids=REGIMES)
def test_vectors_do_not_depend_on_company_or_chunks(
    executor: ThreadExecutor, alone: dict[int, bytes], regime: dict
) -> None:
    engine = DirectEngine(executor, **regime)
    requests = [*generating_requests(), *pooling_requests()]
    texts = DirectEngine(executor).run(generating_requests())
    answers = engine.run(requests, arrives_at=lambda number: number)
    assert pooled_of(answers) == alone
    assert {number: answers[number] for number in texts} == texts
    assert engine.scheduler.stats.finished["stop"] == len(alone)
    engine.scheduler.audit()
    assert engine.scheduler.memory.num_held == 0
    assert bool(engine.num_cached_tokens) == regime.get("enable_prefix_caching", False)


@pytest.mark.parametrize("caches", [False, True])
def test_vectors_do_not_depend_on_preemptions(executor: ThreadExecutor, alone: dict[int, bytes], caches: bool) -> None:
    engine = DirectEngine(executor, enable_prefix_caching=caches, max_num_batched_tokens=20)
    scheduler, schedule, preempted = engine.scheduler, engine.scheduler.schedule, {}

    def preempt_first(now: float, **options):
        """Each once, with a part of its prompt computed."""
        running = [seq for seq in scheduler.requests.by_id.values() if seq.row >= 0 and seq.num_computed_tokens]
        for seq in [seq for seq in running if seq.request_id not in preempted][:1]:
            preempted[seq.request_id] = seq.pooling.kind
            scheduler.requests.preempt(seq, now)
        return schedule(now, **options)

    scheduler.schedule = preempt_first
    assert pooled_of(engine.run(pooling_requests())) == alone
    assert set(preempted.values()) == set(KINDS)


@pytest.mark.parametrize(("ranks", "stages"), [(2, 1), (4, 1), (1, 2)])
def test_vectors_have_the_same_bits_on_any_number_of_ranks(
    path: Path, alone: dict[int, bytes], executor: ThreadExecutor, ranks: int, stages: int
) -> None:
    if not executor.info.rank_invariant:
        pytest.skip(executor.info.rank_invariant_reason)
    started = start(path, ranks=ranks, stages=stages)
    try:
        answers = DirectEngine(started, max_num_batched_tokens=48).run(pooling_requests())
        assert pooled_of(answers) == alone
    finally:
        started.close()


def test_torchs_own_attention_has_batch_invariant_vectors_in_bfloat16(path: Path) -> None:
    started = start(path, dtype="bfloat16", backend="torch")
    try:
        expected = alone_with(started)
        assert pooled_of(DirectEngine(started, max_num_batched_tokens=24).run(pooling_requests())) == expected
    finally:
        started.close()


def test_graphs_run_no_step_with_vectors(path: Path, alone: dict[int, bytes]) -> None:
    started = ThreadExecutor(config_of(path), GraphRunner)
    try:
        for depth in (1, 2):
            engine = DirectEngine(started, pipeline_depth=depth, max_num_batched_tokens=40)
            answers = engine.run([*generating_requests(), *pooling_requests()], arrives_at=lambda number: number)
            assert pooled_of(answers) == alone
        (rank,) = started.ranks
        assert isinstance(rank, GraphRunner) and any(graph.num_replays for graph in rank.maker.captured)
    finally:
        started.close()


@pytest.mark.parametrize("kind", KINDS)
def test_vectors_that_are_not_finite_end_their_request_alone(
    spoilt: ThreadExecutor, executor: ThreadExecutor, alone: dict[int, bytes], kind: str
) -> None:
    requests = [one for one in pooling_requests() if POISON not in one.prompt_token_ids]
    engine = DirectEngine(spoilt, enable_prefix_caching=True, max_num_batched_tokens=24)
    bad = replace(requests[0], request_id=50, prompt_token_ids=(POISON, *range(40)), pooling=params_of(kind))
    answers = engine.run([*requests, bad])
    assert answers.pop(50).error == NOT_FINITE
    assert pooled_of(answers) == {one.request_id: alone[one.request_id] for one in requests}
    assert engine.scheduler.stats.num_nonfinite == 1 and engine.scheduler.memory.num_held == 0
    engine.scheduler.audit()


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen3", "float32"),
        ("gemma2", "float32"),
        ("qwen3_moe", "float32"),
        ("llama", "bfloat16"),
        ("qwen2", "bfloat16"),
    ],
)
def test_vectors_are_transformers_hidden_states(tmp_path: Path, family: str, dtype: str) -> None:
    """The bound of `tests/golden/layer_compare.py`: twice transformers' own distance from float64, or one rounding."""
    model_path = make_tiny(tmp_path, family, head_dim=32, dtype=getattr(torch, dtype))
    started = start(model_path, dtype=dtype)
    try:
        answers = DirectEngine(started, max_num_batched_tokens=64).run(pooling_requests())
    finally:
        started.close()
    model = ExactReference(model_path, [], getattr(torch, dtype)).model
    theirs = reference_of(model)
    with in_float64(model):
        truth = reference_of(model)
    ours = {kind: np.concatenate([answers[n].pooled for n in numbers]) for kind, numbers in NUMBERS_OF.items()}
    for kind in KINDS:
        bound = 2 * max(rms(theirs[kind] - truth[kind]), ROUNDING[dtype] * rms(truth[kind]))
        assert rms(ours[kind] - truth[kind]) <= bound, kind


def rms(numbers: np.ndarray) -> float:
    return float(np.sqrt(np.square(numbers).mean()))


def reference_of(model: PreTrainedModel) -> dict[str, np.ndarray]:
    """By kind: the values of all its requests, one behind the other, as float64."""
    found: dict[str, list[torch.Tensor]] = {kind: [] for kind in KINDS}
    for request in pooling_requests():
        with torch.inference_mode():
            output = model(torch.tensor([request.prompt_token_ids]), output_hidden_states=True)
        hidden, logits = output.hidden_states[-1][0].double(), output.logits[0].double()
        wanted = {"last": hidden[-1], "mean": hidden.mean(0), "cls": hidden[0], "token": hidden}
        assert request.pooling is not None
        kind = request.pooling.kind
        found[kind].append(logits[-1, list(NAMED)] if kind == "logits" else wanted[kind].flatten())
    return {kind: torch.cat(parts).numpy() for kind, parts in found.items()}
