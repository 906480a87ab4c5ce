"""Rotary settings of a `config.json`, with transformers' defaults.

Supports old keys (`rope_theta`, `rope_scaling`) and new keys (`rope_parameters`). Torch-free.
"""

import math
from dataclasses import replace
from typing import Any

from oarlock.base.errors import StartupError, shown
from oarlock.workers.layers.attention_spec import RopeSpec
from oarlock.workers.models.hf_fields import MOST, Fields, positive_number, unsupported, wrong

_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")
_KEYS = {
    "type",
    "rope_type",
    "rope_theta",
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
    "low_freq_factor",
    "high_freq_factor",
    "partial_rotary_factor",
    "finetuned",  # a note of old YaRN checkpoints, without effect
}
LENGTH = "original_max_position_embeddings"
_LONGROPE_KEYS = {"short_factor", "long_factor"}
# Settings of multimodal positions.
_SECTION, _INTERLEAVED = "mrope_section", "mrope_interleaved"
_SECTIONS = (_SECTION, "xdrope_section")
_ROPE_TYPES = {"mrope": "default", "xdrope": "dynamic"}  # types that differ from the others only by the sections


def rope_table(fields: Fields, theta: float | None = None) -> dict[str, Any]:
    """Return the rotary settings of a family with one table. `theta`: the family's default of `rope_theta`.

    As in transformers, `rope_scaling` has precedence over `rope_parameters`, and an inner `rope_theta` over the outer.
    """
    inner, outer = fields.table("rope_scaling") or fields.table("rope_parameters"), fields.raw.get("rope_theta")
    return {"rope_theta": theta if outer is None else outer, **inner}


def without_sections(table: Any, key: str) -> Any:
    """Return a rotary table without the sections of multimodal positions.

    A section is the part of the frequencies that follows time, height or width. Tokens of text have the same position
    in each, so the sections change nothing.
    """
    if not isinstance(table, dict):
        return table
    found = {name: value for name, value in table.items() if name not in (*_SECTIONS, _INTERLEAVED)}
    for section in (table[name] for name in _SECTIONS if table.get(name) is not None):
        if not isinstance(section, list) or any(type(size) not in (int, float) or size <= 0 for size in section):
            raise unsupported(f"{key}: {_SECTION}", section, "It must be a list of positive numbers.")
    for name in ("type", "rope_type"):
        if isinstance(found.get(name), str):
            found[name] = _ROPE_TYPES.get(found[name], found[name])
    return {name: without_sections(value, key) if isinstance(value, dict) else value for name, value in found.items()}


def rope_kind(table: dict[str, Any]) -> str:
    """Return the kind of scaling. Raise `StartupError` for an unknown kind or a setting that the kind does not have."""
    kind = table.get("rope_type", table.get("type", "default"))
    keys = _KEYS | _LONGROPE_KEYS if kind == "longrope" else _KEYS
    unknown = [key for key, value in table.items() if key not in keys and value is not None]
    if unknown or kind not in _KINDS:
        what = f"rope setting {unknown[0]}" if unknown else "rope type"
        value = table[unknown[0]] if unknown else kind
        raise unsupported(what, value, f"Supported rope types: {', '.join(_KINDS)}.")
    for key, value in table.items():  # even unused settings: a value that is not finite means a damaged file
        if isinstance(value, float) and not math.isfinite(value):
            raise wrong(key if key == "rope_theta" else f"rope setting {key}", "a finite number", value)
    return kind


def rope_spec(
    table: dict[str, Any], head_dim: int, max_positions: int, *, original: Any = None, share: float | None = None
) -> RopeSpec:
    """Return `table` with every default resolved. `original`: the trained length if the config has it outside the
    table.

    `share`: the part of each head that is rotated, 0 to 1; None: the family rotates whole heads, and a table with
    another share is refused.
    """
    kind = rope_kind(table)
    if kind == "proportional":
        return _proportional(table, head_dim)
    if share is None and table.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise unsupported("partial_rotary_factor", table["partial_rotary_factor"], "This family rotates whole heads.")
    rotary_dim = head_dim if share is None else int(head_dim * share)
    if head_dim % 2 or rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        what, value = ("head_dim", head_dim) if rotary_dim == head_dim else ("partial_rotary_factor", share)
        raise unsupported(
            what, value, f"It must rotate an even number of the {head_dim} elements of a head (head_dim)."
        )

    def given(key: str, default: float | None = None) -> float:
        return positive_number(f"rope setting {key}", table.get(key), default)

    plain = RopeSpec(kind, positive_number("rope_theta", table.get("rope_theta"), 10000.0), rotary_dim)
    if kind == "default":
        return plain
    if kind == "linear":
        return replace(plain, factor=_reach(given("factor"), "max_position_embeddings", max_positions))
    if kind == "dynamic":
        if rotary_dim == 2:
            raise unsupported("head_dim", head_dim, "Dynamic rotary embedding needs more than two elements of a head.")
        return replace(
            plain,
            factor=_reach(given("factor"), "max_position_embeddings", max_positions),
            original_max_positions=max_positions,
        )
    length = trained_length(original if original is not None else table.get(LENGTH), max_positions)
    plain = replace(plain, original_max_positions=length)
    if kind == "llama3":
        low, high = given("low_freq_factor"), given("high_freq_factor")
        if high < low:
            raise wrong("rope setting high_freq_factor", f"at least low_freq_factor {low:g}", high)
        return replace(plain, factor=given("factor"), low_freq_factor=low, high_freq_factor=high)
    factor = _reach(given("factor", max_positions / length), LENGTH, length)
    return _longrope(plain, table, factor) if kind == "longrope" else _yarn(plain, table, factor)


def _proportional(table: dict[str, Any], head_dim: int) -> RopeSpec:
    """Return rotary settings with frequencies as of whole heads, of which only the leading pairs are rotated."""
    share = positive_number("partial_rotary_factor", table.get("partial_rotary_factor"), 1.0)
    pairs = int(share * head_dim // 2)
    if head_dim % 2 or not 0 < pairs <= head_dim // 2:
        raise unsupported(
            "partial_rotary_factor",
            share,
            f"It must rotate some of the {head_dim} elements of a head (head_dim or global_head_dim), an even number.",
        )
    theta = positive_number("rope_theta", table.get("rope_theta"), 10000.0)
    factor = positive_number("rope setting factor", table.get("factor"), 1.0)
    return RopeSpec("proportional", theta, head_dim, factor=factor, rotated_pairs=pairs)


def trained_length(value: Any, max_positions: int) -> int:
    """Return the length that frequencies were trained for. Some checkpoints write it as 8192.0."""
    value = max_positions if value is None else value
    if type(value) not in (int, float) or not 2 <= value <= MOST or value != int(value):
        raise wrong(f"rope setting {LENGTH}", f"an integer between 2 and {MOST}", value)
    return int(value)


def _reach(factor: float, key: str, length: int) -> float:
    """Return `factor`. Raise `StartupError` if `factor` times `length` is too long to be counted in int32."""
    if factor * length > MOST:
        raise wrong("rope setting factor", f"at most {MOST / length:g} with {key} {length}", factor)
    return factor


def _yarn(plain: RopeSpec, table: dict[str, Any], factor: float) -> RopeSpec:
    if plain.theta == 1:
        raise wrong("rope_theta", "other than 1 with YaRN", plain.theta)
    truncate = table.get("truncate", True)
    if not isinstance(truncate, bool):
        raise wrong("rope setting truncate", "true or false", truncate)
    return replace(
        plain,
        factor=factor,
        attention_factor=_yarn_attention_factor(table, factor),
        beta_fast=positive_number("rope setting beta_fast", table.get("beta_fast"), 32.0),
        beta_slow=positive_number("rope setting beta_slow", table.get("beta_slow"), 1.0),
        truncate=truncate,
    )


def _longrope(plain: RopeSpec, table: dict[str, Any], factor: float) -> RopeSpec:
    """Return the LongRoPE spec. Cos and sin grow with the logarithm of the stretch, unless the config gives their
    factor."""
    attention = math.sqrt(1 + math.log(factor) / math.log(plain.original_max_positions)) if factor > 1 else 1.0
    return replace(
        plain,
        factor=factor,
        attention_factor=positive_number("rope setting attention_factor", table.get("attention_factor"), attention),
        short_factors=_pair_factors(table, "short_factor", plain.rotary_dim // 2),
        long_factors=_pair_factors(table, "long_factor", plain.rotary_dim // 2),
    )


def _pair_factors(table: dict[str, Any], key: str, pairs: int) -> tuple[float, ...]:
    """Return one positive number for each pair of rotated elements."""
    values = table.get(key)
    if not isinstance(values, list) or len(values) != pairs:
        found = f"a list of {len(values)}" if isinstance(values, list) else shown(values)
        raise StartupError(
            f"config.json: rope setting {key} must be a list of {pairs} numbers, got {found}.", "Repair config.json."
        )
    return tuple(positive_number(f"rope setting {key}", value, None) for value in values)


def _yarn_attention_factor(table: dict[str, Any], factor: float) -> float:
    """Return the factor of cos and sin: the YaRN paper's, unless the config gives it."""
    explicit = table.get("attention_factor")
    if explicit is not None:
        return positive_number("rope setting attention_factor", explicit, None)
    over, under = (magnitude_weight(table, key) for key in ("mscale", "mscale_all_dim"))
    if over is None or under is None:
        return yarn_magnitude(factor, 1.0)
    return yarn_magnitude(factor, over) / yarn_magnitude(factor, under)


def magnitude_weight(table: dict[str, Any], key: str) -> float | None:
    """Return the weight of YaRN's factor at `key`, `mscale` or `mscale_all_dim`; None if there is none, or zero."""
    value = table.get(key)
    is_given = value is not None and (value != 0 or isinstance(value, bool))
    return positive_number(f"rope setting {key}", value, None) if is_given else None


def yarn_magnitude(factor: float, weight: float) -> float:
    """Return YaRN's factor of rotated elements for contexts that are `factor` times as long as trained."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
