"""Adapters in PEFT's files, a kind for each kind of layer, against weights that transformers has merged, in float64.

Every tensor of every layer may miss the truth by twice the error of transformers' own run with the merged weights, at
1 and 2 ranks. One of three sequences has no adapter.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from oarlock.workers.lora.adapter_file import Adapter
from oarlock.workers.models.registry import read_spec
from tests.golden.peft_files import write_peft
from tests.golden.tiny_models import make_tiny, tiny_model
from tests.unit.workers.lora.test_gguf_adapter import permuted
from tests.unit.workers.lora.test_gguf_adapter import write as write_gguf
from tests.unit.workers.verify.cases import VerifyCase


def in_layers(name: str) -> bool:
    return (".layers." in name or ".h." in name) and not name.endswith("shared_expert_gate")


def everything(name: str) -> bool:
    return True


def experts_only(name: str) -> bool:
    return name.endswith("experts")


@dataclass(frozen=True)
class Kind:
    """An adapter of a tiny model. `adapts` must be among the modules that it updates, by our names."""

    family: str
    adapts: tuple[str, ...]
    updates: Callable[[str], bool] = in_layers
    settings: dict[str, Any] = field(default_factory=dict)  # of adapter_config.json
    model: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    quantization: str = "none"
    single_experts: bool = False  # adapters of experts are stored one by one


ATTENTION = tuple(f"self_attn.{part}_proj" for part in "qkvo")
MLP = tuple(f"mlp.{part}_proj" for part in ("gate", "up", "down"))
EXPERTS = tuple(f"mlp.experts.{number}.{part}_proj" for number in (0, 3) for part in ("gate", "up", "down"))
BOTH = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"], "target_modules": []}
KINDS = {
    "attention and MLP": Kind("qwen2", (*ATTENTION, *MLP), model={"head_dim": 32}, dtype="bfloat16"),
    "rank and alpha patterns": Kind(
        "llama", (*ATTENTION, *MLP),
        settings={"rank_pattern": {"q_proj": 2, "mlp.up_proj": 7}, "alpha_pattern": {"up_proj": 3, "o_proj": -5.5}},
    ),
    "rsLoRA": Kind("llama", MLP, settings={"use_rslora": True, "target_modules": r".*\.mlp\..*"},
                   updates=lambda name: ".mlp." in name),
    "fused": Kind("phi3", (*ATTENTION, *MLP)),
    "rows of heads": Kind("gpt_neox", (*ATTENTION, "mlp.up_proj")),
    "inputs first": Kind("gpt2", (*ATTENTION, "mlp.down_proj"), settings={"fan_in_fan_out": True}),
    "embedding and head": Kind("gemma2", ("model.embed_tokens", "lm_head"), everything),
    "embedding of a tied head": Kind("qwen3", ("model.embed_tokens",), lambda name: name.endswith("embed_tokens"),
                                     model={"tie_word_embeddings": True}),
    "head of a tied embedding": Kind("qwen3", ("lm_head",), lambda name: name == "lm_head",
                                     model={"tie_word_embeddings": True}),
    "experts stored one by one": Kind("qwen3_moe", EXPERTS, experts_only, single_experts=True),
    "experts": Kind("qwen3_moe", (*ATTENTION, *EXPERTS), everything, BOTH | {"target_modules": ".*"}),
    "one parameter of experts": Kind("qwen2_moe", EXPERTS[2:3], experts_only,
                                     {"target_parameters": ["experts.down_proj"], "target_modules": []}),
    "experts whose rows alternate": Kind("gpt_oss", EXPERTS, experts_only, BOTH),
    "gated delta net": Kind("qwen3_next", ("linear_attn.in_proj_q", "linear_attn.out_proj", "self_attn.gate_proj")),
    "mamba": Kind("bamba", ("mamba.gate_proj", "mamba.out_proj")),
    "int8": Kind("qwen2", (*ATTENTION, *MLP), model={"head_dim": 32}, dtype="bfloat16", quantization="int8"),
}  # fmt: skip
FAST = ("rank and alpha patterns", "experts", "gated delta net")


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(name, marks=() if name in FAST else pytest.mark.soak) for name in KINDS])
def test_every_tensor_is_within_twice_the_error_of_merged_weights(tmp_path: Path, kind: str) -> None:
    one = KINDS[kind]
    model = make_tiny(tmp_path, one.family, seed=7, dtype=getattr(torch, one.dtype), **one.model)
    whole = tiny_model(one.family, seed=7, **one.model)
    adapter = write_peft(
        tmp_path / "adapter", whole, updates=one.updates, single_experts=one.single_experts, **one.settings
    )
    adapted = [pair.module for pair in Adapter.open(adapter, read_spec(str(model))).pairs]
    assert all(any(module.endswith(name) for module in adapted) for name in one.adapts), adapted
    case = VerifyCase(
        model, tmp_path / "verify", one.dtype, block_size=16, quantization=one.quantization, adapter=adapter
    )
    for size in (1, 2):
        comparison, causes = case.run(size)
        assert comparison.ok, (comparison.first_fault, causes)


GGUF = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down"}  # fmt: skip


@pytest.mark.soak
def test_a_gguf_adapter_has_the_values_of_peft_files(tmp_path: Path) -> None:
    """The truth reads PEFT's files, our ranks read the same adapter as llama.cpp's converter writes it."""
    model, whole = make_tiny(tmp_path, "llama", seed=7), tiny_model("llama", seed=7)
    heads = {"attn_q": whole.config.num_attention_heads, "attn_k": whole.config.num_key_value_heads}
    peft = write_peft(tmp_path / "adapter", whole, updates=in_layers, lora_alpha=6)
    case = VerifyCase(model, tmp_path / "verify", block_size=16, adapter=peft)
    converted: dict[str, torch.Tensor] = {}
    for name, half in load_file(peft / "adapter_model.safetensors").items():
        _, _, _, _, layer, module, part, kind, _ = name.split(".")
        stored, rows = GGUF[f"{module}.{part}"], half
        if kind == "lora_B" and stored in heads:
            rows = permuted(half, heads[stored])
        converted[f"blk.{layer}.{stored}.weight.{kind.lower()}"] = rows
    file = write_gguf(tmp_path / "adapter.gguf", "llama", converted)
    replace(case.request, adapter=str(file)).write(case.folder)
    for size in (1, 2):
        comparison, causes = case.run(size)
        assert comparison.ok, (comparison.first_fault, causes)
