"""LoRA adapters on real ranks, through the real scheduler and input batch: a request has the same bits in any company.

The judge of all is one rank that answers one request at a time. Values are judged in `tests/golden`.
"""

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oarlock.base.watched_reads import OnRead
from oarlock.engine.config import SpeculativeConfig
from oarlock.engine.replay.__main__ import main as replay
from oarlock.engine.replay.recording import RecordingExecutor, RecordingWriter
from oarlock.engine.types import POOLS, PoolingParams, Request, SamplingParams
from oarlock.workers.adapters import CommandKind
from oarlock.workers.config import WorkerConfig
from oarlock.workers.executor import Executor
from oarlock.workers.lora.adapter_file import Adapter
from oarlock.workers.lora.adapter_slots import AdapterSlots, HostAdapter
from oarlock.workers.lora.rank_adapter import read_adapter
from oarlock.workers.protocol import StepMetadata
from tests.golden.tiny_models import make_tiny
from tests.parallel.adapter_files import AdapterFiles, is_plain, write_adapter
from tests.parallel.direct_engine import Answer, DirectEngine
from tests.parallel.rank_threads import ThreadExecutor
from tests.unit.workers.kernel_levels import NO_KERNELS

pytestmark = pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")

VOCAB = 331
# Biases after the sums over ranks; with 8 ranks two of them share a KV head; every slice has whole groups of inputs.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LATENT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "kv_lora_rank": 64,
    "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "moe_intermediate_size": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SHAPE, "attention_bias": True, "mlp_bias": True},
    "qwen2_moe": SHAPE,
    "qwen3_next": {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32},
    "gemma": SHAPE,  # its head is its embedding, but both are adapted by themselves
    "deepseek_v2": {**LATENT, "q_lora_rank": 32},
    "kimi_linear": {**LATENT, "linear_head_dim": 32, "layer_types": ["linear_attention", "full_attention"],
                    "mlp_layer_types": ["dense", "sparse"]},
}  # fmt: skip
Make = Callable[[str], tuple[Path, list[AdapterFiles]]]
Alone = Callable[[str, int], dict[int, Answer]]
NAMES = ("every", "plain", "small", None)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 1},
    {"temperature": 0.5, "top_k": 9, "prompt_logprobs": 2, "logprobs": 0},
    {"temperature": 0.0, "logprobs": 2, "repetition_penalty": 1.2},
)
VECTORS = (PoolingParams("last"), PoolingParams("mean"), PoolingParams("logits", (5, 7, 300)), PoolingParams("token"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Models by family, each with three adapters."""
    folder = tmp_path_factory.mktemp("models")
    known: dict[str, tuple[Path, list[AdapterFiles]]] = {}

    def make(family: str) -> tuple[Path, list[AdapterFiles]]:
        if family not in known:
            model = make_tiny(folder, family, **FAMILIES[family])
            own = folder / f"adapters of {family}"
            known[family] = (
                model,
                [
                    write_adapter(own / "every", model, seed=1),
                    write_adapter(own / "plain", model, seed=2, rank=8, keep=is_plain),
                    write_adapter(own / "small", model, seed=3, rank=2, keep=lambda name: "layers.1.self_attn" in name),
                ],
            )
        return known[family]

    return make


def config_of(model: Path, size: int = 1, **changes: Any) -> WorkerConfig:
    base = WorkerConfig(
        str(model),
        device="cpu",
        dtype="bfloat16",
        tensor_parallel_size=size,
        max_model_len=160,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        block_size=16,
        num_kv_blocks=100,
        num_threads=1,
        max_loras=2,  # fewer than there are adapters
        max_lora_rank=8,
        num_speculative_tokens=0 if "next" in model.name or "kimi" in model.name else 4,  # states cannot be rolled back
    )
    return base.with_(**changes)


def make_requests(count: int) -> list[Request]:
    """Prompts of 3 to 74 tokens, some with a common beginning, with each adapter and none; every third is pooled."""
    draw, requests = np.random.default_rng(5), []
    begin = tuple(draw.integers(2, VOCAB, 33).tolist())
    for number in range(count):
        prompt = begin * (number % 3 == 0) + tuple(draw.integers(2, VOCAB, 3 + 7 * number % 41).tolist())
        name = NAMES[number // 2 % 4]
        if number % 3 == 1:
            requests.append(Request(number, prompt, POOLS, pooling=VECTORS[number // 3 % 4], adapter=name))
            continue
        params = SamplingParams(max_tokens=4 + 5 * number % 23, seed=number, **KINDS[number % 4])
        requests.append(Request(number, prompt, params, adapter=name))
    return requests


def engine_with(executor: Executor, adapters: list[AdapterFiles], **limits: Any) -> DirectEngine:
    """An engine with all adapters, which are loaded when they are needed."""
    engine = DirectEngine(executor, **limits)
    for one in adapters:
        engine.scheduler.adapters.add(*one, engine.now)
    return engine


def differences(found: dict[int, Answer], expected: dict[int, Answer]) -> list[int]:
    """Ids whose answers are not the same, bit by bit."""
    assert all(answer.error is None for answer in found.values()), [answer.error for answer in found.values()]
    return [number for number, answer in found.items() if answer != expected[number]]


@pytest.fixture(scope="module")
def alone(made: Make) -> Alone:
    """The answers to all requests by one rank, one after the other, by family."""
    known: dict[str, dict[int, Answer]] = {}

    def answers(family: str, count: int) -> dict[int, Answer]:
        if len(known.get(family, ())) < count:
            model, adapters = made(family)
            executor = ThreadExecutor(config_of(model))
            engine, known[family] = engine_with(executor, adapters), {}
            for request in make_requests(count):
                known[family] |= engine.run([request])
            executor.close()
        return known[family]

    return answers


DRAFTS = SpeculativeConfig(num_speculative_tokens=4, prompt_lookup_max=3, prompt_lookup_min=1)
REGIMES: dict[str, dict[str, Any]] = {
    "in chunks, a step ahead": {"max_num_batched_tokens": 40, "pipeline_depth": 2},
    "preempted": {"enable_prefix_caching": True, "max_num_batched_tokens": 48},
    "with drafts": {"speculative": DRAFTS},
}
SOAKED = ("qwen2_moe", "qwen3_next", "gemma", "deepseek_v2", "kimi_linear")
# family, ranks, requests
CASES = [
    ("llama", 2, 24),
    pytest.param("llama", 4, 24, marks=pytest.mark.soak),
    *(pytest.param(family, 2, 12, marks=pytest.mark.soak) for family in SOAKED),
    *(pytest.param(family, 4, 24, marks=pytest.mark.every) for family in ("qwen2_moe", "gemma")),
]


def preempt_each_once(engine: DirectEngine) -> None:
    """Let every request be preempted in the middle, so that it may also lose the slot of its adapter."""
    scheduler, schedule, preempted = engine.scheduler, engine.scheduler.schedule, set()

    def preempt_first(now: float, **options: Any) -> Any:
        running = [seq for seq in scheduler.requests.running if seq.num_computed_tokens > 20]
        for seq in [seq for seq in running if seq.request_id not in preempted][:1]:
            preempted.add(seq.request_id)
            scheduler.requests.preempt(seq, now)
        return schedule(now, **options)

    scheduler.schedule = preempt_first


@pytest.mark.parametrize(("family", "size", "count"), CASES)
def test_a_request_has_the_same_bits_in_any_company(
    made: Make, alone: Alone, family: str, size: int, count: int
) -> None:
    model, adapters = made(family)
    executor, requests = ThreadExecutor(config_of(model, size)), make_requests(count)
    assert executor.info.rank_invariant and executor.info.batch_invariant
    for regime, limits in REGIMES.items():
        if "speculative" in limits and not executor.config.num_speculative_tokens:
            continue
        engine = engine_with(executor, adapters, **limits)
        if regime == "preempted":
            preempt_each_once(engine)
        answers = engine.run(requests, arrives_at=lambda number: number)
        assert differences(answers, alone(family, count)) == [], regime
        stats, registry = engine.scheduler.stats, engine.scheduler.adapters.registry
        assert registry.num_loads >= 3 and registry.num_puts >= 3  # in two slots
        assert (stats.num_preemptions > 5) == (regime == "preempted")
        assert (engine.num_ahead > 0) == ("pipeline_depth" in limits)
        assert stats.num_drafts > 0 or "speculative" not in limits
        engine.scheduler.audit()
        assert engine.scheduler.memory.num_held == 0
    executor.close()


def test_a_reloaded_adapter_never_meets_old_blocks(made: Make, tmp_path: Path) -> None:
    """Neither in the prefix cache nor in host memory; but the blocks of a content serve it again when it comes back."""
    model, (first, *_) = made("llama")
    second = write_adapter(tmp_path / "second", model, seed=9)
    config = config_of(model, 2, kv_offload_bytes=4 << 20, max_num_batched_tokens=128, num_kv_blocks=17)
    executor = ThreadExecutor(config)
    assert executor.info.kv_offload is not None
    executor.info = replace(executor.info, step_cost=None)  # loading blocks always pays
    engine = DirectEngine(executor, enable_prefix_caching=True)
    adapters, stats = engine.scheduler.adapters, engine.scheduler.stats
    params, prompt = SamplingParams(max_tokens=8, logprobs=2), tuple(range(20, 120))
    others = [tuple(2 + (131 * number + place) % 300 for place in range(140)) for number in range(2)]
    answers, num_cached, num_loaded = [], [], []
    for files in (first, second, first):
        assert engine.add_adapter("one", files.digest, files.directory) is None
        before, loaded = engine.num_cached_tokens, stats.kv_offload_loaded_blocks
        answers.append(engine.run([Request(1, prompt, params, adapter="one")])[1])
        num_cached.append(engine.num_cached_tokens - before)
        num_loaded.append(stats.kv_offload_loaded_blocks - loaded)
        engine.run([Request(10 + n, other, SamplingParams(max_tokens=2)) for n, other in enumerate(others)])
        assert adapters.remove("one", [], engine.now) == []
    assert num_cached == [0, 0, 96] and num_loaded == [0, 0, 6]
    assert answers[0] == answers[2] != answers[1]
    assert engine.add_adapter("other name", first.digest, first.directory) is None
    assert engine.run([Request(2, prompt, params, adapter="other name")])[2] == answers[0]
    executor.close()


def test_unloading_and_failed_loads_end_their_own_requests(
    made: Make, alone: Alone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two ranks cannot read an adapter, which then neither has; another adapter is unloaded while it is used."""
    model, adapters = made("llama")
    lost = write_adapter(tmp_path / "lost", model, seed=4)
    executor = ThreadExecutor(config_of(model, 2))

    def read(adapter: Adapter, slots: AdapterSlots, on_read: OnRead) -> HostAdapter:
        if slots.model.placement.tp.rank == 1 and adapter.digest == lost.digest:
            raise OSError(5, "the disk of this rank is broken")
        return read_adapter(adapter, slots, on_read)

    monkeypatch.setattr("oarlock.workers.lora.loaded_adapters.read_adapter", read)
    engine = engine_with(executor, [*adapters, lost])
    scheduler, schedule, unloaded = engine.scheduler, engine.scheduler.schedule, []

    def unload_when_used(now: float, **options: Any) -> Any:
        used = [
            seq for seq in scheduler.requests.running if seq.request.adapter == "plain" and seq.num_generated_tokens
        ]
        if used and not unloaded:
            unloaded.extend(scheduler.adapters.remove("plain", list(scheduler.requests.by_id.values()), now))
        return schedule(now, **options)

    scheduler.schedule = unload_when_used
    extra = [Request(100 + n, (3, 4, 5), SamplingParams(max_tokens=3), adapter="lost") for n in range(2)]
    answers = engine.run([*make_requests(24), *extra])
    ended = [event.request_id for event in unloaded]
    assert len(ended) > 2 and ended == sorted(ended)
    assert {request.adapter for request in make_requests(24) if request.request_id in ended} == {"plain"}
    assert {event.error_code for event in unloaded} == {"adapter_unloaded"}
    failed = {number: answers.pop(number).error for number in (100, 101)}
    assert all("another rank could not load it" in (error or "") for error in failed.values())
    rest = {number: answer for number, answer in answers.items() if number not in ended}
    assert differences(rest, alone("llama", 24)) == []
    held = [set(rank.adapters.prepared) for rank in executor.ranks]
    assert held[0] == held[1] == {one.digest for one in adapters if one.name != "plain"}
    scheduler.audit()
    executor.close()


@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.soak), 2])
def test_commands_of_refused_steps_are_run_once(
    made: Make, alone: Alone, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks lack memory for the first steps with each command."""
    model, adapters = made("llama")
    executor = ThreadExecutor(config_of(model, 2))
    refused: dict[int, set[int]] = {}  # by kind of command: numbers of steps
    may_load = threading.Event()  # loads end after a step with tokens has asked for their reports

    def read(adapter: Adapter, slots: AdapterSlots, on_read: OnRead) -> HostAdapter:
        assert may_load.wait(60)
        return read_adapter(adapter, slots, on_read)

    monkeypatch.setattr("oarlock.workers.lora.loaded_adapters.read_adapter", read)

    def lacks_memory(stage: int, step: StepMetadata) -> bool:
        kinds = [kind for kind in step.adapter_commands[:, 0].tolist() if len(refused.get(kind, ())) < 3]
        for kind in kinds if step.num_tokens else ():
            refused.setdefault(kind, set()).add(step.step_id)
        if CommandKind.REPORT in refused:
            may_load.set()
        return any(step.step_id in numbers for numbers in refused.values())

    executor.refuse(lacks_memory)
    engine = engine_with(executor, adapters, pipeline_depth=depth)
    answers = engine.run(make_requests(24), arrives_at=lambda number: number)
    assert engine.num_refused >= 3 and refused.keys() >= {CommandKind.PUT, CommandKind.REPORT}
    assert differences(answers, alone("llama", 24)) == []
    slots = [rank.adapters.slots.digests for rank in executor.ranks]
    expected = {one.slot: one.digest for one in engine.scheduler.adapters.slots.adapters()}
    assert slots == [expected, expected]
    engine.scheduler.audit()
    executor.close()


def test_a_recording_carries_adapters(
    made: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded on one rank and replayed on two, and not at all if a file has another content."""
    model, adapters = made("llama")
    adapters = [write_adapter(tmp_path / one.name, model, seed=n, keep=is_plain) for n, one in enumerate(adapters)]
    monkeypatch.setattr("oarlock.engine.replay.__main__.start_executor", lambda config, _: ThreadExecutor(config))
    executor, path = ThreadExecutor(config_of(model)), tmp_path / "steps.rec"
    recording = RecordingExecutor(executor, RecordingWriter(str(path)), None)
    engine = engine_with(recording, adapters, enable_prefix_caching=True)
    engine.run(make_requests(24), arrives_at=lambda number: number)
    recording.close()
    status = replay([str(path), "--tensor-parallel-size=2"])
    out = capsys.readouterr().out
    assert status == 0 and "the same outputs" in out and "first difference" not in out, out
    assert all(f"{one.name} ({one.digest})" in out for one in adapters)
    write_adapter(tmp_path / "small", model, seed=8)
    assert replay([str(path)]) != 0
    assert f"The adapter 'small' of the recording, {adapters[2].digest}, differs" in capsys.readouterr().err
