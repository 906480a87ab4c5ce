"""Preflight: everything is resolved, every mistake of a user is one clear sentence, and torch is not imported."""

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oarlock.base.errors import StartupError
from oarlock.workers.checks import devices, limits
from oarlock.workers.config import WorkerConfig
from oarlock.workers.kernels.cpu import build
from oarlock.workers.model_files.checkpoint import SINGLE_FILE
from oarlock.workers.models.registry import read_spec
from oarlock.workers.platform import cuda_driver, processor
from oarlock.workers.platform.processor import available_cores
from oarlock.workers.preflight import check_without_weights, preflight
from oarlock.workers.runner import memory_needs
from tests.golden.tiny_models import FAMILIES, make_tiny


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny(tmp_path, "qwen2", dtype=torch.bfloat16)


@pytest.fixture
def with_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that multiplies bfloat16 at its own speed, whatever this one does, and no C++ kernels."""
    monkeypatch.setattr(build, "chosen", lambda: None)
    monkeypatch.setattr(processor, "here", lambda: processor.Processor(True, False, "no FP16"))


@pytest.fixture
def without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that emulates bfloat16, and no C++ kernels."""
    monkeypatch.setattr(build, "chosen", lambda: None)
    monkeypatch.setattr(processor, "here", lambda: processor.Processor(False, False, "no AVX512-BF16 or AMX"))


def config(model: Path, **changes: Any) -> WorkerConfig:
    return WorkerConfig(str(model), device="cpu").with_(**changes)


def edit_config(model: Path, **changes: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_everything_is_resolved(model: Path, with_bfloat16: None) -> None:
    found = preflight(WorkerConfig(str(model), tensor_parallel_size=2, device="cpu"))
    assert (found.dtype, found.device, found.load_format, found.max_model_len) == (
        "bfloat16",
        "cpu",
        "safetensors",
        512,
    )
    assert found.num_threads == max(1, available_cores() // 2)
    assert preflight(found) == found, "a resolved configuration stays as it is"


def test_explicit_settings_are_kept(model: Path) -> None:
    asked = config(
        model,
        dtype="float32",
        max_model_len=100,
        num_threads=3,
        cpu_affinity="none",
        load_format="dummy",
        tie_word_embeddings=False,
    )
    assert preflight(asked) == asked.with_(kv_cache_dtype="float32", hidden_size=64)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_passes_tied_and_untied(tmp_path: Path, family: str) -> None:
    for tied in (False, True):
        preflight(config(make_tiny(tmp_path, family, tie_word_embeddings=tied)))


@pytest.mark.parametrize("stored", ["the same", "another", "another at its end", "another type", "none"])
def test_a_stored_head_is_the_embedding_only_if_it_is_the_same_bytes(
    model: Path, stored: str, caplog: pytest.LogCaptureFixture
) -> None:
    edit_config(model, tie_word_embeddings=True)
    tensors = load_file(model / SINGLE_FILE)
    head = tensors["model.embed_tokens.weight"].clone()
    if stored == "another":
        head = tensors["lm_head.weight"]
    elif stored == "another at its end":
        head[-1, -1] += 1
    elif stored == "another type":
        head = head.float()
    save_file({**tensors, "lm_head.weight": head}, model / SINGLE_FILE)
    if stored == "none":
        del tensors["lm_head.weight"]
        save_file(tensors, model / SINGLE_FILE)
    tied = stored in ("the same", "none")
    assert preflight(config(model)).tie_word_embeddings is tied
    assert read_spec(str(model)).tie_word_embeddings is tied
    assert ("event=tie_word_embeddings_ignored tensor=lm_head.weight" in caplog.text) is not tied


def test_a_head_of_another_shape_is_refused(model: Path) -> None:
    edit_config(model, tie_word_embeddings=True)
    tensors = load_file(model / SINGLE_FILE)
    save_file({**tensors, "lm_head.weight": tensors["lm_head.weight"][:-1].clone()}, model / SINGLE_FILE)
    with pytest.raises(StartupError, match=r"lm_head\.weight' has shape"):
        preflight(config(model))


def test_a_bfloat16_model_runs_in_float32_where_bfloat16_is_emulated(
    model: Path, without_bfloat16: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert preflight(config(model)).dtype == "float32"
    line = next(line for line in caplog.messages if "event=dtype_chosen dtype=float32" in line)
    assert "no AVX512-BF16 or AMX" in line and "KiB instead of" in line  # why, and what it costs
    assert preflight(config(model, device="cpu", tensor_parallel_size=2)).dtype == "float32"
    assert preflight(preflight(config(model))).dtype == "float32", "a resolved configuration stays as it is"
    edit_config(model, dtype="float32")
    caplog.clear()
    assert preflight(config(model)).dtype == "float32" and not caplog.messages


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_an_emulated_type_that_is_asked_for_is_used_with_a_warning(
    model: Path, without_bfloat16: None, caplog: pytest.LogCaptureFixture, dtype: str
) -> None:
    assert preflight(config(model, dtype=dtype)).dtype == dtype
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"event=slow_dtype dtype={dtype}" in caplog.text and "emulated" in caplog.text


def test_bfloat16_stays_silently_if_the_processor_multiplies_it(
    model: Path, with_bfloat16: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    assert preflight(config(model)).dtype == preflight(config(model, dtype="bfloat16")).dtype == "bfloat16"
    assert not caplog.messages


def test_a_gpu_has_the_type_that_the_model_has(
    model: Path, without_bfloat16: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "device_count", lambda: 1)
    assert preflight(config(model, device="cuda")).dtype == "bfloat16"


@pytest.mark.parametrize(("devices", "shared"), [(1, True), (2, False)])
def test_ranks_that_may_share_a_device_do_where_there_are_too_few(
    model: Path, monkeypatch: pytest.MonkeyPatch, devices: int, shared: bool
) -> None:
    monkeypatch.setattr(cuda_driver, "device_count", lambda: devices)
    asked = config(model, device="cuda", tensor_parallel_size=2)
    assert preflight(asked.with_(share_device=True)).share_device is shared
    if shared:
        with pytest.raises(StartupError, match="needs as many CUDA devices; 1 found"):
            preflight(asked)
    assert not preflight(config(model, share_device=True, device="cpu")).share_device


def test_float32_is_not_chosen_where_it_does_not_fit(
    model: Path, without_bfloat16: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parameters = read_spec(str(model)).num_parameters
    for target in (devices, memory_needs):
        monkeypatch.setattr(target, "free_host_bytes", lambda: 3 * parameters)
    assert preflight(config(model, kv_cache_bytes=1 << 16, max_model_len=32)).dtype == "bfloat16"
    assert "event=dtype_chosen dtype=bfloat16" in caplog.text and "more than is available" in caplog.text
    for dtype, free in (("float32", 3 * parameters), ("bfloat16", parameters)):
        monkeypatch.setattr(memory_needs, "free_host_bytes", lambda free=free: free)
        with pytest.raises(StartupError, match=rf"{parameters:,} parameters in {dtype} need .*KiB is free") as error:
            preflight(config(model, dtype=dtype))
        assert error.value.exit_code == 4 and ("bfloat16" in error.value.fix) is (dtype == "float32")


def test_pages_that_cannot_hold_one_sequence_are_refused_before_weights_are_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_config(model, max_position_embeddings=1 << 20)
    one_sequence = r"Not enough KV memory for one sequence of 1048576 tokens.* and {}"
    with pytest.raises(StartupError, match=one_sequence.format("--kv-cache-memory gives")):
        preflight(config(model, kv_cache_bytes=1 << 20))
    monkeypatch.setattr(memory_needs, "free_host_bytes", lambda: 64 << 20)
    with pytest.raises(StartupError, match=one_sequence.format("25% of free memory")) as error:
        preflight(config(model))
    assert error.value.exit_code == 4 and "lower --max-model-len to" in error.value.fix
    assert preflight(config(model, fit_model_len=True)).max_model_len == 1 << 20
    assert preflight(config(model, max_model_len=128)).max_model_len == 128


@pytest.mark.parametrize(
    ("changes", "takes", "fix"),
    [
        ({"kv_cache_bytes": 100 << 30}, "1 x 100.0 GiB of --kv-cache-memory (1 rank(s)", "Lower --kv-cache-memory to"),
        ({"kv_cache_bytes": 13 << 30, "data_parallel_size": 2}, "2 x 13.0 GiB", "or lower --data-parallel-size"),
        (
            {"kv_cache_bytes": 13 << 30, "tensor_parallel_size": 2},
            "2 x 13.0 GiB",
            "Lower --kv-cache-memory to 12287MiB",
        ),
        ({"kv_cache_bytes": 14 << 30, "kv_offload_bytes": 12 << 30}, "1 x 12.0 GiB of --kv-offload-memory", "12287MiB"),
        (
            {"kv_cache_bytes": 10 << 30, "kv_offload_bytes": 20 << 30},
            "30.0 GiB",
            "Lower --kv-offload-memory to 14335MiB",
        ),
    ],
)
def test_given_sizes_that_do_not_fit_together_are_refused_before_weights_are_read(
    model: Path, monkeypatch: pytest.MonkeyPatch, changes: dict, takes: str, fix: str
) -> None:
    for target in (devices, memory_needs, limits):
        monkeypatch.setattr(target, "free_host_bytes", lambda: 24 << 30)
    with pytest.raises(
        StartupError, match=r"sizes that are given: .* of weights and .* 24.0 GiB is free, swap"
    ) as error:
        preflight(config(model, **changes))
    assert takes in error.value.cause and fix in error.value.fix and error.value.exit_code == 4
    small = {name: 1 << 30 if name.endswith("bytes") else value for name, value in changes.items()}
    assert preflight(config(model, **small)).kv_cache_bytes == 1 << 30


def test_a_given_size_beyond_the_host_is_refused_before_weights_are_fetched(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_needs, "free_host_bytes", lambda: 24 << 30)
    check_without_weights(config(model, kv_cache_bytes=24 << 30))
    with pytest.raises(StartupError, match=r"given: 1 x 100.0 GiB of --kv-cache-memory .* take 100.0 GiB"):
        check_without_weights(config(model, kv_cache_bytes=100 << 30))


def test_a_given_size_beyond_the_device_is_refused_before_weights_are_read(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_driver, "device_count", lambda: 2)
    monkeypatch.setattr(cuda_driver, "smallest_memory", lambda count: 80 << 30)
    asked = config(model, device="cuda", kv_cache_bytes=100 << 30)
    with pytest.raises(
        StartupError, match=r"100.0 GiB of KV memory take 100.0 GiB, and a device has 80.0 GiB"
    ) as error:
        preflight(asked)
    assert "--kv-cache-memory below 81919MiB" in error.value.fix and error.value.exit_code == 4
    assert preflight(asked.with_(kv_cache_bytes=50 << 30)).device == "cuda"
    assert preflight(asked.with_(kv_cache_bytes=None)).device == "cuda"
    shared = asked.with_(kv_cache_bytes=50 << 30, tensor_parallel_size=4, share_device=True)
    with pytest.raises(StartupError, match="2 ranks on one device, each with"):
        preflight(shared)
    monkeypatch.setattr(cuda_driver, "smallest_memory", lambda count: None)
    assert preflight(asked).device == "cuda", "the driver does not say"


def test_the_smallest_device_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        def cuDeviceTotalMem_v2(self, size: Any, device: int) -> int:
            size._obj.value = (80, 24, 16)[device] << 30
            return 0

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(cuda_driver, "built_for", lambda platform="cuda": None)
    assert [cuda_driver.smallest_memory(count) for count in (1, 2, 3)] == [80 << 30, 24 << 30, 16 << 30]


def test_a_disk_limit_beyond_the_disk_is_refused(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "room_on_disk", lambda path: 100 << 30)
    asked = config(model, kv_offload_path=str(tmp_path), kv_offload_bytes=1 << 20, kv_cache_bytes=1 << 24)
    assert preflight(asked.with_(kv_offload_disk_bytes=100 << 30)).kv_offload_disk_bytes == 100 << 30
    with pytest.raises(StartupError, match=r"needs 200.0 GiB, .* has only 100.0 GiB") as error:
        preflight(asked.with_(kv_offload_disk_bytes=200 << 30))
    assert "Lower --kv-offload-disk to 102400MiB" in error.value.fix


def test_without_a_declared_dtype_the_tensors_decide(model: Path, with_bfloat16: None) -> None:
    edit_config(model, dtype=None)
    assert preflight(config(model)).dtype == "bfloat16"
    assert preflight(config(model, load_format="dummy")).dtype == "float32"


@pytest.mark.parametrize("declared", ["bfloat16", "float16", "float32"])
def test_with_the_kernels_a_model_keeps_its_type(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, declared: str
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(processor, "here", lambda: processor.Processor(False, False, "no AVX512-BF16 or AMX"))
    monkeypatch.setattr(build, "chosen", lambda: build.EMULATED_BF16_DOT)
    monkeypatch.setattr(build, "why_not_obtainable", lambda level: None)
    edit_config(model, dtype=declared)
    assert preflight(config(model)).dtype == declared and not caplog.messages
    if declared != "float32":
        monkeypatch.setattr(build, "why_not_obtainable", lambda level: "there is no C++ compiler")
        assert preflight(config(model)).dtype == "float32"
        assert "no C++ kernels" in caplog.text


def test_a_float16_model_runs_in_float32_where_float16_is_emulated(
    model: Path, without_bfloat16: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit_config(model, dtype="float16")
    assert preflight(config(model)).dtype == "float32"
    assert preflight(config(model, dtype="float16")).dtype == "float16"
    monkeypatch.setattr(cuda_driver, "device_count", lambda: 1)
    assert preflight(config(model, device="cuda")).dtype == "float16"


def test_noise_needs_a_config_but_no_weights(model: Path) -> None:
    (model / SINGLE_FILE).unlink()
    assert preflight(config(model, load_format="dummy")).load_format == "dummy"
    with pytest.raises(StartupError, match="holds no weights"):
        preflight(config(model))


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "tp": ({"tensor_parallel_size": 3}, r"8 heads, 4 key-value heads, intermediate size 96.*work: 1, 2, 4, 8\."),
    "tp zero": ({"tensor_parallel_size": 0}, "tensor_parallel_size is 0"),
    "length": ({"max_model_len": 513}, "max_model_len 513.*512 positions"),
    "length zero": ({"max_model_len": 0}, "max_model_len is 0"),
    "seqs": ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, "max_num_seqs 65.*max_num_batched_tokens 64"),
    "seqs zero": ({"max_num_seqs": 0}, "max_num_seqs is 0"),
    "tokens": ({"max_num_batched_tokens": -1}, "max_num_batched_tokens is -1"),
    "block zero": ({"block_size": 0}, "block_size is 0"),
    "block huge": ({"block_size": 4096}, "block_size 4096 is too large"),
    "threads": ({"num_threads": 0}, "num_threads is 0"),
    "kv": ({"kv_cache_bytes": -5}, "kv_cache_bytes is -5"),
    "share": ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization is 1.5"),
    "timeout": ({"step_timeout_s": 0}, "step_timeout_s is 0"),
    "device": ({"device": "tpu"}, "device is 'tpu'.*auto, cpu, cuda"),
    "dtype": ({"dtype": "int8"}, "dtype is 'int8'"),
    "quantization": ({"quantization": "int3"}, "quantization is 'int3'.*none, int8"),
    "groups": (
        {"quantization": "int4", "tensor_parallel_size": 4},
        "int4 has groups of 32 inputs, and tensor_parallel_size 4 would split .* Sizes that work: 1.*int8",
    ),
    "kv form": ({"kv_cache_dtype": "int7"}, "kv_cache_dtype is 'int7'.*auto, int8, fp8, fp8_e4m3"),
    "kv dtype": ({"kv_cache_dtype": "float16", "dtype": "float32"}, "kv_cache_dtype float16.*float32.*auto"),
    "format": ({"load_format": "gguf"}, "load_format is 'gguf'"),
    "attention": ({"attention_backend": "fast"}, "attention_backend is 'fast'"),
}


@pytest.mark.parametrize("what", SETTINGS)
def test_a_wrong_setting_is_named_with_its_limit(model: Path, what: str) -> None:
    change, message = SETTINGS[what]
    with pytest.raises(StartupError, match=message) as error:
        preflight(config(model, **change))
    assert error.value.exit_code == 3
    assert "\n" not in error.value.cause + error.value.fix


def retype(model: Path, name: str, dtype: torch.dtype) -> None:
    tensors = load_file(model / SINGLE_FILE)
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, model / SINGLE_FILE)


def truncate(model: Path) -> None:
    path = model / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:-1])


def drop(model: Path, name: str) -> None:
    tensors = load_file(model / SINGLE_FILE)
    del tensors[name]
    save_file(tensors, model / SINGLE_FILE)


MODELS: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda m: (m / "config.json").unlink(), "has no config.json"),
    "broken config": (lambda m: (m / "config.json").write_text("{"), "config.json cannot be read"),
    "config a list": (lambda m: (m / "config.json").write_text("[]"), "does not hold a JSON object"),
    "config not text": (lambda m: (m / "config.json").write_bytes(b"\xff\xfe{"), "config.json cannot be read"),
    "architecture": (lambda m: edit_config(m, architectures=["GPT2Model"]), "'GPT2Model'.*GPT2LMHeadModel.*--supp"),
    "quantised, by a file of its own": (
        lambda m: (m / "quantize_config.json").write_text('{"bits": 3, "group_size": 128}'),
        r"quantize_config\.json\.bits = 3",
    ),
    "quantised": (lambda m: edit_config(m, quantization_config={"quant_method": "aqlm"}), r"quantised \('aqlm'"),
    "truncated": (truncate, "model.safetensors is truncated"),
    "missing tensor": (lambda m: drop(m, "model.norm.weight"), "no tensor 'model.norm.weight'.*Qwen2ForCausalLM"),
    "another size": (
        lambda m: edit_config(m, intermediate_size=88),
        r"gate_proj.weight' has shape \[96, 64\].*\[88, 64\]",
    ),
    "fewer layers": (lambda m: edit_config(m, num_hidden_layers=2, layer_types=None), r"model\.layers\.2.*12 such"),
    "another dtype": (lambda m: retype(m, "model.norm.weight", torch.float8_e4m3fn), "'model.norm.weight' is F8_E4M3"),
}


@pytest.mark.parametrize("what", MODELS)
def test_a_model_that_cannot_be_served_is_refused_before_it_is_read(model: Path, what: str) -> None:
    change, message = MODELS[what]
    change(model)
    with pytest.raises(StartupError, match=message) as error:
        preflight(config(model))
    assert error.value.exit_code == 3
    assert "\n" not in error.value.cause + error.value.fix


def test_a_missing_directory_is_named() -> None:
    with pytest.raises(StartupError, match="/nowhere/at/all does not exist"):
        preflight(config(Path("/nowhere/at/all")))


def test_pickled_weights_have_a_hint_of_their_own(model: Path) -> None:
    (model / SINGLE_FILE).rename(model / "pytorch_model.bin")
    with pytest.raises(StartupError, match=r"pickled weights.*save_pretrained"):
        preflight(config(model))


def test_fused_tensors_are_recognised(model: Path) -> None:
    tensors = load_file(model / SINGLE_FILE)
    for layer in range(3):
        for kind in ("weight", "bias"):
            names = [f"model.layers.{layer}.self_attn.{part}_proj.{kind}" for part in "qkv"]
            tensors[f"model.layers.{layer}.self_attn.qkv_proj.{kind}"] = torch.cat([tensors.pop(n) for n in names])
    save_file(tensors, model / SINGLE_FILE)
    preflight(config(model))


@pytest.mark.parametrize(
    ("asked", "devices", "ranks", "outcome"),
    [
        ("auto", 0, 2, "cpu"),
        ("auto", 2, 2, "cuda"),
        ("cuda", 1, 1, "cuda"),
        ("cpu", 4, 1, "cpu"),
        ("cuda", 0, 1, "no CUDA device responds"),
        ("cuda", 1, 2, "tensor_parallel_size 2 needs as many CUDA devices; 1 found"),
        ("auto", 1, 2, "tensor_parallel_size 2 needs as many CUDA devices; 1 found"),
    ],
)
def test_the_device_is_the_one_in_use(
    model: Path, monkeypatch: pytest.MonkeyPatch, asked: str, devices: int, ranks: int, outcome: str
) -> None:
    monkeypatch.setattr(cuda_driver, "device_count", lambda: devices)
    settings = config(model, device=asked, tensor_parallel_size=ranks)
    if outcome in ("cpu", "cuda"):
        assert preflight(settings).device == outcome
    else:
        with pytest.raises(StartupError, match=outcome):
            preflight(settings)


def test_a_driver_that_is_too_old_is_one_line(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_driver, "device_count", lambda: 2)
    monkeypatch.setattr(cuda_driver, "driver_version", lambda: "12.8")
    monkeypatch.setattr(cuda_driver, "built_for", lambda: "13.0")
    with pytest.raises(StartupError, match=r"driver supports CUDA 12\.8.*built for CUDA 13\.0.*580\.65\.06 or later"):
        preflight(config(model, device="cuda"))
    assert preflight(config(model, device="auto")).device == "cpu"
    (line,) = [record.getMessage() for record in caplog.records if "device_chosen" in record.getMessage()]
    assert "CUDA 12.8" in line and "580.65.06" in line
    monkeypatch.setattr(cuda_driver, "driver_version", lambda: "13.0")
    assert preflight(config(model, device="auto")).device == "cuda"


@pytest.mark.parametrize(
    ("driver", "built", "fix"),
    [
        ("12.2", "12.8", None),  # one major version: a program for a later minor one runs
        ("13.1", "12.8", None),
        ("11.8", "12.8", "525.60.13 or later"),
        ("13.0", "14.0", "one that supports CUDA 14"),
    ],
)
def test_the_major_version_decides_whether_a_driver_suffices(driver: str, built: str, fix: str | None) -> None:
    found = cuda_driver.why_too_old(driver, built)
    assert (found is None) == (fix is None)
    if found is not None and fix is not None:
        assert fix in found[1] and driver in found[0] and built in found[0]


def test_the_cuda_version_of_torch_is_its_own_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cuda_driver.built_for() == torch.version.cuda
    spec = importlib.machinery.ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(cuda_driver.importlib.util, "find_spec", lambda name: spec)
    for text, version in (("cuda: Optional[str] = '13.0'\n", "13.0"), ("cuda = '12.8'\n", "12.8"), ("hip = '7'", None)):
        (tmp_path / "version.py").write_text(f"debug = False\n{text}")
        assert cuda_driver.built_for() == version


def test_the_form_of_keys_and_values_is_resolved(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for asked, form in (("auto", "float32"), ("int8", "int8"), ("fp8", "fp8"), ("fp8_e4m3", "fp8")):
        assert preflight(config(model, dtype="float32", kv_cache_dtype=asked)).kv_cache_dtype == form
    monkeypatch.setattr(cuda_driver, "device_count", lambda: 1)
    assert preflight(config(model, device="cuda", dtype="float16")).kv_cache_dtype == "float16"
    assert preflight(config(model, device="cuda", kv_cache_dtype="fp8")).kv_cache_dtype == "fp8"


def test_rounded_weights_on_cuda_take_triton(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "device_count", lambda: 2)
    monkeypatch.setattr(cuda_driver, "lowest_capability", lambda devices: (8, 0))
    monkeypatch.setattr(cuda_driver, "missing_to_launch", list)
    asked = config(model, device="auto", quantization="int8", tensor_parallel_size=2)
    found = preflight(asked)
    assert (found.device, found.quantization) == ("cuda", "int8")
    monkeypatch.setattr(cuda_driver, "lowest_capability", lambda devices: (7, 5) if devices == 2 else (9, 0))
    with pytest.raises(StartupError, match=r"int8 on CUDA.*capability 8\.0, but a device has 7\.5\..*--device cpu"):
        preflight(asked)
    monkeypatch.setattr(cuda_driver, "missing_to_launch", lambda: ["a C compiler"])
    with pytest.raises(StartupError, match=r"int8 on CUDA.*Triton cannot .* without a C compiler\."):
        preflight(asked)
    find = importlib.util.find_spec
    monkeypatch.setattr(cuda_driver.importlib.util, "find_spec", lambda name: None if name == "triton" else find(name))
    with pytest.raises(StartupError, match=r"int8 on CUDA.*Triton is not installed.*--device cpu"):
        preflight(asked)
    assert preflight(asked.with_(device="cpu")).quantization == "int8"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"quantization": "int8"}, r"does not support quantization int8"),
        ({"kv_cache_dtype": "int8", "dtype": "float16"}, r"int8 pages in float16"),
        ({"attention_backend": "reference"}, r"Triton attention backend, not reference"),
    ],
)
def test_batch_invariance_on_cuda_is_refused_where_no_kernel_promises_it(
    model: Path, monkeypatch: pytest.MonkeyPatch, changes: dict, said: str
) -> None:
    monkeypatch.setattr(cuda_driver, "device_count", lambda: 1)
    monkeypatch.setattr(cuda_driver, "lowest_capability", lambda devices: (8, 0))
    monkeypatch.setattr(cuda_driver, "missing_to_launch", list)
    asked = config(model, device="cuda", batch_invariant=True)
    assert preflight(asked).batch_invariant
    assert preflight(asked.with_(kv_cache_dtype="int8", dtype="bfloat16")).batch_invariant
    with pytest.raises(StartupError, match=f"^--batch-invariant on CUDA .*{said}.*--device cpu"):
        preflight(asked.with_(**changes))
    assert preflight(asked.with_(batch_invariant=False, **changes)).device == "cuda"
    assert preflight(asked.with_(device="cpu", **changes)).batch_invariant
    monkeypatch.setattr(cuda_driver, "missing_to_launch", lambda: ["a C compiler"])
    with pytest.raises(StartupError, match=r"^--batch-invariant on CUDA needs Triton kernels: .* a C compiler\."):
        preflight(asked)


def test_the_lowest_capability_of_the_devices_that_serve_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = [(9, 0), (8, 9), (7, 5)]

    class Driver:
        def cuDeviceGetAttribute(self, number: Any, attribute: int, device: int) -> int:
            number._obj.value = capabilities[device][attribute - 75]
            return 0

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", lambda name: Driver())
    assert [cuda_driver.lowest_capability(count) for count in (1, 2, 3)] == [(9, 0), (8, 9), (7, 5)]


def test_torch_for_rocm_needs_no_cuda_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = importlib.machinery.ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(cuda_driver.importlib.util, "find_spec", lambda name: spec)
    (tmp_path / "version.py").write_text("cuda: Optional[str] = None\nhip: Optional[str] = '7.2.26015-fc0010cf'\n")
    (tmp_path / "lib").mkdir()
    assert cuda_driver.device_count() == 0
    (tmp_path / "lib" / "libtorch_hip.so").touch()
    asked = []

    def count_devices(count: Any) -> int:
        count._obj.value = 2
        return 0

    def opened(name: str) -> dict[str, Any]:
        asked.append(name)
        return {"hipInit": lambda flags: 0, "hipGetDeviceCount": count_devices}

    monkeypatch.setattr(cuda_driver.ctypes, "CDLL", opened)
    assert cuda_driver.device_count() == 2
    assert cuda_driver.built_for() is None and cuda_driver.built_for("hip") == "7.2.26015"
    assert cuda_driver.lowest_capability(2) == cuda_driver.LEAST_CAPABILITY
    assert asked == ["libamdhip64.so"]


def test_devices_are_counted_as_torch_counts_them() -> None:
    assert cuda_driver.device_count() == (torch.cuda.device_count() if torch.version.cuda else 0)


def test_it_never_imports_torch(model: Path) -> None:
    code = (
        "import sys; from oarlock.workers.config import WorkerConfig; from oarlock.workers.preflight import preflight; "
        f"preflight(WorkerConfig({str(model)!r})); "
        "print([name for name in ('torch', 'numpy', 'safetensors', 'transformers') if name in sys.modules])"
    )
    root = Path(__file__).parents[4]
    answer = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
