"""Bamba: Mamba 2 in most layers, attention with half-rotated heads in some, and a gated MLP in each. Torch-free."""

from dataclasses import replace

from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.tensor_names import TensorNames
from oarlock.workers.models.hf_config import Norms, decoder_spec, usual_rope, with_first
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported
from oarlock.workers.models.hf_mamba import bamba_mixer

_POSITIONS, _SHARE = 262144, 0.5  # share: the part of each head that is rotated
NORMS: Norms = (("input_layernorm", None), ("pre_ff_layernorm", None))
NAMES = TensorNames(
    modules={
        "model.layers.*.feed_forward": "model.layers.*.mlp",
        "model.final_layernorm": "model.norm",
    }
)


def describe_bamba(fields: Fields) -> DecoderSpec:
    bias, layers = fields.flag("attention_bias", False), fields.layers()
    chosen = fields.raw.get("attn_layer_indices") or []
    if not isinstance(chosen, list) or not all(type(index) is int and 0 <= index < layers for index in chosen):
        raise unsupported("attn_layer_indices", chosen, f"A list of numbers of its {layers} layers.")
    # Outside of the rotary table transformers replaces any other value by this one.
    fields.check_value("partial_rotary_factor", _SHARE)
    rope = usual_rope(fields, None, _POSITIONS, share=_SHARE)
    fields.check_value("attn_rotary_emb", rope.rotary_dim)  # the authors' name
    spec = decoder_spec(
        fields,
        kv_heads=8,
        head_dim=None,
        max_positions=_POSITIONS,
        windows=(None,) * layers,
        rope=rope,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        norms=NORMS,
        eps=1e-5,
    )
    mamba = bamba_mixer(fields, spec.norm.eps)
    return replace(with_first(spec, mamba, [index not in chosen for index in range(layers)]), names=NAMES)


FAMILIES: dict[str, Describe] = {
    "BambaForCausalLM": describe_bamba,
}
