"""GGUF adapters: B in llama.cpp's order of rows and A in its order of columns give the updates of PEFT's files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.workers.lora.adapter_file import Adapter
from tests.unit.workers.lora.adapter_cases import spec_of, updates

RANDOM = torch.Generator().manual_seed(5)


def write(path: Path, arch: str, tensors: Mapping[str, Tensor], **settings: Any) -> Path:
    """Write a GGUF adapter of alpha 6. `settings`: further or other settings, under names in which `__` is a dot."""
    writer = gguf.GGUFWriter(path, arch)
    named = {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": 6.0}
    for key, value in (named | {key.replace("__", "."): value for key, value in settings.items()}).items():
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def pair(outputs: int, inputs: int, rank: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(rank, inputs, generator=RANDOM), torch.randn(outputs, rank, generator=RANDOM)


def named(name: str, a: Tensor, b: Tensor) -> dict[str, Tensor]:
    return {f"{name}.weight.lora_a": a, f"{name}.weight.lora_b": b}


def permuted(b: Tensor, heads: int) -> Tensor:
    """Reorder rows as llama.cpp's converter does for heads whose neighbours are rotated."""
    return b.view(heads, 2, b.shape[0] // heads // 2, -1).transpose(1, 2).reshape(b.shape)


def tiled(lines: Tensor, outer: int, inner: int) -> Tensor:
    """Reorder rows: the first block of each of `outer` groups, then the second of each, and so on."""
    return lines.view(outer, inner, -1, lines.shape[1]).transpose(0, 1).reshape(lines.shape)


def test_rows_of_heads_are_in_the_order_of_the_model(tmp_path: Path) -> None:
    spec = spec_of("LlamaForCausalLM", head_dim=4)
    sizes = {"q_proj": (16, 8), "k_proj": (8, 8), "v_proj": (8, 8), "o_proj": (8, 16)}
    pairs = {f"self_attn.{part}": pair(*size) for part, size in sizes.items()} | {"mlp.up_proj": pair(12, 8)}
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "up_proj": "ffn_up"}
    stored: dict[str, Tensor] = {}
    for module, (a, b) in pairs.items():
        heads = {"q_proj": 4, "k_proj": 2}.get(module.rpartition(".")[2])
        stored |= named(f"blk.1.{names[module.rpartition('.')[2]]}", a, b if heads is None else permuted(b, heads))
    table, head = pair(8, 20, 3), pair(20, 8)
    stored |= named("token_embd", table[0].T, table[1]) | named("output", *head)
    write(tmp_path / "adapter.gguf", "llama", stored)
    for place in (tmp_path, tmp_path / "adapter.gguf"):
        adapter = Adapter.open(place, spec)
        found = updates(adapter)
        assert len(found) == 7 and adapter.max_rank == 3
        for module, (a, b) in pairs.items():
            torch.testing.assert_close(found[f"model.layers.1.{module}"], 3 * b @ a)
        torch.testing.assert_close(found["model.embed_tokens"], 2 * table[1] @ table[0])
        torch.testing.assert_close(found["lm_head"], 3 * head[1] @ head[0])


def test_fused_and_separate_modules_have_the_same_name(tmp_path: Path) -> None:
    qkv, both = pair(16, 8), pair(24, 8)
    path = write(tmp_path / "a.gguf", "phi3", named("blk.0.attn_qkv", *qkv) | named("blk.0.ffn_up", *both))
    found = updates(Adapter.open(path, spec_of("Phi3ForCausalLM")))
    parts = (3 * qkv[1] @ qkv[0]).split((8, 4, 4))
    for part, update in zip("qkv", parts, strict=True):
        torch.testing.assert_close(found[f"model.layers.0.self_attn.{part}_proj"], update)
    for part, update in zip(("gate", "up"), (3 * both[1] @ both[0]).chunk(2), strict=True):
        torch.testing.assert_close(found[f"model.layers.0.mlp.{part}_proj"], update)
    write(path, "phi3", named("blk.0.attn_qkv", *qkv) | named("blk.0.attn_q", *pair(8, 8)))
    with pytest.raises(StartupError, match=r"attn_q\.weight\.lora_a' adapts .*q_proj, which .*attn_qkv\..* already"):
        Adapter.open(path, spec_of("Phi3ForCausalLM"))


def test_stacked_experts_and_an_alpha_of_zero(tmp_path: Path) -> None:
    a, b = torch.randn(3, 2, 8, generator=RANDOM), torch.randn(3, 12, 2, generator=RANDOM)
    stored = named("blk.1.ffn_gate_exps", a, b)
    path = write(tmp_path / "a.gguf", "llama", stored, adapter__lora__alpha=0.0)
    adapter = Adapter.open(path, spec_of("MixtralForCausalLM"))
    assert [pair.expert for pair in adapter.pairs] == [0, 1, 2] and adapter.num_bytes == 4 * (a.numel() + b.numel())
    for expert in range(3):
        update = updates(adapter)[f"model.layers.1.mlp.experts.{expert}.gate_proj"]
        torch.testing.assert_close(update, b[expert] @ a[expert])  # llama.cpp scales only by an alpha


def test_value_heads_of_a_gated_delta_net_are_in_the_order_of_the_model(tmp_path: Path) -> None:
    qkv, out, query = pair(32, 8), pair(8, 20), pair(32, 8)
    tiles = torch.cat((qkv[1][:12], tiled(qkv[1][12:], 2, 2)))
    stored = named("blk.1.attn_qkv", qkv[0], tiles) | named("blk.3.attn_q", *query)
    stored |= named("blk.1.ssm_out", tiled(out[0].T, 2, 2).T, out[1])
    found = updates(Adapter.open(write(tmp_path / "a.gguf", "qwen35", stored), spec_of("Qwen3_5ForCausalLM")))
    linear, attention = "model.layers.1.linear_attn", "model.layers.3.self_attn"
    for part, update in zip("qkv", (3 * qkv[1] @ qkv[0]).split((6, 6, 20)), strict=True):
        torch.testing.assert_close(found[f"{linear}.in_proj_{part}"], update)
    torch.testing.assert_close(found[f"{linear}.out_proj"], 3 * out[1] @ out[0])
    halves = (3 * query[1] @ query[0]).view(4, 8, 8).split(4, 1)
    for part, update in zip(("q_proj", "gate_proj"), halves, strict=True):
        torch.testing.assert_close(found[f"{attention}.{part}"], update.reshape(16, 8))


UP = named("blk.1.ffn_up", *pair(12, 8))


@pytest.mark.parametrize(("arch", "stored", "settings", "message"), [
    ("llama", UP, {"general__type": "model"}, "general.type is 'model', and must be 'adapter'"),
    ("llama", UP, {"adapter__type": "control"}, "adapter.type is 'control'"),
    ("llama", UP, {"adapter__alora__invocation_tokens": [1, 2]}, "alora.invocation_tokens is not supported"),
    ("llama", UP, {"adapter__lora__alpha": float("inf")}, "adapter.lora.alpha is inf"),
    ("nothing", UP, {}, "architecture 'nothing' is not supported"),
    ("qwen2", UP, {}, "architecture qwen2, and LlamaForCausalLM is llama"),
    ("llama", UP | {"blk.1.ffn_norm.weight": torch.ones(8)}, {}, "'blk.1.ffn_norm.weight' is not a half"),
    ("llama", dict([*UP.items()][:1]), {}, "ffn_up.weight.lora_a' without its other half"),
    ("llama", named("blk.2.ffn_up", *pair(12, 8)), {}, "'blk.2.ffn_up.weight.lora_a' fits nowhere"),
    ("llama", named("blk.1.ffn_up", *pair(13, 8)), {}, r"fits nowhere: .* lora_b of shape \[13, 2\]"),
    ("llama", named("blk.1.ffn_up", *pair(12, 9)), {}, r"lora_a' has shape \[2, 9\], but .* imply \[2, 8\]"),
    ("llama", named("blk.1.ffn_up", pair(12, 8, 3)[0], UP["blk.1.ffn_up.weight.lora_b"]), {}, r"imply \[2, 8\]"),
])  # fmt: skip
def test_refusals_name_the_setting_or_the_tensor(
    tmp_path: Path, arch: str, stored: dict[str, Tensor], settings: dict[str, Any], message: str
) -> None:
    write(tmp_path / "a.gguf", arch, stored, **settings)
    with pytest.raises(StartupError, match=message):
        Adapter.open(tmp_path, spec_of("LlamaForCausalLM"))


def test_a_matrix_that_the_converter_transposes_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.gguf", "gpt2", named("blk.0.attn_output", *pair(8, 8)))
    with pytest.raises(StartupError, match="converter transposes"):
        Adapter.open(tmp_path, spec_of("GPT2LMHeadModel"))
