"""Quantised checkpoints that are not served: one line of cause that names the setting or tensor, and one of fix."""

import json
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oarlock.base.errors import StartupError
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.models.hf_quantization import stored_quantization
from oarlock.workers.platform import cuda_driver
from oarlock.workers.preflight import check_without_weights, preflight
from oarlock.workers.runner.memory_needs import weight_bytes
from oarlock.workers.runner.model_runner import ModelRunner
from tests.golden.paged_run import PagedRun, load_decoder
from tests.golden.quantised import CASES, FILE, write
from tests.golden.tiny_models import make_tiny

SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 2}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def compressed(weights: Any, inputs: Any = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"a": group}, **more}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}

SETTINGS: dict[str, tuple[Any, str]] = {
    "unknown method": ({"quant_method": "hqq"}, r"quantised \('hqq' in quantization_config\).*Supported: awq, bits"),
    "no method": ({"bits": 4}, r"quantised \('unknown' in"),
    "not a table": ([4], r"quantised \('unknown' in"),
    "names of mxfp4": ({"quant_method": "mxfp4", "modules_to_not_convert": "lm_head"}, r"modules_to_not_convert"),
    "gptq bits": (GPTQ | {"bits": 3}, r"quantization_config\.bits = 3.*Supported: 4, 8"),
    "gptq bits as text": (GPTQ | {"bits": "4"}, r"bits = '4'"),
    "gptq group": (GPTQ | {"group_size": 0}, r"group_size = 0"),
    "gptq marlin": (GPTQ | {"checkpoint_format": "marlin"}, r"checkpoint_format = 'marlin'.*gptq, gptq_v2"),
    "gptq marlin of old": (GPTQ | {"is_marlin_format": True}, r"is_marlin_format = True"),
    "gptq sym": (GPTQ | {"sym": "yes"}, r"sym = 'yes'"),
    "gptq of one module": (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 2}}}, r"dynamic\.\+:\.\*down\.\*\.bits = 2"),
    "gptq pattern": (GPTQ | {"dynamic": {"-:(": {}}}, r"dynamic that is not a regular expression"),
    "awq bits": (AWQ | {"bits": 3}, r"bits = 3"),
    "awq version": (AWQ | {"version": "GEMV_fast"}, r"version = 'gemv_fast'.*Supported: gemm"),
    "awq without zeros": (AWQ | {"zero_point": False}, r"zero_point = False"),
    "fp8 static": (FP8 | {"activation_scheme": "static"}, r"activation_scheme = 'static'.*Supported: dynamic"),
    "fp8 scales of another kind": (FP8 | {"scale_fmt": "e4m3"}, r"scale_fmt = 'e4m3'"),
    "fp8 e5m2": (FP8 | {"fmt": "e5m2"}, r"fmt = 'e5m2'"),
    "fp8 block": (FP8 | {"weight_block_size": [128]}, r"weight_block_size = \[128\]"),
    "8 bits of bitsandbytes": (NF4 | {"load_in_4bit": False, "load_in_8bit": True}, r"load_in_4bit = False.*4-bit"),
    "storage of bitsandbytes": (NF4 | {"bnb_4bit_quant_storage": "bfloat16"}, r"bnb_4bit_quant_storage = 'bfloat16'"),
    "nvfp4": (compressed(FLOAT8, format="nvfp4-pack-quantized"), r"format = 'nvfp4-pack-quantized'"),
    "2 bits": (compressed(INT4 | {"num_bits": 2}), r"config_groups\.a\.weights\.num_bits = 2"),
    "static activations": (compressed(INT8, {"num_bits": 8, "dynamic": False}, format="int-quantized"),
                           r"input_activations\.dynamic = False.*stored scales"),
    "activations of 4 bits": (compressed(INT4, {"num_bits": 4, "dynamic": True}), r"input_activations\.num_bits = 4"),
    "outputs": (compressed(INT4) | {"config_groups": {"a": {"weights": INT4, "output_activations": {"num_bits": 8}}}},
                r"output_activations"),
    "sparse": (compressed(INT4, sparsity_config={"format": "sparse-24-bitmask"}), r"sparsity_config\.format = 'sparse"),
    "transforms": (compressed(INT4, transform_config={"config_groups": {"R1": {}}}), r"transform_config"),
    "no groups": (compressed(INT4) | {"config_groups": {}}, r"config_groups"),
    "groups without a size": (compressed({"num_bits": 4, "strategy": "group"}), r"group_size"),
    "float and packed": (compressed(FLOAT8), r"type = 'float'"),
    "order": (compressed(INT4 | {"actorder": "random"}), r"actorder = 'random'.*group, dynamic, true, weight, static"),
    "order of no groups": (compressed(INT8 | {"actorder": "group"}), r"actorder = 'group'.*there are no groups"),
    "order of floats": (compressed(FLOAT8 | {"actorder": True}, format="float-quantized"), r"actorder = True.*weight"),
}  # fmt: skip


def edit(model: Path, settings: Any) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": settings}))


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    return make_tiny(tmp_path, "qwen2", **SHAPE)


@pytest.mark.parametrize("what", SETTINGS)
def test_settings_are_refused_from_config_json_alone(dense: Path, what: str) -> None:
    settings, message = SETTINGS[what]
    edit(dense, settings)
    (dense / FILE).unlink()
    with pytest.raises(StartupError, match=message) as error:
        check_without_weights(WorkerConfig(str(dense), device="cpu"))
    assert error.value.exit_code == 3
    assert "\n" not in error.value.cause + error.value.fix and error.value.fix


@pytest.mark.parametrize("settings", [GPTQ, AWQ, FP8, NF4, compressed(INT4), compressed(INT8)], ids=str)
def test_any_settings_are_understood_or_refused(settings: dict[str, Any], tmp_path: Path) -> None:
    draw = random.Random(0)
    values = [
        None,
        True,
        False,
        -1,
        0,
        1,
        4,
        2**70,
        0.5,
        "",
        "x",
        "re:(",
        [],
        [1],
        ["re:("],
        {},
        {"a": {}},
        float("nan"),
    ]

    def changed(table: dict[str, Any]) -> dict[str, Any]:
        table = dict(table)
        key = draw.choice([*table, "dynamic", "format", "strategy"])
        inner = table.get(key)
        table[key] = (
            changed(inner) if isinstance(inner, dict) and inner and draw.random() < 0.8 else draw.choice(values)
        )
        return table

    served = 0
    for _ in range(1000):
        table = {**changed(settings), "quant_method": settings["quant_method"]}
        try:
            found = stored_quantization(tmp_path, {"quantization_config": table})
            assert found is not None and found.scheme.description
            found.scheme.format_of("model.layers.0.mlp.up_proj")
            served += 1
        except StartupError as error:
            assert "\n" not in error.cause + error.fix
    assert 0 < served < 1000


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        return write(make_tiny(folder, "qwen2", **SHAPE), folder, CASES[name]).path

    return made


LAYER = "model.layers.0.mlp.down_proj"
# (case, tensor, what becomes of it: None, it is gone), and what is said
DAMAGES: dict[str, tuple[str, str, Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "no scales": ("gptq-4-32-sym", "scales", lambda x: None, "holds no tensor 'model.layers.0.mlp.down_proj.scales'"),
    "no zeros": ("awq-32", "qzeros", lambda x: None, "holds no tensor .*qzeros'"),
    "no weight": ("gptq-4-32-sym", "qweight", lambda x: None, "holds no tensor .*qweight'"),
    "no order": ("gptq-4-32-asym-act", "g_idx", lambda x: None, "holds no tensor .*g_idx'"),
    "no order of packed": ("packed-4-32-asym-act", "weight_g_idx", lambda x: None, "holds no tensor .*weight_g_idx'"),
    "no scale of floats": ("fp8-block", "weight_scale_inv", lambda x: None, "holds no tensor .*weight_scale_inv'"),
    "no scale of a channel": ("integers-channel", "weight_scale", lambda x: None, "holds no tensor .*weight_scale'"),
    "no absmax": ("nf4", "weight.absmax", lambda x: None, "holds no tensor .*absmax'"),
    "other scales": ("gptq-4-32-sym", "scales", lambda x: x[1:], r"scales' has shape \[11, 128\].*\[12, 128\]"),
    "fewer words": ("packed-4-32-sym", "weight_packed", lambda x: x[:, 1:], r"weight_packed' has shape \[128, 47\]"),
    "words of another type": ("awq-32", "qweight", lambda x: x.float(), "qweight' is F32"),
    "scales in float8": ("fp8-block", "weight_scale_inv", lambda x: x.to(torch.float8_e4m3fn), "scale_inv' is F8"),
    "e5m2": ("fp8-block", "weight", lambda x: x.float().to(torch.float8_e5m2), "weight' is F8_E5M2"),
}  # fmt: skip


def damage(path: Path, folder: Path, tensor: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Path:
    target = folder / "damaged"
    shutil.copytree(path, target)
    tensors = load_file(path / FILE)
    changed = change(tensors.pop(f"{LAYER}.{tensor}"))
    if changed is not None:
        tensors[f"{LAYER}.{tensor}"] = changed.contiguous()
    save_file(tensors, target / FILE)
    return target


@pytest.mark.parametrize("what", DAMAGES)
def test_a_tensor_that_is_not_as_it_should_be_is_named(
    stored: Callable[[str], Path], tmp_path: Path, what: str
) -> None:
    case, tensor, change, message = DAMAGES[what]
    with pytest.raises(StartupError, match=message) as error:
        preflight(WorkerConfig(str(damage(stored(case), tmp_path, tensor, change)), device="cpu"))
    assert "\n" not in error.value.cause + error.value.fix and error.value.exit_code == 3


@pytest.mark.parametrize("case", ["gptq-4-32-sym", "fp8-tensor"])
def test_rounding_of_inputs_is_reported_and_can_be_avoided(stored: Callable[[str], Path], case: str) -> None:
    config = WorkerConfig(str(stored(case)), device="cpu", max_model_len=64, num_kv_blocks=8, num_threads=1)
    rounds = case.startswith("gptq")
    if not rounds:
        with pytest.raises(StartupError, match="--dequantize: matmuls with fp8 weights do not quantize"):
            preflight(config.with_(dequantize=True))
    for dequantize in (False, True)[: 1 + rounds]:
        runner = ModelRunner(preflight(config.with_(dequantize=dequantize)), TensorParallel.solo())
        runner.load(lambda fraction: None)
        runner.allocate([8])
        info = runner.info()
        assert info.input_rounding == ("8 bits" if rounds and not dequantize else None)
        assert info.quantization.endswith(", dequantised at load") == dequantize
        assert info.weight_bytes_per_rank == weight_bytes(runner.spec, info.dtype, runner.description.formats)


def test_writing_weights_out_is_refused_where_it_changes_nothing(
    stored: Callable[[str], Path], dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StartupError, match="matmuls with unquantised weights do not quantize activations on cpu"):
        preflight(WorkerConfig(str(dense), device="cpu", dequantize=True))
    monkeypatch.setattr(cuda_driver, "device_count", lambda: 1)
    monkeypatch.setattr(cuda_driver, "lowest_capability", lambda devices: (8, 0))
    monkeypatch.setattr(cuda_driver, "missing_to_launch", list)
    on_cuda = WorkerConfig(str(stored("awq-32")), device="cuda", dequantize=True)
    with pytest.raises(StartupError, match="matmuls with awq weights do not quantize activations on cuda"):
        preflight(on_cuda)
    assert preflight(on_cuda.with_(model_path=str(stored("fp8-tensor")))).dequantize, "there many rows are rounded"


def with_one(value: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Replace the sixth number."""
    return lambda x: torch.cat((x[:5], torch.tensor([value], dtype=x.dtype), x[6:]))


def state_with(**changes: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Settings of bitsandbytes in which some are others, and those with None are left out."""

    def changed(stored: torch.Tensor) -> torch.Tensor:
        state = {**json.loads(bytes(stored.tolist())), **changes}
        text = json.dumps({key: value for key, value in state.items() if value is not None})
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    return changed


STATE = "weight.quant_state.bitsandbytes__nf4"
# As above, of what only a rank sees, as it reads the weight.
READ_DAMAGES: dict[str, tuple[str, str, Callable[[torch.Tensor], torch.Tensor | None], str]] = {
    "group too high": ("packed-4-32-asym-act", "weight_g_idx", with_one(12), r"weight_g_idx' names group 12 of 12"),
    "group below": ("packed-4-32-asym-act", "weight_g_idx", with_one(-1), r"weight_g_idx' names group -1 of 12"),
    "group too often": ("packed-4-32-asym-act", "weight_g_idx", lambda x: torch.where(x == 3, 4, x),
                        r"weight_g_idx' names group 3 for 0 inputs, not 32"),
    "group of gptq": ("gptq-4-32-asym-act", "g_idx", with_one(-7), r"g_idx' names group -7 of 12"),
    "state of another kind": ("nf4", STATE, lambda x: x[:-1], r"nf4' has no JSON object of settings"),
    "a list as state": ("nf4", STATE, lambda x: torch.tensor([91, 93], dtype=torch.uint8), r"nf4' has no JSON object"),
    "no block size": ("nf4", STATE, state_with(blocksize=None), r"nf4' names no blocksize, which must be 64"),
    "block size": ("nf4", STATE, state_with(blocksize=128), r"nf4' has blocksize 128, which is not.*: 64 would be"),
    "shape": ("nf4", STATE, state_with(shape="x"), r"nf4' has shape 'x', which is not.*: \[128, 384\] would be"),
    "no offset": ("nf4-nested", STATE, state_with(nested_offset=None), r"nf4' names no nested_offset, which must be a"),
    "offset": ("nf4-nested", STATE, state_with(nested_offset=float("nan")), r"nested_offset nan, which must be a fin"),
}  # fmt: skip


@pytest.mark.parametrize("what", READ_DAMAGES)
def test_a_damaged_tensor_is_named_when_it_is_read(stored: Callable[[str], Path], tmp_path: Path, what: str) -> None:
    case, tensor, change, message = READ_DAMAGES[what]
    with pytest.raises(StartupError, match=message) as error:
        load_decoder(damage(stored(case), tmp_path, tensor, change), TensorParallel.solo())
    assert "\n" not in error.value.cause + error.value.fix and "None" not in error.value.cause


def test_groups_that_were_never_ordered_are_as_they_come(stored: Callable[[str], Path], tmp_path: Path) -> None:
    """A tool has made room for the groups of inputs, -1 for each, and stored them as they are."""
    path = damage(stored("packed-4-32-sym"), tmp_path, "weight_packed", lambda x: x)
    tensors = load_file(path / FILE)
    save_file({**tensors, f"{LAYER}.weight_g_idx": torch.full((384,), -1)}, path / FILE)
    tokens = [5, 6, 7]
    ours = PagedRun(load_decoder(path, TensorParallel.solo())).step({0: tokens})[0]
    assert torch.equal(
        ours, PagedRun(load_decoder(stored("packed-4-32-sym"), TensorParallel.solo())).step({0: tokens})[0]
    )


def test_groups_that_do_not_divide_are_named(stored: Callable[[str], Path], tmp_path: Path) -> None:
    path = damage(stored("gptq-4-32-sym"), tmp_path, "scales", lambda x: x)
    edit(path, CASES["gptq-4-32-sym"].settings | {"group_size": 100})
    with pytest.raises(StartupError, match="q_proj: groups of 100 do not divide its 128"):
        preflight(WorkerConfig(str(path), device="cpu"))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_bias_that_the_model_has_not_must_be_zero(
    stored: Callable[[str], Path], tmp_path: Path, value: float
) -> None:
    """Tools have stored one of zeros for every module that they quantised."""
    path = damage(stored("gptq-4-32-sym"), tmp_path, "scales", lambda x: x)
    tensors = load_file(path / FILE)
    save_file({**tensors, f"{LAYER}.bias": torch.full((128,), value)}, path / FILE)
    config = WorkerConfig(str(path), device="cpu")
    if value == 0.0:
        assert preflight(config).quantization == "gptq"
        return
    with pytest.raises(StartupError, match=r"down_proj\.bias', which Qwen2ForCausalLM does not use"):
        preflight(config)


def test_settings_that_contradict_the_checkpoint_are_refused(
    stored: Callable[[str], Path], dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = WorkerConfig(str(stored("awq-32")), device="cpu")
    with pytest.raises(StartupError, match=r"quantization int8 rounds.*already: awq \(4 bits, groups of 32\)"):
        preflight(config.with_(quantization="int8"))
    with pytest.raises(StartupError, match="load_format dummy has no weights for a quantised checkpoint"):
        preflight(config.with_(load_format="dummy"))
    with pytest.raises(StartupError, match="quantization awq is a format of checkpoints, and this checkpoint does"):
        preflight(WorkerConfig(str(dense), device="cpu", quantization="awq"))
    monkeypatch.setattr(cuda_driver, "device_count", lambda: 1)
    monkeypatch.setattr(cuda_driver, "lowest_capability", lambda devices: (7, 0))
    monkeypatch.setattr(cuda_driver, "missing_to_launch", list)
    with pytest.raises(StartupError, match=r"quantization awq on CUDA needs Triton kernels: they need.*8\.0"):
        check_without_weights(config.with_(device="cuda"))


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("scales", lambda scales: scales.fill_(255), r"experts\.0\.gate_proj\.scales' holds NaN"),
        ("blocks", lambda blocks: blocks[:, :, :-1].clone(), r"'model\.layers\.0\.mlp\.experts\.0\.gate_proj\.blocks'"),
        ("blocks", lambda blocks: blocks[:, :-1].clone(), r"'model\.layers\.0\.mlp\.experts\.0\.gate_proj\.blocks'"),
    ],
    ids=["no number", "inputs", "rows"],
)
def test_damaged_experts_of_mxfp4_are_named(tmp_path: Path, part: str, change: Callable, message: str) -> None:
    path = write(make_tiny(tmp_path, "gpt_oss", **SHAPE | {"intermediate_size": 96}), tmp_path, CASES["mxfp4"]).path
    tensors = load_file(path / FILE)
    name = f"model.layers.0.mlp.experts.gate_up_proj_{part}"
    save_file(tensors | {name: change(tensors[name])}, path / FILE, {"format": "pt"})
    with pytest.raises(StartupError, match=message):
        preflight(WorkerConfig(str(path), device="cpu"))
        load_decoder(path, TensorParallel.solo())
