"""LoRA adapters on CUDA devices: experts, which no kernel updates there, are refused by name or left out of slots."""

from pathlib import Path

import pytest

from oarlock.base.errors import StartupError
from oarlock.workers.checks.adapters import check_adapter_files, with_slot_bytes, with_target_modules
from oarlock.workers.checks.devices import check_matmuls_on_cuda
from oarlock.workers.config import WorkerConfig
from oarlock.workers.platform import cuda_driver
from oarlock.workers.quantization.registry import NONE
from tests.unit.workers.lora.adapter_cases import halves, spec_of, write

MODEL = spec_of("Qwen3MoeForCausalLM")
CONFIG = WorkerConfig("model", device="cuda", dtype="bfloat16", max_loras=2, max_lora_rank=4)
OTHERS = ("embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "lm_head")


def test_slots_have_no_memory_for_experts() -> None:
    found = with_slot_bytes(CONFIG, MODEL, NONE)
    assert found.lora_target_modules == OTHERS
    on_host = with_slot_bytes(CONFIG.with_(device="cpu", lora_target_modules=OTHERS), MODEL, NONE)
    assert found.adapter_slot_bytes == on_host.adapter_slot_bytes
    assert with_target_modules(CONFIG.with_(device="cpu"), MODEL, "cpu").lora_target_modules is None
    dense = spec_of("LlamaForCausalLM")
    assert with_target_modules(CONFIG, dense, "cuda").lora_target_modules is None


def test_experts_are_refused_by_name(tmp_path: Path) -> None:
    chosen = CONFIG.with_(lora_target_modules=("q_proj", "experts"))
    with pytest.raises(StartupError, match="--lora-target-modules experts: on CUDA") as error:
        with_target_modules(chosen, MODEL, "cuda")
    assert error.value.fix == "Use --lora-target-modules q_proj, or --device cpu."
    write(tmp_path / "of-experts", halves("model.layers.0.mlp.experts.1.down_proj", 6, 8))
    config = with_target_modules(CONFIG.with_(lora_adapters=(("a", str(tmp_path / "of-experts")),)), MODEL, "cuda")
    with pytest.raises(StartupError, match="adapter 'a' updates experts, and on CUDA devices no kernel does"):
        check_adapter_files(config, MODEL)
    check_adapter_files(config.with_(device="cpu", lora_target_modules=None), MODEL)


def test_kernels_must_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "why_not_triton", lambda devices: ("there is no compiler", "Install gcc."))
    with pytest.raises(StartupError, match="--enable-lora on CUDA needs Triton kernels: there is no compiler"):
        check_matmuls_on_cuda(CONFIG.with_(quantization="none"))
    check_matmuls_on_cuda(CONFIG.with_(quantization="none", max_loras=0))
