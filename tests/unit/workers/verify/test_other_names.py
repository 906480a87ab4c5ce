"""Verification of quantised and GGUF models whose checkpoints have other names and layouts than ours."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from oarlock.workers.gguf_config import hf_config
from oarlock.workers.layers.decoder_spec import tensor_shapes
from oarlock.workers.model_files.checkpoint import SINGLE_FILE, Checkpoint
from oarlock.workers.model_files.gguf_model import GGUFModel
from oarlock.workers.models.registry import read_spec
from oarlock.workers.verify.dequantise import StoredTensors
from oarlock.workers.weights.reader import WeightReader
from tests.golden.gguf_writer import all_of, write_gguf
from tests.golden.quantised import CASES, write
from tests.golden.tiny_models import make_tiny
from tests.unit.workers.verify.cases import VerifyCase, cut_scales_wrongly

pytestmark = pytest.mark.slow

LAYER = "model.layers.1"
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"hidden_size": 128, "n_inner": 256, "intermediate_size": 256},
    "gpt_bigcode": {"hidden_size": 128, "n_inner": 256, "intermediate_size": 256, "multi_query": False},
    "opt": {"hidden_size": 128, "ffn_dim": 256, "intermediate_size": 256},
    "phi": {"hidden_size": 128, "intermediate_size": 256},
    "gpt_neox": {"hidden_size": 128, "intermediate_size": 256},
}
# Gates of recurrent layers, which stay as they are stored, may be one matrix for both.
_DELTA = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "linear_key_head_dim": 16,
          "linear_value_head_dim": 32}  # fmt: skip
RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "olmo_hybrid": {"hidden_size": 128, "linear_key_head_dim": 32, "linear_value_head_dim": 32},
}
# The families whose experts have other names in checkpoints; every token has all experts.
EXPERTS = {
    "mixtral": {"num_local_experts": 3, "num_experts_per_tok": 3},
    "granitemoeshared": {"num_local_experts": 3, "num_experts_per_tok": 3},
    "minimax_m2": {"num_local_experts": 3, "num_experts_per_tok": 3, "head_dim": 32},
    "phimoe": {"num_local_experts": 3, "num_experts_per_tok": 2},
    "hy_v3": {"num_experts": 3, "num_experts_per_tok": 3, "head_dim": 32},
}


def right(case: VerifyCase, size: int) -> None:
    comparison, causes = case.run(size)
    assert comparison.ok and causes == [], (comparison.first_fault, causes)


@pytest.mark.parametrize("form", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_rounded_at_load_are_right(tmp_path: Path, family: str, form: str) -> None:
    model = make_tiny(tmp_path, family, seed=5, num_hidden_layers=2, **FAMILIES[family])
    right(VerifyCase(model, tmp_path / "verify", quantization=form), 2)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3_5_text", "int8"),
        *(pytest.param(*one, marks=pytest.mark.soak) for one in (("qwen3_5_text", "int4"), ("olmo_hybrid", "int8"))),
    ],
)
def test_recurrent_layers_rounded_at_load_are_right(tmp_path: Path, family: str, form: str) -> None:
    model = make_tiny(tmp_path, family, seed=5, **RECURRENT[family])
    right(VerifyCase(model, tmp_path / "verify", quantization=form), 2)


@pytest.mark.parametrize("family", EXPERTS)
def test_experts_rounded_at_load_are_right(tmp_path: Path, family: str) -> None:
    model = make_tiny(tmp_path, family, seed=5, hidden_size=128, num_hidden_layers=2, **EXPERTS[family])
    right(VerifyCase(model, tmp_path / "verify", quantization="int8"), 2)


def test_parts_for_images_are_not_looked_for(tmp_path: Path) -> None:
    model = make_tiny(tmp_path, "phi4_multimodal", seed=5, hidden_size=128)
    right(VerifyCase(model, tmp_path / "verify", quantization="int8"), 2)


@pytest.mark.parametrize("family", ["gpt2", "gpt_bigcode", "phi", "gpt_neox"])
@pytest.mark.parametrize("kind", ["Q8_0", "BF16"])
def test_a_gguf_model_is_right(tmp_path: Path, family: str, kind: str) -> None:
    special = {**FAMILIES[family], "multi_query": True} if family == "gpt_bigcode" else FAMILIES[family]
    activation = {"gpt_bigcode": {"activation_function": "gelu"}, "phi": {"num_key_value_heads": 8}}.get(family, {})
    dense = make_tiny(tmp_path, family, seed=5, num_hidden_layers=2, **special, **activation)
    right(VerifyCase(described_gguf(tmp_path, dense, kind), tmp_path / "verify", "bfloat16"), 2)


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("qwen3_next", "Q8_0"),
        *(
            pytest.param(*one, marks=pytest.mark.soak)
            for one in (("qwen3_5_text", "Q8_0"), ("qwen3_5_moe_text", "BF16"))
        ),
    ],
)
def test_a_gguf_model_with_recurrent_layers_is_right(tmp_path: Path, family: str, kind: str) -> None:
    """Value heads of Qwen3.5 are in another order than key heads; Qwen3-Next's are not."""
    experts = {"num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 64, "mlp_only_layers": [],
               "shared_expert_intermediate_size": 64}  # fmt: skip
    special = RECURRENT["qwen3_5_text"] | ({} if family == "qwen3_5_text" else experts)
    dense = make_tiny(tmp_path, family, seed=5, **special)
    right(VerifyCase(described_gguf(tmp_path, dense, kind), tmp_path / "verify", "bfloat16"), 2)


@pytest.mark.parametrize("family", ["minimax_m2", "hy_v3", "exaone_moe"])
def test_a_gguf_model_with_corrected_scores_is_right(tmp_path: Path, family: str) -> None:
    """The correction is a buffer of transformers' router, or of the module around it."""
    width = "intermediate_size" if family == "minimax_m2" else "moe_intermediate_size"
    dense = make_tiny(tmp_path, family, seed=5, **{width: 40})  # transformers' kernel needs multiples of 8
    right(VerifyCase(described_gguf(tmp_path, dense, "BF16"), tmp_path / "verify", "bfloat16"), 1)


def described_gguf(tmp_path: Path, dense: Path, kind: str) -> Path:
    """A directory that describes the GGUF model made from `dense`."""
    described = tmp_path / "described"
    described.mkdir()
    path = write_gguf(dense, tmp_path / "model.gguf", all_of(kind))
    (described / "model.gguf").symlink_to(path)
    (described / "config.json").write_text(json.dumps(hf_config(GGUFModel.open(path))))
    return described


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_a_scale_cut_wrongly_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Rank 1 has each output's scales from the output before."""
    model = make_tiny(tmp_path, family, seed=5, num_hidden_layers=2, **FAMILIES[family])
    case = VerifyCase(model, tmp_path / "verify", quantization="int8")
    cut_scales_wrongly(monkeypatch, f"{LAYER}.mlp.down_proj")
    comparison, causes = case.run(2)
    assert not comparison.ok
    assert f"{LAYER}.mlp.down_proj" in causes[0] and "wrong scales" in causes[0]


def test_a_quantised_checkpoint_with_other_names_is_right(tmp_path: Path) -> None:
    """GPT-2 as GPTQ stores it: [inputs, outputs] in packed words, like every other family."""
    dense = make_tiny(
        tmp_path, "gpt2", seed=5, num_hidden_layers=2, hidden_size=128, n_inner=256, intermediate_size=256
    )
    renamed, tensors = tmp_path / "renamed", load_file(dense / SINGLE_FILE)
    renamed.mkdir()
    (renamed / "config.json").write_text((dense / "config.json").read_text())
    modules = {"c_attn": "c_attn_proj", "c_fc": "c_fc_proj"}  # `write` rounds the modules whose names end so
    plain = {}
    for name, tensor in tensors.items():
        *above, module, kind = name.split(".")
        is_conv1d = module in ("c_attn", "c_proj", "c_fc")
        name = ".".join([*above, modules.get(module, module), kind])
        plain[name] = tensor.T.contiguous() if is_conv1d and kind == "weight" else tensor
    save_file(plain, renamed / SINGLE_FILE, {"format": "pt"})
    path = write(renamed, tmp_path, CASES["gptq-4-64-asym"]).path
    stored = load_file(path / SINGLE_FILE)
    for long in modules.values():
        stored = {name.replace(long, long.removesuffix("_proj")): tensor for name, tensor in stored.items()}
    save_file(stored, path / SINGLE_FILE, {"format": "pt"})
    right(VerifyCase(path, tmp_path / "verify", "bfloat16"), 2)


@pytest.mark.parametrize(
    "name",
    [
        "fp8-block",
        *(
            pytest.param(one, marks=pytest.mark.soak)
            for one in ("floats-channel", "gptq-4-64-asym", "awq-32", "packed-4-32-sym")
        ),
    ],
)
def test_quantised_recurrent_layers_are_right(tmp_path: Path, name: str) -> None:
    """Qwen3.5 as published: projections to the gates of recurrent layers stay as they are, and in 4 bits attention."""
    special = RECURRENT["qwen3_5_text"] | {"head_dim": 64, "linear_value_head_dim": 64, "linear_key_head_dim": 64}
    dense = make_tiny(tmp_path, "qwen3_5_text", seed=5, **special)
    left = () if "-4" not in name and "awq" not in name else ("self_attn.q_proj",)
    path = write(dense, tmp_path, replace(CASES[name], left=left)).path
    right(VerifyCase(path, tmp_path / "verify", "bfloat16"), 2)


def test_experts_stored_in_blocks_of_fp8_are_right(tmp_path: Path) -> None:
    """MiniMax M2 as published: the experts' matrices are w1, w2 and w3, and the router is left as it is by name."""
    dense = make_tiny(tmp_path, "minimax_m2", seed=5, hidden_size=128, num_hidden_layers=2, **EXPERTS["minimax_m2"])
    tensors = load_file(dense / SINGLE_FILE)
    experts = re.compile(r"(block_sparse_moe\.experts\.\d+\.w[123])(_proj)?\.")
    assert sum(experts.search(name) is not None for name in tensors) == 2 * 3 * 3
    named = {experts.sub(r"\1_proj.", name): tensor for name, tensor in tensors.items()}
    save_file(named, dense / SINGLE_FILE, {"format": "pt"})  # `write` rounds the modules whose names end so
    case = CASES["fp8-block"]
    left = {"fmt": "float8_e4m3fn", "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]}
    path = write(dense, tmp_path, replace(case, settings=case.settings | left)).path
    stored = {experts.sub(r"\1.", name): tensor for name, tensor in load_file(path / SINGLE_FILE).items()}
    assert sum(name.endswith("weight_scale_inv") for name in stored) == 2 * (3 * 3 + 4)
    save_file(stored, path / SINGLE_FILE, {"format": "pt"})
    right(VerifyCase(path, tmp_path / "verify", "bfloat16"), 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_plain_reader_finds_what_the_ranks_read(tmp_path: Path, family: str) -> None:
    path = make_tiny(tmp_path, family, seed=5, num_hidden_layers=1, **FAMILIES[family])
    spec = read_spec(str(path))
    stored, checkpoint = StoredTensors(path, spec.names), Checkpoint.open(path, spec.names)
    shapes = {name: shape for name, shape in tensor_shapes(spec).items() if stored.has(name)}
    assert len(shapes) > 10
    with WeightReader(checkpoint) as weights:
        for name, shape in shapes.items():
            into = torch.empty(shape)
            weights.take(name, into, shape=shape)
            assert torch.equal(stored.get(name), into), name
