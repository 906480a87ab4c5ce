"""Families whose layers differ: the sublayers of each layer, and the settings that are refused by name."""

from typing import Any

import pytest

from oarlock.base.errors import StartupError
from oarlock.workers.checks.limits import check_parallel
from oarlock.workers.config import WorkerConfig
from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.memory_spec import PagesSpec, SlotsSpec
from oarlock.workers.layers.short_convolution_spec import ShortConvolutionSpec
from oarlock.workers.models.registry import describe

SHAPE = {
    "vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 16, "sliding_window": 16, "num_experts_per_tok": 2, "max_position_embeddings":
    1024,
}  # fmt: skip
GEMMA4 = {**SHAPE, "architectures": ["Gemma4ForCausalLM"], "global_head_dim": 32,
          "layer_types": ["sliding_attention", "full_attention"] * 3}  # fmt: skip
LAGUNA = {**SHAPE, "architectures": ["LagunaForCausalLM"], "num_experts": 4}
MIMO = {**SHAPE, "architectures": ["MiMoV2FlashForCausalLM"], "n_routed_experts": 4, "head_dim": 24}
LFM2 = {**SHAPE, "architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "full_attention", "conv"] * 2}


def attentions(config: dict[str, Any]) -> list[SelfAttentionSpec]:
    found = [layer.attention for layer in describe(config).layers]
    return [one for one in found if one is not None]


def test_the_last_layers_of_gemma_4_read_the_pages_of_the_last_of_their_kind() -> None:
    shared = {**GEMMA4, "num_kv_shared_layers": 3, "use_double_wide_mlp": True}
    assert [one.of_layer for one in attentions(shared)] == [None, None, None, 1, 2, 1]
    spec = describe(shared)
    assert [layer.mlp.intermediate_size for layer in spec.layers] == [96] * 3 + [192] * 3
    pages = [PagesSpec(4, 16, 16, 16), PagesSpec(4, 32, 32)]
    assert [(group.memory, group.layers) for group in spec.groups] == [(pages[0], (0, 2)), (pages[1], (1,))]
    assert spec.names.rename("model.layers.4.self_attn.k_proj.weight") is None
    assert spec.names.rename("model.layers.2.self_attn.k_proj.weight") is not None


def test_full_attention_of_gemma_4_has_heads_of_its_own() -> None:
    keys = {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 2}
    found = attentions(keys)
    assert [(one.num_kv_heads, one.head_dim, one.keys_are_values) for one in found[:2]] == [
        (4, 16, False),
        (2, 32, True),
    ]
    written = {"1": {"head_dim": 32, "num_key_value_heads": 2}, "3": {"head_dim": 64}}
    each = attentions({**GEMMA4, "per_layer_config": written})
    assert [(one.num_kv_heads, one.head_dim) for one in each[:4]] == [(4, 16), (2, 32), (4, 16), (4, 64)]
    padded = {key.zfill(2): settings for key, settings in written.items()}
    assert attentions({**GEMMA4, "per_layer_config": padded}) == each, "as transformers writes numbers of layers"
    assert attentions({**GEMMA4, "layer_types": ["sliding_attention"] * 6})[-1].window is None, "as in transformers"


def test_heads_of_laguna_and_mimo_differ_between_layers() -> None:
    counts = [8, 16, 4, 8, 8, 8]
    found = attentions({**LAGUNA, "num_attention_heads_per_layer": counts})
    assert [one.num_heads for one in found] == counts and all(one.gate_per_head for one in found)
    found = attentions({**MIMO, "sliding_window_size": 20})
    assert [one.window for one in found] == [None, 21, 21, 21, 21, None]
    assert [one.num_kv_heads for one in found] == [4, 8, 8, 8, 8, 4]
    assert {(one.head_dim, one.value_width, one.rope.rotary_dim) for one in found if one.rope} == {(24, 128, 8)}


def test_mimo_is_described_by_the_settings_of_its_authors_too() -> None:
    theirs = {
        "rope_theta": 5_000_000, "swa_rope_theta": 10_000, "partial_rotary_factor": 0.334,
        "moe_layer_freq": [0, 1, 1, 1, 1, 1], "hybrid_layer_pattern": [0, 1, 1, 1, 1, 0], "layernorm_epsilon": 1e-5,
        "routed_scaling_factor": None, "swa_num_key_value_heads": 8, "swa_head_dim": 24, "n_shared_experts": None,
        "scoring_func": "sigmoid",
    }  # fmt: skip
    assert describe({**MIMO, **theirs}) == describe(MIMO)


def test_lfm2_has_a_group_of_slots_and_one_of_pages() -> None:
    slots, pages = describe(LFM2).groups
    assert isinstance(slots.memory, SlotsSpec) and slots.layers == (0, 2, 3, 5)
    assert slots.memory.parts[0].shape_of_rank(2) == (32, 2) and not slots.memory.parts[0].is_float32
    assert pages.layers == (1, 4)
    wide = describe({**LFM2, "intermediate_size": 100, "block_multiple_of": 16, "block_ffn_dim_multiplier": 1.5})
    assert wide.layers[0].mlp.intermediate_size == 112  # 16 * ceil(int(1.5 * int(2 * 100 / 3)) / 16)
    assert ShortConvolutionSpec(64, 3).divides(8)


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (GEMMA4, {"num_kv_shared_layers": 5}, "num_kv_shared_layers = 5"),
        (GEMMA4, {"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all'"),
        (GEMMA4, {"enable_moe_block": True}, "num_experts = None"),
        (GEMMA4, {"per_layer_config": {"1": {"num_attention_heads": 4}}}, "per_layer_config of layer 1"),
        (GEMMA4, {"per_layer_config": {"6": {"head_dim": 32}}}, "per_layer_config of layer 6"),
        (GEMMA4, {"per_layer_config": {"1": {}, "01": {"head_dim": 32}}}, "per_layer_config of layer 01"),
        (GEMMA4, {"per_layer_config": {"full_attention": {}}}, "per_layer_config of layer full_attention"),
        (GEMMA4, {"vocab_size_per_layer_input": 99}, "vocab_size_per_layer_input must be at least vocab_size 100"),
        (GEMMA4, {"hidden_activation": "silu"}, "hidden_activation = 'silu'"),
        (LAGUNA, {"num_attention_heads_per_layer": [8] * 5}, "num_attention_heads_per_layer"),
        (LAGUNA, {"moe_router_logit_softcapping": 30.0}, "moe_router_logit_softcapping = 30.0"),
        (LAGUNA, {"gating": "per-token"}, "gating = 'per-token'"),
        (MIMO, {"hybrid_layer_pattern": [0] * 6}, "hybrid_layer_pattern"),
        (MIMO, {"swa_num_key_value_heads": 4}, "swa_num_key_value_heads = 4"),
        (MIMO, {"rope_theta": 10_000.0}, "rope_theta = 10000.0"),
        (MIMO, {"swa_rope_theta": 5e4}, "swa_rope_theta = 50000.0"),
        (MIMO, {"partial_rotary_factor": 1.0}, "partial_rotary_factor = 1.0"),
        (MIMO, {"moe_layer_freq": [1] * 6}, "moe_layer_freq"),
        (LFM2, {"architectures": ["Lfm3ForCausalLM"], "layer_types": ["conv"] * 6}, "layer_types"),
        (LFM2, {"conv_dim": 32}, "conv_dim = 32"),
        (LFM2, {"block_use_swiglu": False}, "block_use_swiglu = False"),
    ],
)
def test_other_settings_are_refused_by_name(base: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError) as refused:
        describe({**base, **change})
    assert message in refused.value.cause and refused.value.fix


def test_stages_that_would_need_the_inputs_of_layers_are_refused() -> None:
    config = WorkerConfig("x", device="cpu", pipeline_parallel_size=2)
    with pytest.raises(StartupError, match="the first stage computes inputs of every layer"):
        check_parallel(config, describe(GEMMA4))
    check_parallel(config, describe({**GEMMA4, "hidden_size_per_layer_input": 0}))
