"""LoRA adapters at a start: refusals by name before weights are read, and the count of memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from oarlock.base.errors import StartupError
from oarlock.workers.capacity import Memory, capacity
from oarlock.workers.checks import adapters, devices
from oarlock.workers.checks.class_limits import check_class
from oarlock.workers.config import WorkerConfig
from oarlock.workers.layers.decoder_spec import tensors_of
from oarlock.workers.models.registry import read_spec
from oarlock.workers.platform import cuda_driver
from oarlock.workers.preflight import check_without_weights, open_model, preflight
from oarlock.workers.runner import memory_needs
from oarlock.workers.runner.memory_needs import adapter_slot_bytes, rank_weight_bytes
from tests.golden.tiny_encoders import make_encoder
from tests.golden.tiny_models import make_tiny
from tests.unit.workers.lora.adapter_cases import halves, write

GIB = 1 << 30


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny(tmp_path, "qwen2", dtype=torch.bfloat16)


def config(model: Path, **changes: Any) -> WorkerConfig:
    """Two slots of rank 4, in bfloat16."""
    return WorkerConfig(str(model), device="cpu", dtype="bfloat16", max_loras=2, max_lora_rank=4).with_(**changes)


def written(folder: Path, module: str = "self_attn.q_proj", rank: int = 2) -> str:
    """The directory of an adapter of one module of the second layer."""
    spec = read_spec(str(next(folder.glob("qwen2-*"))))
    inputs = spec.hidden_size
    outputs = 2 * spec.hidden_size if module.startswith("mlp.up") else inputs
    write(folder / f"{module}-{rank}", halves(f"model.layers.1.{module}", inputs, outputs, rank), r=rank)
    return str(folder / f"{module}-{rank}")


def known(folder: Path, *ranks: int, **changes: Any) -> dict[str, Any]:
    """Settings with an adapter of each of `ranks` from the start."""
    return {"lora_adapters": tuple((f"of-{rank}", written(folder, rank=rank)) for rank in ranks), **changes}


REFUSED: dict[str, tuple[Callable[[Path], dict[str, Any]], str, str]] = {
    "ranks": (
        lambda at: known(at, 2, 32, 8),
        "adapter 'of-32' has rank 32, above --max-lora-rank 4",
        "--max-lora-rank 32",
    ),
    "left out": (
        lambda at: known(at, 2, lora_target_modules=("o_proj", "v_proj")),
        "adapter 'of-2' updates q_proj, and --lora-target-modules leaves it out",
        "--lora-target-modules v_proj o_proj q_proj, or without",
    ),
    "names": (lambda at: {"lora_adapters": known(at, 2)["lora_adapters"] * 2}, "2 adapters .* 'of-2'", "of its own"),
    "nowhere": (lambda at: {"lora_adapters": (("a", str(at / "none")),)}, "adapter 'a': .*none cannot be read", "Name"),
    "no slots": (lambda at: known(at, 2, max_loras=0), "max_loras is 0", "--enable-lora"),
    "target": (
        lambda at: {"lora_target_modules": ("q_proj", "experts")},
        "--lora-target-modules 'experts': Qwen2ForCausalLM has no such module",
        "embed_tokens, q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, lm_head",
    ),
    "stages": (lambda at: {"pipeline_parallel_size": 2}, "--enable-lora with --pipeline-parallel-size 2", "size 1"),
    "rank 0": (lambda at: {"max_lora_rank": 0}, "max_lora_rank is 0", "at least 1"),
    "slots": (lambda at: {"max_loras": -1}, "max_loras is -1", "negative"),
    "copies": (lambda at: {"max_cpu_loras": 1}, "max_cpu_loras 1 is less than max_loras 2", "Raise --max-cpu-loras"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_adapters_that_cannot_be_served_are_refused_by_name(model: Path, tmp_path: Path, what: str) -> None:
    changes, cause, fix = REFUSED[what]
    asked = config(model, **changes(tmp_path))
    for check in (check_without_weights, preflight):
        with pytest.raises(StartupError, match=f"{cause}.*{fix}") as error:
            check(asked)
        assert error.value.exit_code == 3 and "\n" not in str(error.value)


def test_models_and_devices_without_adapters_are_refused_by_name(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = make_encoder(tmp_path, "bert")
    for check in (check_without_weights, preflight):
        with pytest.raises(StartupError, match=r"--enable-lora with BertModel: .*Leave --enable-lora out"):
            check(WorkerConfig(str(encoder), device="cpu", max_loras=1))
    with pytest.raises(StartupError, match=r"--enable-lora with Qwen2ForCausalLM, which transformers' code computes"):
        check_class(config(model), read_spec(str(model)), is_quantised=False)
    monkeypatch.setattr(cuda_driver, "device_count", lambda: 1)
    monkeypatch.setattr(cuda_driver, "why_not_triton", lambda ranks: ("it has no Triton", "Install Triton."))
    for check in (check_without_weights, preflight):
        with pytest.raises(
            StartupError, match=r"--enable-lora on CUDA needs Triton kernels: it has no Triton\. Install"
        ):
            check(config(model, device="cuda"))


def test_on_devices_experts_have_no_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "device_count", lambda: 1)
    monkeypatch.setattr(cuda_driver, "why_not_triton", lambda ranks: None)
    path = make_tiny(tmp_path, "mixtral", dtype=torch.bfloat16)
    spec = read_spec(str(path))
    width = next(one.shape[0] for one in tensors_of(spec) if one.name.endswith("experts.0.up_proj.weight"))
    write(tmp_path / "one", halves("model.layers.0.block_sparse_moe.experts.0.w3", spec.hidden_size, width))
    adapted = (("one", str(tmp_path / "one")),)
    for device in ("cuda", "auto"):
        asked = config(path, device=device)
        assert preflight(asked).lora_target_modules == (
            "embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "lm_head"
        )  # fmt: skip
        for check in (check_without_weights, preflight):
            with pytest.raises(StartupError, match=r"'one' updates experts, and on CUDA devices"):
                check(asked.with_(lora_adapters=adapted))
            with pytest.raises(StartupError, match=r"experts: on CUDA .*--lora-target-modules q_proj, or --device cpu"):
                check(asked.with_(lora_target_modules=("q_proj", "experts")))
    assert preflight(config(path, lora_adapters=adapted)).lora_target_modules is None


def test_fused_names_mean_their_parts_and_leave_the_rest_without_memory(model: Path, tmp_path: Path) -> None:
    given = known(tmp_path, 2, lora_target_modules=("gate_up_proj", "o_proj", "qkv_proj"))
    found = preflight(config(model, **given))
    assert found.lora_target_modules == ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj")
    assert WorkerConfig.from_json(found.to_json()) == found
    everything, down = (
        preflight(config(model, lora_target_modules=one)).adapter_slot_bytes for one in (None, ("down_proj",))
    )
    tables = preflight(config(model, lora_target_modules=("embed_tokens", "lm_head"))).adapter_slot_bytes
    assert found.adapter_slot_bytes + down + tables == everything > 0
    assert found.adapter_bytes == 2 * found.adapter_slot_bytes and found.adapter_copies_bytes == 3 * (
        everything - down - tables
    )


def test_slots_and_copies_that_do_not_fit_are_refused_with_the_arithmetic(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = config(model, max_lora_rank=1 << 16, max_cpu_loras=6, tensor_parallel_size=2)
    opened = open_model(huge)
    slot = adapter_slot_bytes(huge, opened.spec)
    need = 2 * (rank_weight_bytes(huge, opened.spec) + (2 + 7) * slot)
    monkeypatch.setattr(memory_needs, "free_host_bytes", lambda: need - 1)
    monkeypatch.setattr(devices, "free_host_bytes", lambda: need - 1)
    with pytest.raises(StartupError, match=r"2 slot\(s\) and 7 copies in host memory of 2 ranks.*rank 65536") as error:
        preflight(huge)
    assert error.value.exit_code == 4 and "Lower --max-loras, --max-cpu-loras or --max-lora-rank" in error.value.fix
    given = huge.with_(kv_cache_bytes=1 << 20)
    monkeypatch.setattr(memory_needs, "free_host_bytes", lambda: need + 1)
    with pytest.raises(StartupError, match=r"of adapters and 2 x 1.0 MiB of --kv-cache-memory"):
        preflight(given)
    assert preflight(given.with_(max_cpu_loras=5)).adapter_slot_bytes == slot


def test_a_plan_leaves_room_for_slots_and_copies(model: Path) -> None:
    asked = config(model, max_lora_rank=512, max_num_seqs=2048)
    opened = open_model(asked)
    for device, held in (("cpu", (2 + 3) / 4), ("cuda", 2)):  # of the host's free memory only a quarter is for KV
        memory = Memory(device, 2 * GIB)
        plain, found = capacity(opened, {"max_loras": 0}, memory), capacity(opened, {}, memory)
        slot = adapter_slot_bytes(found.config, opened.spec)
        assert found.config.adapter_slot_bytes == slot
        less = plain.kv_bytes - found.kv_bytes
        step = (plain.step_bytes - found.step_bytes) * (device == "cuda")
        assert abs(less + step - held * slot) <= 2 * found.groups.groups[0].bytes_per_block


def test_experts_that_dominate_a_slot_can_be_left_out(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, "qwen3_moe")
    opened = open_model(config(path))
    found = capacity(opened, {}, Memory("cpu", GIB)).config
    fewer = adapters.without_experts(found, opened.spec, opened.formats)
    assert fewer is not None and fewer.lora_target_modules == (
        "embed_tokens", "q_proj", "k_proj", "v_proj", "o_proj", "lm_head"
    )  # fmt: skip
    assert fewer.adapter_slot_bytes < found.adapter_slot_bytes / 2
    assert adapters.without_experts(fewer, opened.spec, opened.formats) is None
