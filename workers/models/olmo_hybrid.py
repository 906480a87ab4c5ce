"""OLMo Hybrid: a gated delta net in most layers, whose sublayers have norms before them; others are as in OLMo 3.
Torch-free."""

from dataclasses import replace

from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import Norms, decoder_spec, with_first
from oarlock.workers.models.hf_delta import delta_layers, gated_delta
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported

_POSITIONS, _DELTA = 65536, "model.layers.*.linear_attn"
_AFTER: Norms = ((None, "post_attention_layernorm"), (None, "post_feedforward_layernorm"))
_BEFORE = ("input_layernorm", "post_attention_layernorm")
_GATED_NORM = 1e-5  # its epsilon, whatever `rms_norm_eps` is
_PROJECTIONS = {
    "q_proj": "in_proj_q", "k_proj": "in_proj_k", "v_proj": "in_proj_v", "g_proj": "in_proj_z", "b_proj": "in_proj_b",
    "a_proj": "in_proj_a", "o_proj": "out_proj", "o_norm": "norm",
}  # fmt: skip
_NAMES = TensorNames(
    modules={
        # Published checkpoints have other names of norms than transformers, whose names are the same for both kinds.
        "model.layers.*.attention_layer_norm": "model.layers.*.input_layernorm",
        "model.layers.*.feedforward_layer_norm": "model.layers.*.post_attention_layernorm",
        **{f"{_DELTA}.{theirs}": f"{_DELTA}.{ours}" for theirs, ours in _PROJECTIONS.items()},
    }
)


def describe_olmo_hybrid(fields: Fields) -> DecoderSpec:
    """Describe OLMo Hybrid. Published models have null as `rope_theta`: their attention is not rotated."""
    bias, heads = fields.flag("attention_bias", False), fields.count("num_attention_heads")
    keys = fields.count("linear_num_key_heads", heads)
    width = max(1, int(0.75 * fields.count("hidden_size") / keys))
    widths = width, 2 * fields.count("linear_key_head_dim", width)
    doubles = fields.flag("linear_allow_neg_eigval", True)
    delta = gated_delta(fields, (heads, heads), widths, _GATED_NORM, doubles_beta=doubles)
    layers = fields.layers()
    is_delta = delta_layers(fields, min(4, layers))
    if all(not one for one in is_delta):
        raise unsupported("layer_types", fields.raw.get("layer_types"), "At least one must be linear_attention.")
    spec = decoder_spec(
        fields,
        kv_heads=None,
        head_dim=None,
        max_positions=_POSITIONS,
        windows=(None,) * layers,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm="row",
        norms=_AFTER,
    )
    if not _is_rotated(fields):
        spec = spec.with_sublayers(lambda one: replace(one, rope=None) if isinstance(one, SelfAttentionSpec) else one)
    return replace(with_first(spec, delta, is_delta, _BEFORE), names=_NAMES)


def _is_rotated(fields: Fields) -> bool:
    """Return whether attention is rotated, as in transformers: it is not if `rope_theta` is null."""
    inner = fields.raw.get("rope_scaling") or fields.raw.get("rope_parameters")
    for table in (inner if isinstance(inner, dict) else {}, fields.raw):
        if "rope_theta" in table:
            return table["rope_theta"] is not None
    return True


FAMILIES: dict[str, Describe] = {
    "OlmoHybridForCausalLM": describe_olmo_hybrid,
}
