"""Gemma, the text models, and VaultGemma: norms that scale by 1 + weight, and a scaled embedding. Torch-free.

Gemma 2 and 3 norm the results of attention and MLP as well, and most of their layers have windows.
"""

from typing import Any

from oarlock.workers.layers.attention_spec import RopeSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.tensor_spec import NormSpec
from oarlock.workers.model_files.gguf_model import GGUFFamily, GGUFSettings
from oarlock.workers.models.hf_config import (
    BEFORE,
    BEFORE_AND_AFTER,
    Norms,
    activation_name,
    decoder_spec,
    head_width,
    layer_kinds,
    sliding_windows,
)
from oarlock.workers.models.hf_fields import Describe, Fields, unsupported
from oarlock.workers.models.hf_rope import rope_spec

_MAX_POSITIONS = 131_072
# Gemma's largest models divide scores by the square root of a value other than the width of a head. GGUF files do not
# contain it; llama.cpp recognises these models by their number of layers.
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


def describe_gemma(fields: Fields) -> DecoderSpec:
    """Describe the first Gemma. Its published configs say `gelu` and mean the approximation by tanh."""
    if fields.raw.get("hidden_activation") not in (None, "gelu_pytorch_tanh"):
        raise unsupported("hidden_activation", fields.raw["hidden_activation"], "Gemma reads hidden_act.")
    activation = "gelu_tanh"
    if fields.raw.get("hidden_act") != "gelu":
        activation = activation_name(fields, "hidden_act", "gelu_pytorch_tanh")
    return _gemma_spec(
        fields, kv_heads=16, max_positions=8192, windows=(None,) * fields.layers(), norms=BEFORE, activation=activation
    )


def describe_gemma2(fields: Fields) -> DecoderSpec:
    """Describe Gemma 2, with softcaps, and a window in every other layer."""
    return _with_softcaps(fields, BEFORE_AND_AFTER)


def describe_vaultgemma(fields: Fields) -> DecoderSpec:
    """Describe VaultGemma: Gemma 2 without the norms of results."""
    return _with_softcaps(fields, (("input_layernorm", None), ("pre_feedforward_layernorm", None)))


def _with_softcaps(fields: Fields, norms: Norms) -> DecoderSpec:
    return _gemma_spec(
        fields,
        max_positions=8192,
        windows=_windows(fields, 2),
        norms=norms,
        query_scalar=fields.number("query_pre_attn_scalar", 256.0),
        attention_softcap=fields.number_or_none("attn_logit_softcapping", 50.0),
        logit_softcap=fields.number_or_none("final_logit_softcapping", 30.0),
    )


def describe_gemma3(fields: Fields) -> DecoderSpec:
    """Describe Gemma 3, with norms of heads, and another rotary table for layers with a window.

    `attn_logit_softcapping` is not read, and is refused if it is set: transformers has it in Gemma 3's config but
    ignores it.
    """
    logit_softcap = fields.number_or_none("final_logit_softcapping", None)
    head_dim, positions = head_width(fields, 256), fields.count("max_position_embeddings", _MAX_POSITIONS)
    everywhere, local = (rope_spec(table, head_dim, positions) for table in _rope_tables(fields))
    windows = _windows(fields, fields.count("sliding_window_pattern", 6))
    return _gemma_spec(
        fields,
        max_positions=_MAX_POSITIONS,
        windows=windows,
        rope=everywhere,
        ropes=[everywhere if window is None else local for window in windows],
        query_scalar=fields.number("query_pre_attn_scalar", 256.0),
        qk_norm="head",
        logit_softcap=logit_softcap,
    )


def _gemma_spec(
    fields: Fields,
    *,
    max_positions: int,
    windows: tuple[int | None, ...],
    kv_heads: int = 4,
    norms: Norms = BEFORE_AND_AFTER,
    activation: str | None = None,
    query_scalar: float | None = None,
    rope: RopeSpec | None = None,
    ropes: list[RopeSpec | None] | None = None,
    qk_norm: str | None = None,
    attention_softcap: float | None = None,
    logit_softcap: float | None = None,
) -> DecoderSpec:
    """Return the description that all share."""
    bias = fields.flag("attention_bias", False)
    return decoder_spec(
        fields,
        kv_heads=kv_heads,
        head_dim=256,
        max_positions=max_positions,
        windows=windows,
        rope=rope,
        ropes=ropes,
        query_scalar=query_scalar,
        attention_softcap=attention_softcap,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=qk_norm,
        activation=activation or activation_name(fields, "hidden_activation", "gelu_pytorch_tanh"),
        norm=NormSpec(eps=fields.number("rms_norm_eps", 1e-6), offset=1.0),
        norms=norms,
        embedding_scale=fields.count("hidden_size") ** 0.5,
        logit_softcap=logit_softcap,
        tied=True,
    )


def _windows(fields: Fields, full_every: int) -> tuple[int | None, ...]:
    """Return the window of each layer. Without `layer_types`, every `full_every`-th layer has none."""
    kinds = layer_kinds(fields)
    if kinds is None:
        layers = fields.layers()
        kinds = ["sliding_attention" if (index + 1) % full_every else "full_attention" for index in range(layers)]
    return sliding_windows(fields, kinds, 4096)


def _rope_tables(fields: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rotary settings of full and of sliding layers. An old config's `rope_scaling` is only for full
    layers."""
    tables, scaling = fields.table("rope_parameters"), fields.table("rope_scaling")
    kinds = ("full_attention", "sliding_attention")
    if any(key not in kinds for key in tables):
        raise unsupported("rope_parameters", tables, f"Gemma 3 has one table each for {' and '.join(kinds)}.")
    inner = Fields(tables)
    full, sliding = (inner.table(kind) for kind in kinds)
    full = {"rope_theta": fields.number("rope_theta", 1_000_000.0), **full, **scaling}
    sliding = {"rope_theta": fields.number("rope_local_base_freq", 10_000.0), **sliding}
    return full, sliding


def _own_gemma(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    settings.check_whole_heads(config["head_dim"])
    return {"attention_bias": "blk.0.attn_q.bias" in settings.model.tensors}


def _own(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    name, layers = settings.architecture, config["num_hidden_layers"]
    is_27b = layers == _LAYERS_OF_27B[name]
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    own: dict[str, Any] = {"query_pre_attn_scalar": scalar, "hidden_activation": "gelu_pytorch_tanh"}
    softcaps = (("attn_logit", 50.0), ("final_logit", 30.0)) if name == "gemma2" else (("final_logit", 0.0),)
    for key, default in softcaps:
        own[f"{key}_softcapping"] = settings.number(f".{key}_softcapping", default) or None
    window = settings.count(".attention.sliding_window", 4096 if name == "gemma2" else 0)
    own["sliding_window"] = window or None
    if not window:
        own["layer_types"] = ["full_attention"] * layers
    if name == "gemma3":
        own["rope_local_base_freq"] = settings.number(".rope.freq_base_swa", 10_000.0)
    return own


_FIRST_FILES = {"heads": 8, "kv_heads": 4, "positions": _MAX_POSITIONS, "theta": 1_000_000}
GGUF_GEMMA = GGUFFamily("gemma", "GemmaForCausalLM", _own_gemma)
GGUF_GEMMA2 = GGUFFamily("gemma2", "Gemma2ForCausalLM", _own)
GGUF_GEMMA3 = GGUFFamily(
    *("gemma3", "Gemma3ForCausalLM", _own, "gemma3_text", _FIRST_FILES), others=("Gemma3ForConditionalGeneration",)
)


FAMILIES: dict[str, Describe] = {
    "Gemma2ForCausalLM": describe_gemma2,
    "Gemma3ForCausalLM": describe_gemma3,
    "GemmaForCausalLM": describe_gemma,
    "VaultGemmaForCausalLM": describe_vaultgemma,
}
GGUF_FAMILIES = (
    GGUF_GEMMA2,
    GGUF_GEMMA3,
    GGUF_GEMMA,
)
