"""Settings of latent attention in a Hugging Face `config.json`, with transformers' defaults. Torch-free."""

from dataclasses import dataclass, replace
from typing import Any

from oarlock.workers.layers.attention_spec import RopeSpec, SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.model_files.gguf_model import GGUFSettings, shortest
from oarlock.workers.models.hf_fields import Fields, positive_number, unsupported
from oarlock.workers.models.hf_rope import magnitude_weight, rope_kind, rope_spec, rope_table, yarn_magnitude


@dataclass(frozen=True, slots=True)
class LatentDefaults:
    """A family's defaults of the sizes of latent attention."""

    nope_width: int = 128
    rope_width: int = 64
    value_dim: int = 128
    kv_rank: int = 512
    q_rank: int | None = 1536  # None: queries have no latent of their own
    positions: int = 4096  # of `max_position_embeddings`


def latent_attention(fields: Fields, defaults: LatentDefaults, *, interleaved: bool) -> LatentAttentionSpec:
    """Return the latent attention of DeepSeek's families. `interleaved`: the rotation pairs neighbours.

    The config classes replace `head_dim` by the width of the rotated elements, so another width of a head is not wrong
    there.
    """
    nope = fields.count("qk_nope_head_dim", defaults.nope_width)
    rotated = fields.count("qk_rope_head_dim", defaults.rope_width)
    value = fields.count("v_head_dim", defaults.value_dim)
    heads = fields.count("num_attention_heads")
    fields.check_value("qk_head_dim", nope + rotated)
    fields.check_value("head_dim", rotated, nope, nope + rotated, value)
    fields.check_value("num_key_value_heads", heads)
    q_rank = None
    if fields.raw.get("q_lora_rank", defaults.q_rank) is not None:
        q_rank = fields.count("q_lora_rank", defaults.q_rank)
    return LatentAttentionSpec(
        num_heads=heads,
        nope_width=nope,
        rope_width=rotated,
        value_dim=value,
        kv_rank=fields.count("kv_lora_rank", defaults.kv_rank),
        scale=_score_scale(fields, nope + rotated),
        rope=_rope(fields, rotated, defaults.positions, interleaved),
        q_rank=q_rank,
        bias=fields.flag("attention_bias", False),
        splits_kv_b=fields.flag("splits_kv_b", False),  # of a GGUF file
    )


def require_query_latent(fields: Fields) -> None:
    """Raise `StartupError` if queries have no latent of their own, as they have in every model of the family."""
    if fields.raw.get("q_lora_rank", 1) is None:
        raise unsupported("q_lora_rank", None, "Queries of this architecture are projected from a latent.")


def with_latent_attention(spec: DecoderSpec, attention: LatentAttentionSpec) -> DecoderSpec:
    """Return the decoder with `attention` in place of the attention of every layer."""
    return spec.with_sublayers(lambda one: attention if isinstance(one, SelfAttentionSpec) else one)


def _rope(fields: Fields, width: int, positions: int, interleaved: bool) -> RopeSpec:
    """Return the rotary settings of `width` elements. `positions`: default of `max_position_embeddings`."""
    trained = fields.raw.get("original_max_position_embeddings")
    positions = fields.count("max_position_embeddings", positions)
    return replace(rope_spec(rope_table(fields), width, positions, original=trained), interleaved=interleaved)


def _score_scale(fields: Fields, width: int) -> float:
    """Return the factor of scores: 1 / root of a head's width, times the square of YaRN's factor if there is one.

    The factor of `mscale_all_dim` is that of whole queries and keys, not only of their rotated elements. transformers
    applies it to any kind of scaled rotation.
    """
    table = rope_table(fields)
    weight = magnitude_weight(table, "mscale_all_dim")
    if rope_kind(table) == "default" or weight is None:
        return width**-0.5
    factor = positive_number("rope setting factor", table.get("factor"), None)
    return width**-0.5 * yarn_magnitude(factor, weight) ** 2


def gguf_latent(settings: GGUFSettings, config: dict[str, Any]) -> dict[str, Any]:
    """Return the settings of latent attention.

    Newer files describe the absorbed form, with one key-value head, and have the widths of heads under other names.
    """
    # The first layers of some models have another attention.
    modules = {name.partition(".attn_")[2] for name in settings.model.tensors}
    rotated = settings.count(".rope.dimension_count")
    rank = settings.count(".attention.q_lora_rank", 0)
    key = settings.count(".attention.key_length_mla", config["head_dim"])
    values = settings.count(".attention.value_length", max(1, config["hidden_size"] // config["num_attention_heads"]))
    table = config["rope_scaling"]
    if settings.has(".rope.scaling.yarn_log_multiplier"):  # a tenth of both factors, which are equal
        weight = shortest(10 * settings.number(".rope.scaling.yarn_log_multiplier"))
        table = {**(table or {}), "mscale": weight, "mscale_all_dim": weight}
    return {
        "num_key_value_heads": config["num_attention_heads"],
        "head_dim": rotated,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": settings.count(".attention.value_length_mla", values),
        "kv_lora_rank": settings.count(".attention.kv_lora_rank"),
        "q_lora_rank": rank or None,
        "attention_bias": "kv_a_mqa.bias" in modules,
        "rope_scaling": table,
        "splits_kv_b": "k_b.weight" in modules,
    }
