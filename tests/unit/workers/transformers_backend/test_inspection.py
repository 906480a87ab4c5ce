"""One look at a class without weights: its memory and tensors, or the reason why it is refused."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from oarlock.workers.transformers_backend.class_description import ClassDescription
from oarlock.workers.transformers_backend.inspection import describe_class
from oarlock.workers.transformers_backend.observers import register

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
}  # fmt: skip


def look(model_type: str, architecture: str, **settings: Any) -> ClassDescription:
    register()
    config = CONFIG_MAPPING[model_type](**{**SIZES, **settings})
    config.architectures = [architecture]
    found = describe_class(config)
    assert ClassDescription.decoded(found.encoded()) == found
    return found


def test_a_plain_class() -> None:
    found = look("llama", "LlamaForCausalLM")
    assert found.refusal is None and found.layers == 4 and found.has_plan and not found.states
    first = found.attention[0]
    assert (first.heads, first.kv_heads, first.key_width, first.value_width) == (4, 2, 16, 16)
    assert (first.module, first.window, first.has_sinks) == ("model.layers.0.self_attn", None, False)
    query = next(tensor for tensor in found.tensors if tensor.name == "model.layers.3.self_attn.q_proj.weight")
    assert query.shape == (64, 64) and query.role == "linear" and query.style == "colwise"


def test_windows_and_sinks() -> None:
    found = look("gpt_oss", "GptOssForCausalLM", num_local_experts=4, num_experts_per_tok=2, sliding_window=128)
    assert [call.window for call in found.attention] == [128, None, 128, None]
    assert all(call.has_sinks for call in found.attention)


def test_recurrent_states() -> None:
    kinds = ["linear_attention", "full_attention"] * 2
    found = look("qwen3_5_text", "Qwen3_5ForCausalLM", layer_types=kinds)
    assert [call.layer for call in found.attention] == [1, 3]
    assert [(one.layer, one.is_convolution) for one in found.states] == [(0, True), (0, False), (2, True), (2, False)]
    assert found.states[0].shape[-1] == 4 and found.states[1].dtype == "float32"


@pytest.mark.parametrize(
    ("model_type", "architecture", "settings", "reason"),
    [
        ("llama4_text", "Llama4ForCausalLM", {"num_local_experts": 2}, "its mask"),
        ("minimax_m3_vl_text", "MiniMaxM3VLTextForCausalLM", {}, ""),
        ("bart", "BartForCausalLM", {}, "it counts positions by itself"),
        ("mamba", "MambaForCausalLM", {}, "it counts positions by itself"),
        ("rwkv", "RwkvForCausalLM", {}, "it counts positions by itself"),
        ("doge", "DogeForCausalLM", {}, "its mask is changed by the class"),
        ("diffllama", "DiffLlamaForCausalLM", {}, "layer 0 has two attentions"),
        ("gptj", "GPTJForCausalLM", {}, "its attention cannot be replaced"),
        ("llama", "LlamaForTokenClassification", {}, "transformers has no such class that completes text"),
    ],
)
def test_refusals(model_type: str, architecture: str, settings: dict[str, Any], reason: str) -> None:
    found = look(model_type, architecture, **settings)
    assert found.refusal is not None and found.refusal.startswith(reason)
