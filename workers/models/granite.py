"""Granite, the dense models: embedding, attention, residual and logits have a multiplier each. Torch-free."""

from dataclasses import replace
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.workers.layers.attention_spec import RopeSpec, SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import decoder_spec, head_width, layer_kinds, sliding_windows
from oarlock.workers.models.hf_fields import Describe, Fields, positive_number, unsupported
from oarlock.workers.models.hf_rope import rope_spec, rope_table


def describe_granite(fields: Fields) -> DecoderSpec:
    return _granite_spec(fields, (None,) * fields.layers(), None, 2048)


def describe_granite_swa(fields: Fields) -> DecoderSpec:
    """Describe Granite with windows in three of four layers, and a learned sink in every head."""
    kinds = layer_kinds(fields)
    if kinds is None:
        kinds = ["sliding_attention" if index % 4 else "full_attention" for index in range(fields.layers())]
    windows, ropes = sliding_windows(fields, kinds, 128), layer_ropes(fields, 8192)
    spec = _granite_spec(fields, windows, ropes, 8192, kv_heads=4, tied=True, eps=1e-5)
    return spec.with_sublayers(lambda one: replace(one, sinks=True) if isinstance(one, SelfAttentionSpec) else one)


def _granite_spec(
    fields: Fields,
    windows: tuple[int | None, ...],
    ropes: list[RopeSpec | None] | None,
    max_positions: int,
    *,
    kv_heads: int | None = None,
    tied: bool = False,
    eps: float = 1e-6,
) -> DecoderSpec:
    """Return the description that both share. `ropes`: of each layer, if they differ."""
    bias = fields.flag("attention_bias", False)
    return decoder_spec(
        fields,
        kv_heads=kv_heads,
        head_dim=None,
        max_positions=max_positions,
        windows=windows,
        ropes=ropes,
        attention_scale=fields.number("attention_multiplier", 1.0),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=fields.flag("mlp_bias", False),
        residual_scale=fields.number("residual_multiplier", 1.0),
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
        tied=tied,
        eps=eps,
    )


def layer_ropes(fields: Fields, max_positions: int) -> list[RopeSpec | None] | None:
    """Return the rotary embedding of each layer, of base `layer_rope_theta`, where 0 means none. None: all are
    alike."""
    layers, thetas = fields.layers(), fields.raw.get("layer_rope_theta")
    if thetas is None:
        return None
    if not isinstance(thetas, list) or len(thetas) != layers or any(isinstance(theta, bool) for theta in thetas):
        raise unsupported("layer_rope_theta", thetas, f"A list of numbers, one for each of the {layers} layers.")
    table, trained = rope_table(fields), fields.raw.get("original_max_position_embeddings")
    width, positions = head_width(fields, None), fields.count("max_position_embeddings", max_positions)

    def of_base(theta: Any) -> RopeSpec:
        base = positive_number("layer_rope_theta", theta, None)
        return rope_spec(table | {"rope_theta": base}, width, positions, original=trained)

    return [None if theta == 0 else of_base(theta) for theta in thetas]


def multipliers(settings: GGUFSettings) -> dict[str, Any]:
    """Return Granite's four multipliers.

    Without `attention.scale`, transformers and llama.cpp scale scores differently, so that a file must have it.
    """
    names = {"attention_multiplier": ".attention.scale", "logits_scaling": ".logit_scale"}
    optional = {"embedding_multiplier": ".embedding_scale", "residual_multiplier": ".residual_scale"}
    own: dict[str, Any] = {key: settings.number(name) for key, name in names.items()}
    return own | {key: settings.number(name, 1.0) for key, name in optional.items()}


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    if not settings.flag(".rope.scaling.finetuned", True):
        raise StartupError(
            f"{settings.model.path} has no rotary embedding.", "Use a model of Granite 3 or Granite 4.0 Micro."
        )
    tensors = settings.model.tensors
    biases = {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    return multipliers(settings) | biases


GGUF_GRANITE = GGUFFamily("granite", "GraniteForCausalLM", _own, pairs_neighbours=True)


FAMILIES: dict[str, Describe] = {
    "GraniteForCausalLM": describe_granite,
    "GraniteSWAForCausalLM": describe_granite_swa,
}
GGUF_FAMILIES = (GGUF_GRANITE,)
