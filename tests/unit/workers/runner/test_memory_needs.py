"""Errors of any allocator that runs out of memory tell the operator how much was needed, and how much is free."""

from pathlib import Path

import pytest
import torch

from oarlock.base.errors import StartupError
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.layers.attention_spec import RopeSpec, SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import BranchSpec, DecoderSpec, LayerSpec
from oarlock.workers.layers.gated_mlp_spec import GatedMLPSpec
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.layers.mamba2_spec import Mamba2Spec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.preflight import preflight
from oarlock.workers.quantization.registry import QUANTIZATIONS
from oarlock.workers.runner.memory_needs import is_out_of_memory, rank_weight_bytes, weight_bytes
from oarlock.workers.runner.model_runner import ModelRunner
from tests.golden.tiny_models import make_tiny

CPU_SAYS = (
    "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate "
    "1099511627776 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(CPU_SAYS),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes."),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
        MemoryError("Unable to allocate 1.0 TiB for an array"),
        OSError(12, "Cannot allocate memory"),
    ],
)
def test_out_of_memory_has_many_names(error: Exception) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("memory")])
def test_other_mistakes_are_none(error: Exception) -> None:
    assert not is_out_of_memory(error)


@pytest.fixture
def runner(tmp_path: Path) -> ModelRunner:
    config = WorkerConfig(str(make_tiny(tmp_path, "qwen2")), device="cpu", max_model_len=64, num_kv_blocks=8)
    return ModelRunner(preflight(config), TensorParallel.solo())


def refuse(*_: object) -> None:
    raise RuntimeError(CPU_SAYS)


def test_weights_that_do_not_fit_are_reported_with_the_sums(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oarlock.workers.layers.placement.Placement.empty", refuse)
    with pytest.raises(
        StartupError, match=r"while reading the weights: .*KiB of weights \(float32\).*is free"
    ) as error:
        runner.load(lambda fraction: None)
    assert (
        error.value.exit_code == 4 and "--dtype bfloat16" in error.value.fix and "KV memory," not in error.value.cause
    )


def test_so_are_pages_and_the_first_steps(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    runner.load(lambda fraction: None)
    with monkeypatch.context() as patch:
        patch.setattr(runner.backends[0], "allocate", refuse)
        with pytest.raises(StartupError, match=r"while allocating KV memory: .* of KV memory, and") as error:
            runner.allocate([8])
        assert error.value.exit_code == 4 and "--kv-cache-memory" in error.value.fix
    with monkeypatch.context() as patch:
        patch.setattr(runner.backends[0], "attend", refuse)
        with pytest.raises(StartupError, match="while running trial steps"):
            runner.allocate([8])
    runner.allocate([8])
    monkeypatch.setattr(runner.backends[0], "attend", refuse)
    with pytest.raises(StartupError, match="while timing a few steps"):
        runner.time_steps()


def test_a_real_allocator_is_understood(runner: ModelRunner) -> None:
    runner.load(lambda fraction: None)
    with pytest.raises(StartupError, match="while allocating KV memory") as error:
        runner.allocate([2**40])
    assert error.value.exit_code == 4


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_counted_as_loaded(tmp_path: Path, quantization: str, tied: bool) -> None:
    path = str(make_tiny(tmp_path, "qwen2", tie_word_embeddings=tied))
    config = WorkerConfig(path, device="cpu", quantization=quantization, max_model_len=64, num_kv_blocks=8)
    runner = ModelRunner(preflight(config), TensorParallel.solo())
    runner.load(lambda fraction: None)
    assert weight_bytes(runner.spec, "float32", runner.description.formats) == runner.model.weight_bytes


def test_a_step_holds_the_values_that_ranks_do_not_divide() -> None:
    """Rows and latents of queries, a head of keys and values, B and C of a group: each rank has some of its own."""
    latent = LatentAttentionSpec(16, 12, 4, 8, kv_rank=32, scale=0.25, rope=None, q_rank=24)
    assert latent.step_values(8) - latent.step_values(16) == 16 * (16 + 36 + 32) // 16
    heads = SelfAttentionSpec(16, 2, 8, 0.25, None)
    assert [heads.step_values(size) for size in (1, 2, 16)] == [16 * 8 + 2 * 16, 8 * 8 + 16, 8 + 16]
    groups = Mamba2Spec(16, 4, groups=2, state_width=8, window=4, eps=1e-6)
    assert groups.step_values(2) - groups.step_values(16) == (7 * 64 + 16) * 7 // 16


def test_norms_with_a_factor_are_counted_in_float32() -> None:
    """A device keeps other norms in the model's dtype."""
    rope = RopeSpec("default", 1e4, 4)
    latent = LatentAttentionSpec(2, 12, 4, 8, kv_rank=32, scale=0.25, rope=rope, latent_factor=0.5)
    branches = BranchSpec(latent, "a"), BranchSpec(GatedMLPSpec(64), "b", input_scale=0.5)
    spec = DecoderSpec("Tiny", 50, 48, (LayerSpec(branches),), NormSpec(), 64, 64)
    rank = Decoder(spec, TensorParallel.solo(), torch.bfloat16, torch.device("meta"))
    assert rank.weight_bytes == rank_weight_bytes(WorkerConfig("x", device="cuda", dtype="bfloat16"), spec)
