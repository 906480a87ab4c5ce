"""Published configs of models with gated delta nets: their layers, memory and sizes, and settings that are refused."""

from typing import Any

import pytest

from oarlock.base.errors import StartupError
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.gated_delta_spec import GatedDeltaSpec
from oarlock.workers.layers.memory_spec import PagesSpec, SlotsSpec
from oarlock.workers.models.registry import describe

_ROPE = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
_SECTIONS = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
_DELTA = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
          "linear_num_key_heads": 16}  # fmt: skip
QWEN_TEXT: dict[str, Any] = {
    **_DELTA, "linear_num_value_heads": 16, "attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16",
    "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 1024, "intermediate_size": 3584,
    "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
    "num_attention_heads": 8, "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "vocab_size": 248320, "mamba_ssm_dtype": "float32", "rope_parameters": {**_ROPE, **_SECTIONS},
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "tie_word_embeddings": True,
    "text_config": QWEN_TEXT, "vision_config": {},
}  # fmt: skip
NEXT = {
    **_DELTA, "architectures": ["Qwen3NextForCausalLM"], "linear_num_value_heads": 32, "decoder_sparse_step": 1,
    "head_dim": 256, "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10, "num_hidden_layers": 48,
    "num_key_value_heads": 2, "partial_rotary_factor": 0.25, "rope_theta": 1e7, "rope_scaling": None,
    "shared_expert_intermediate_size": 512, "vocab_size": 151936, "max_position_embeddings": 262144,
}  # fmt: skip
OLMO = {
    "architectures": ["OlmoHybridForCausalLM"], "hidden_size": 3840, "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30, "vocab_size": 100352, "max_position_embeddings": 65536,
    "rope_parameters": {"rope_theta": None, "rope_type": "default"},
}  # fmt: skip


def delta_of(spec: DecoderSpec) -> GatedDeltaSpec:
    first = spec.layers[0].branches[0].sublayer
    assert isinstance(first, GatedDeltaSpec)
    return first


@pytest.mark.parametrize(
    ("config", "parameters", "attentions", "tp_sizes"),
    [(QWEN, 0.75e9, 6, [1, 2, 4, 8]), (NEXT, 79.7e9, 12, [1, 2, 4, 8, 16]), (OLMO, 7.4e9, 8, [1, 2])],
    ids=["qwen3.5-0.8b", "qwen3-next-80b", "olmo-hybrid-7b"],
)
def test_published_models(config: dict[str, Any], parameters: float, attentions: int, tp_sizes: list[int]) -> None:
    spec = describe(config)
    assert spec.num_parameters == pytest.approx(parameters, rel=0.02)
    assert sum(layer.attention is not None for layer in spec.layers) == attentions
    assert all(isinstance(layer.branches[0].sublayer, GatedDeltaSpec) for layer in spec.layers[:3])
    assert spec.layers[3].attention is not None
    assert spec.tp_sizes[: len(tp_sizes)] == tp_sizes
    slots, pages = spec.groups
    assert isinstance(slots.memory, SlotsSpec) and isinstance(pages.memory, PagesSpec)
    assert len(slots.layers) + len(pages.layers) == spec.num_layers


def test_the_state_of_qwen_3_5() -> None:
    """A float32 matrix for each head, and three inputs of the convolution in the dtype of the model."""
    memory = delta_of(describe(QWEN)).memory
    assert memory.bytes_of_rank(1, "bfloat16") == 16 * 128 * 128 * 4 + 3 * 3 * 2048 * 2
    assert 4 * memory.bytes_of_rank(4, "bfloat16") == memory.bytes_of_rank(1, "bfloat16")


def test_sections_of_positions_and_a_part_of_each_head() -> None:
    attention = describe(QWEN).attentions[0]
    assert attention.output_gate and attention.rope is not None
    assert (attention.rope.kind, attention.rope.rotary_dim, attention.rope.theta) == ("default", 64, 1e7)
    assert describe({**QWEN_TEXT, "architectures": ["Qwen3_5ForCausalLM"]}).attentions[0] == attention


def test_olmo_hybrid_norms_before_gated_delta_nets_and_after_attention() -> None:
    spec = describe(OLMO)
    norms = [[(branch.norm, branch.post_norm) for branch in layer.branches] for layer in spec.layers[2:4]]
    assert norms == [
        [("input_layernorm", None), ("post_attention_layernorm", None)],
        [(None, "post_attention_layernorm"), (None, "post_feedforward_layernorm")],
    ]
    assert all(one.rope is None for one in spec.attentions)
    delta = delta_of(spec)
    assert (delta.key_width, delta.value_width, delta.eps, delta.doubles_beta) == (96, 192, 1e-5, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act"),
        ({"linear_num_value_heads": 24}, "24 value heads cannot share 16 key heads"),
        ({"layer_types": ["linear_attention"] * 24}, "layer_types"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim"),
    ],
)
def test_settings_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        describe({**QWEN, "text_config": {**QWEN_TEXT, **change}})
