"""Falcon-H1: attention and Mamba 2 side by side behind one norm, then a gated MLP; a multiplier for each. Torch-free.

Multipliers become factors of scores, of branches, of the norm that a branch reads and of Mamba's projections, so that
no result is rounded once more for them.
"""

from dataclasses import replace
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import BranchSpec, DecoderSpec, LayerSpec
from oarlock.workers.layers.gated_mlp_spec import GatedMLPSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.bamba import NAMES, NORMS
from oarlock.workers.models.hf_config import decoder_spec
from oarlock.workers.models.hf_fields import Describe, Fields, positive_number, unsupported
from oarlock.workers.models.hf_mamba import bamba_mixer, gguf_bamba_mixer, gguf_mixer


def describe_falcon_h1(fields: Fields) -> DecoderSpec:
    bias = fields.flag("attention_bias", False)
    gate, down = _multipliers(fields, "mlp_multipliers", 2)
    if gate != 1.0:
        fields.check_value("mlp_bias", False)  # a bias of the gate would be scaled, and one of up not
    spec = decoder_spec(
        fields,
        kv_heads=8,
        head_dim=None,
        max_positions=8192,
        windows=(None,) * fields.layers(),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        norms=NORMS,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=fields.number("lm_head_multiplier", 1.0),
        eps=1e-5,
    )
    width = fields.count("mamba_d_ssm", 1024) if fields.raw.get("mamba_d_ssm", 1024) is not None else None
    mamba = bamba_mixer(fields, spec.norm.eps, width=width, output_bias=fields.flag("projectors_bias", False))
    factors = _multipliers(fields, "ssm_multipliers", 5)
    mamba = replace(
        mamba,
        eps=mamba.eps if fields.flag("mamba_rms_norm", False) else None,
        gates_first=not fields.flag("mamba_norm_before_gate", True),
        scales=(factors[0], factors[1], factors[2], factors[3], factors[4]),
    )
    keys = fields.number("key_multiplier", 1.0)
    out_scales = fields.number("attention_out_multiplier", 1.0), fields.number("ssm_out_multiplier", 1.0)
    in_scales = fields.number("attention_in_multiplier", 1.0), fields.number("ssm_in_multiplier", 1.0)

    def layer(old: LayerSpec) -> LayerSpec:
        """Return a layer of two stages: attention and Mamba, then the MLP."""
        attention, mlp = (branch.sublayer for branch in old.branches)
        assert isinstance(attention, SelfAttentionSpec) and isinstance(mlp, GatedMLPSpec)
        (norm, _), (mlp_norm, _) = NORMS
        branches = (
            BranchSpec(replace(attention, key_scale=keys), norm, None, out_scales[0], in_scales[0]),
            BranchSpec(mamba, norm, None, out_scales[1], in_scales[1]),
            BranchSpec(replace(mlp, gate_scale=gate), mlp_norm, None, down / gate, gate),
        )
        return LayerSpec(branches, (2, 1))

    layers = {old: layer(old) for old in dict.fromkeys(spec.layers)}
    return replace(spec, layers=tuple(layers[old] for old in spec.layers), names=NAMES)


def _multipliers(fields: Fields, key: str, count: int) -> list[float]:
    """Return the list of `count` numbers at `key`; by default all are 1."""
    found: Any = fields.raw.get(key)
    if found is None:
        return [1.0] * count
    if not isinstance(found, list) or len(found) != count:
        raise unsupported(key, found, f"A list of {count} numbers.")
    return [positive_number(key, one, None) for one in found]


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings. The converter has multiplied the weights, the embedding and the head by the multipliers."""
    settings.check_whole_heads(config["head_dim"])
    if config["tie_word_embeddings"]:
        raise StartupError(
            f"{settings.model.path} has no output head, and its embedding is scaled.",
            "Use the model's safetensors checkpoint.",
        )
    mixer, tensors = gguf_mixer(settings), settings.model.tensors
    return gguf_bamba_mixer(settings) | {
        "mamba_d_ssm": mixer.width,
        "mamba_rms_norm": "blk.0.ssm_norm.weight" in tensors,
        "mamba_norm_before_gate": False,
        "projectors_bias": mixer.output_bias,
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in tensors,
    }


GGUF_FALCON_H1 = GGUFFamily("falcon-h1", "FalconH1ForCausalLM", _own, "falcon_h1")


FAMILIES: dict[str, Describe] = {
    "FalconH1ForCausalLM": describe_falcon_h1,
}
GGUF_FAMILIES = (GGUF_FALCON_H1,)
