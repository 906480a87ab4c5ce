"""The measurement at start finds kernels that are not batch-invariant, and passes those that are."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.workers.attention import forward_batch
from oarlock.workers.attention.backend import AttentionSpec, LayerKV
from oarlock.workers.config import WorkerConfig, WorkerInfo
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.preflight import preflight
from oarlock.workers.ranks.multiproc_executor import joint_info
from oarlock.workers.recurrent.states import StateStep
from oarlock.workers.runner import invariance
from oarlock.workers.runner.experts_invariance import batch_fault
from oarlock.workers.runner.invariance import InvarianceResult, check_batch_invariance
from oarlock.workers.runner.model_runner import ModelRunner
from tests.golden.tiny_models import make_tiny


@pytest.fixture(scope="module", params=["qwen2", "mistral"])
def runner(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelRunner]:
    path = make_tiny(tmp_path_factory.mktemp("model"), request.param, head_dim=16)
    yield loaded(path, dtype="bfloat16")


@pytest.fixture(scope="module")
def adapting(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    return loaded(make_tiny(tmp_path_factory.mktemp("model"), "qwen2", head_dim=16), dtype="bfloat16", max_loras=1)


def loaded(path: Path, **changes: Any) -> ModelRunner:
    base = WorkerConfig(str(path), device="cpu", max_model_len=128, kv_cache_bytes=1 << 20, num_threads=1)
    runner = ModelRunner(preflight(base.with_(**changes)), TensorParallel.solo())
    runner.load(lambda share: None)
    runner.allocate(runner.num_blocks_that_fit())
    return runner


@torch.inference_mode()
def test_no_sequence_is_longer_than_those_that_are_served(tmp_path: Path) -> None:
    """The short factors of MiniCPM 3's rotation reach no further."""
    runner = loaded(make_tiny(tmp_path, "minicpm3", num_hidden_layers=1), max_model_len=64, dtype="float32")
    steps = runner.steps
    found = check_batch_invariance(
        runner.model, steps.memory, runner.backends, num_blocks=[8], block_size=runner.config.block_size, max_len=64
    )
    assert "64 tokens gave the same bits" in found.reason


@torch.inference_mode()
def result_of(runner: ModelRunner) -> InvarianceResult:
    return check_batch_invariance(
        runner.model,
        runner.layer_memory,
        runner.backends,
        num_blocks=runner.num_blocks,
        block_size=runner.config.block_size,
        max_len=128,
        slots=None if runner.adapters is None else runner.adapters.slots,
    )


def test_sixteen_bits_are_batch_invariant(runner: ModelRunner) -> None:
    assert runner.invariance.batch_invariant, runner.invariance.reason
    info = runner.info()
    assert info.batch_invariant and "same bits" in info.batch_invariant_reason


@pytest.mark.parametrize("name", ["qkv", "output", "gate_up", "down"])
@pytest.mark.parametrize(
    ("is_odd", "said"),
    [
        (lambda rows: rows > 70, "a prompt batched with others"),
        (lambda rows: rows == 17, "a prompt in chunks"),
        (lambda rows: rows <= 2, "tokens decoded alone"),
        (lambda rows: rows == 32, "a token decoded among 31 others"),
    ],
)
def test_a_product_that_rounds_by_its_rows_is_found(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch, name: str, is_odd: Callable[[int], bool], said: str
) -> None:
    """The planted fault: for some numbers of rows, the last bits are others."""
    block = runner.model.layers[0]
    layer = getattr(block.attention if name in ("qkv", "output") else block.mlp, name)
    real = layer.matmul
    monkeypatch.setattr(layer, "matmul", lambda x, *rest: real(x, *rest) * (1.004 if is_odd(len(x)) else 1))
    result = result_of(runner)
    assert not result.batch_invariant
    assert result.reason.startswith(said) and "bfloat16" in result.reason


def test_attention_that_differs_when_decoding_is_found(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend of another type: layers are not prepared for it, and call it."""

    class Differing(type(runner.backends[0])):
        def attend(self, q: Tensor, kv: LayerKV, plan: Any, layer: AttentionSpec, *sinks: Any) -> Tensor:
            return super().attend(q, kv, plan, layer, *sinks) * (1.01 if len(q) <= 2 else 1)

    monkeypatch.setattr(runner, "backends", {0: Differing(runner.backends[0].spec)})
    result = result_of(runner)
    assert not result.batch_invariant and "decoded alone" in result.reason


def test_logits_that_depend_on_the_rows_are_found(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    real = runner.model.head.matmul
    monkeypatch.setattr(runner.model.head, "matmul", lambda x: real(x) * (1.01 if len(x) > 2 else 1))
    result = result_of(runner)
    assert not result.batch_invariant and "logits" in result.reason


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (lambda slot_of: np.full_like(slot_of, slot_of[0]), "with an adapter batched with others"),
        (lambda slot_of: np.full_like(slot_of, slot_of.max()), "batched with others that have an adapter"),
        (None, "a row of logits with an adapter"),
    ],
)
def test_rows_that_get_the_adapter_of_others_are_found(
    monkeypatch: pytest.MonkeyPatch,
    adapting: ModelRunner,
    fault: Callable[[np.ndarray], np.ndarray] | None,
    said: str,
) -> None:
    assert adapting.invariance.batch_invariant and "with an adapter too" in adapting.invariance.reason
    real = forward_batch.adapted_rows
    if fault is None:
        monkeypatch.setattr(
            invariance, "adapted_rows", lambda slot_of, device: real(slot_of * (len(slot_of) == 1), device)
        )
    else:
        monkeypatch.setattr(forward_batch, "adapted_rows", lambda slot_of, device: real(fault(slot_of), device))
    result = result_of(adapting)
    assert not result.batch_invariant and result.reason.startswith(said)
    assert adapting.adapters is not None
    slots = adapting.adapters.slots  # no value of the trial is left
    assert not slots.digests
    assert not any(pairs.a.any() or pairs.b.any() or pairs.ranks.any() or pairs.used for pairs in slots.pairs)


def saved_late(step: StateStep) -> StateStep:
    return replace(step, save_lens=step.save_lens + 1)


def not_swapped(step: StateStep) -> StateStep:
    """Read the slot of the state before the newest, except in a sequence's first step."""
    others = torch.where(step.reads == 1, 2, torch.where(step.reads == 2, 1, step.reads))
    return replace(step, reads=others.int())


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("mamba2", {}),
        ("lfm2", {"num_attention_heads": 4, "num_key_value_heads": 2}),
        ("qwen3_5_text", {"head_dim": 16}),
    ],
)
def test_wrong_slots_of_states_are_found(
    family: str, sizes: dict[str, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = loaded(make_tiny(tmp_path, family, **sizes), dtype="bfloat16")
    usual = forward_batch.state_step
    assert runner.invariance.batch_invariant, runner.invariance.reason
    for change, said in ((saved_late, "a prompt from a saved state"), (not_swapped, "a prompt in chunks")):
        monkeypatch.setattr(forward_batch, "state_step", lambda *inputs, change=change: change(usual(*inputs)))
        result = result_of(runner)
        assert not result.batch_invariant and result.reason.startswith(said), result.reason


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    path = make_tiny(tmp_path_factory.mktemp("model"), "qwen2_moe", head_dim=16, decoder_sparse_step=1)
    return loaded(path, dtype="bfloat16")


def test_experts_are_batch_invariant(mixture: ModelRunner) -> None:
    assert mixture.invariance.batch_invariant and mixture.rank_invariance.rank_invariant, mixture.rank_invariance
    assert "and so did rows that crowd at an expert or choose among equally good ones" in mixture.invariance.reason


def last_of_equal(logits: Tensor) -> tuple[Tensor, Tensor]:
    ids = (logits.shape[1] - 1 - logits.flip(1).sort(dim=1, descending=True, stable=True).indices[:, :3]).sort(1).values
    return ids.int(), torch.ones(ids.shape)


@pytest.mark.parametrize(
    ("owner", "name", "planted", "said"),
    [
        (
            "router",
            "logits",
            lambda real, x: real(x) + (len(x) == 1),
            "a row's logits of experts differs from its result",
        ),
        ("router", "choose", lambda real, x: last_of_equal(x), "of experts that are equally good others than"),
        (
            "router",
            "choose",
            lambda real, x: (real(x)[0], real(x)[1] * (1.01 if len(x) == 1 else 1)),
            "the weights of a row's experts differs from its result without other rows",
        ),
        ("routed", "matmul", lambda real, x, *rest: real(x, *rest) * (1.01 if len(x) < 67 else 1), "an expert that"),
        ("shared", "matmul", lambda real, x, *rest: real(x, *rest) * (1.01 if len(x) == 1 else 1), "the shared exp"),
    ],
)
def test_experts_whose_rows_depend_on_others_are_found(
    mixture: ModelRunner, monkeypatch: pytest.MonkeyPatch, owner: str, name: str, planted: Callable[..., Any], said: str
) -> None:
    """The faults show in made-up rows, whatever the prompt's are."""
    experts = mixture.model.layers[0].branches[1].sublayer
    part = getattr(experts, owner)
    real = getattr(part, name)
    monkeypatch.setattr(part, name, lambda *inputs: planted(real, *inputs))
    found = batch_fault(experts)
    assert found is not None and found.startswith("model.layers.0.mlp") and said in found
    assert not result_of(mixture).batch_invariant


@pytest.mark.slow
def test_a_head_size_without_a_kernel_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = loaded(make_tiny(tmp_path, "qwen2", head_dim=8), dtype="bfloat16")
    cause = "it needs heads of at most 576 elements in multiples of 16, not 8"
    assert cause in runner.rank_invariance.reason
    real = runner.model.head.matmul
    monkeypatch.setattr(runner.model.head, "matmul", lambda x: real(x) * (1.01 if len(x) > 2 else 1))
    assert result_of(runner).reason.endswith(f"with torch attention (not the C++ kernel, since {cause}) in bfloat16")


def test_reference_attention_is_not_batch_invariant(tmp_path: Path) -> None:
    runner = loaded(make_tiny(tmp_path, "qwen2"), attention_backend="reference")
    assert not runner.invariance.batch_invariant and "reference" in runner.invariance.reason


@pytest.mark.slow
def test_a_start_that_was_asked_for_it_ends_where_it_does_not_hold(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, "qwen2")
    assert loaded(path, batch_invariant=True, dtype="bfloat16").invariance.batch_invariant
    with pytest.raises(StartupError, match=r"^--batch-invariant: numbers depend .*reference attention.*Leave it out"):
        loaded(path, batch_invariant=True, attention_backend="reference")


@pytest.mark.parametrize(("max_len", "num_blocks"), [(2, 3), (33, 4), (128, 2)])
def test_small_pools_and_short_contexts_are_tested_too(runner: ModelRunner, max_len: int, num_blocks: int) -> None:
    with torch.inference_mode():
        result = check_batch_invariance(
            runner.model,
            runner.layer_memory,
            runner.backends,
            num_blocks=[num_blocks],
            block_size=runner.config.block_size,
            max_len=max_len,
        )
    assert result.batch_invariant, result.reason


@pytest.mark.slow
def test_each_kind_of_layer_is_tried(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, "qwen2", use_sliding_window=True, sliding_window=24, max_window_layers=1)
    runner = loaded(path, dtype="bfloat16")
    kinds = {runner.spec.layers[layer].attention.window for layer in runner.model.one_of_each_kind()}
    assert kinds == {layer.attention.window for layer in runner.spec.layers} and len(kinds) == 2


def test_ranks_are_batch_invariant_only_if_every_one_is(runner: ModelRunner) -> None:
    good = runner.info()
    assert joint_info({0: good, 1: good}) == good
    bad = WorkerInfo.from_json(good.to_json().replace('"batch_invariant": true', '"batch_invariant": false'))
    joined = joint_info({1: bad, 0: good})
    assert not joined.batch_invariant and joined.batch_invariant_reason.startswith("rank 1: ")
    other = replace(good, rank_invariant=False, rank_invariant_reason="slices")
    joined = joint_info({1: other, 0: replace(good, rank_invariant=True)})
    assert joined.batch_invariant and not joined.rank_invariant and joined.rank_invariant_reason == "rank 1: slices"
