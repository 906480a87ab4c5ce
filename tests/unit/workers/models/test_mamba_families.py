"""Published configs of models with Mamba 2: their sizes and layers, and settings that are refused."""

import math
from typing import Any

import pytest

from oarlock.base.errors import StartupError
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.mamba2_spec import Mamba2Spec
from oarlock.workers.models.registry import describe

BAMBA: dict[str, Any] = {
    "architectures": ["BambaForCausalLM"], "attn_layer_indices": [9, 18, 27], "attn_rotary_emb": 64, "hidden_act":
    "silu", "hidden_size": 4096, "intermediate_size": 14336, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand":
    2, "mamba_n_groups": 1, "mamba_n_heads": 128, "max_position_embeddings": 4096, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "partial_rotary_factor": 0.5, "vocab_size": 128256,
}  # fmt: skip
FALCON: dict[str, Any] = {
    "architectures": ["FalconH1ForCausalLM"], "attention_out_multiplier": 0.9375, "embedding_multiplier": 5.656854,
    "head_dim": 128, "hidden_size": 2048, "intermediate_size": 4096, "key_multiplier": 0.5, "lm_head_multiplier":
    0.0390625, "mamba_d_head": 64, "mamba_d_ssm": 3072, "mamba_d_state": 256, "mamba_n_groups": 1, "mamba_n_heads": 48,
    "mamba_norm_before_gate": False, "mamba_rms_norm": False, "mlp_multipliers": [0.883883, 0.5859375],
    "num_attention_heads": 8, "num_hidden_layers": 24, "num_key_value_heads": 2, "rope_theta": 1e11,
    "ssm_in_multiplier": 1.25, "ssm_multipliers": [0.353553, 0.25, 0.353553, 0.5, 0.353553], "vocab_size": 65537,
}  # fmt: skip
GRANITE: dict[str, Any] = {
    "architectures": ["GraniteMoeHybridForCausalLM"], "attention_multiplier": 0.0078125, "embedding_multiplier": 12,
    "hidden_size": 1536, "intermediate_size": 512, "layer_types": [
        "attention" if layer % 10 == 5 else "mamba" for layer in range(40)], "logits_scaling": 6, "mamba_d_head": 64,
    "mamba_d_state": 128, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 48, "num_attention_heads": 12,
    "num_experts_per_tok": 6, "num_hidden_layers": 40, "num_key_value_heads": 4, "num_local_experts": 64,
    "position_embedding_type": "nope", "residual_multiplier": 0.22, "shared_intermediate_size": 1024,
    "tie_word_embeddings": True, "vocab_size": 100352,
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "head_dim": 128, "hidden_size": 2688, "hybrid_override_pattern":
    "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "intermediate_size": 1856, "mamba_head_dim": 64,
    "mamba_num_heads": 64, "mlp_hidden_act": "relu2", "moe_intermediate_size": 1856, "moe_latent_size": None,
    "moe_shared_expert_intermediate_size": 3712, "n_groups": 8, "n_routed_experts": 128, "num_attention_heads": 32,
    "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2, "partial_rotary_factor": 1.0,
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "sliding_window": None, "ssm_state_size": 128,
    "time_step_limit": [0.0, math.inf], "time_step_min": 0.001, "vocab_size": 131072,
}  # fmt: skip
CODESTRAL: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"], "conv_kernel": 4, "expand": 2, "head_dim": 64, "hidden_size": 4096,
    "n_groups": 8, "norm_before_gate": True, "num_heads": 128, "num_hidden_layers": 64, "rms_norm": True,
    "state_size": 128, "time_step_limit": [0.0, math.inf], "vocab_size": 32768,
}  # fmt: skip


def mamba_layers(spec: DecoderSpec) -> int:
    return sum(any(isinstance(branch.sublayer, Mamba2Spec) for branch in layer.branches) for layer in spec.layers)


@pytest.mark.parametrize(
    ("config", "parameters", "mambas", "attentions"),
    [(BAMBA, 9.780e9, 29, 3), (FALCON, 1.479e9, 24, 24), (GRANITE, 6.939e9, 36, 4), (NEMOTRON, 31.578e9, 23, 6),
     (CODESTRAL, 7.285e9, 64, 0)],
    ids=["bamba-9b", "falcon-h1-1.5b", "granite-4-h-tiny", "nemotron-3-nano", "codestral-mamba"],
)  # fmt: skip
def test_published_models(config: dict[str, Any], parameters: float, mambas: int, attentions: int) -> None:
    spec = describe(config)
    assert spec.num_parameters == pytest.approx(parameters, rel=1e-3)
    assert mamba_layers(spec) == mambas
    assert sum(layer.attention is not None for layer in spec.layers) == attentions


def test_a_part_of_each_head_is_rotated_in_bamba() -> None:
    """transformers reads the part only from the rotary table: outside of it, any other value has no effect."""
    assert {one.rope.rotary_dim for one in describe(BAMBA).attentions if one.rope} == {64}
    table = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}
    inside = describe({**BAMBA, "rope_parameters": table, "attn_rotary_emb": 32})
    assert {one.rope.rotary_dim for one in inside.attentions if one.rope} == {32}


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (BAMBA, {"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25"),
        (BAMBA, {"attn_rotary_emb": 128}, "attn_rotary_emb = 128"),
        (BAMBA, {"mamba_d_head": 32}, "128 heads of 32 do not fill the 8192 values of Mamba"),
        (FALCON, {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers"),
        (FALCON, {"mlp_bias": True}, "mlp_bias"),
        (GRANITE, {"position_embedding_type": "alibi"}, "position_embedding_type = 'alibi'"),
        (NEMOTRON, {"moe_latent_size": 1024}, "moe_latent_size = 1024"),
        (NEMOTRON, {"hybrid_override_pattern": "MX"}, "hybrid_override_pattern = 'MX'"),
        (CODESTRAL, {"time_step_limit": [0.5]}, "time_step_limit"),
    ],
)
def test_settings_that_are_refused(base: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError) as refused:
        describe({**base, **change})
    assert message in refused.value.cause and refused.value.fix
