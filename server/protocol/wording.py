"""What is wrong with a field, in words for who wrote the request: pydantic's own are for who wrote the schema."""

from __future__ import annotations

from typing import Any

# By pydantic's names of errors.
_KINDS = {
    "string_type": "must be a string",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_parsing_size": "must be a whole number of fewer digits",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "finite_number": "must be a finite number",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "model_attributes_type": "must be an object",
    "none_required": "must be null",
    "extra_forbidden": "is not known here",
}
# With the number that their context holds.
_LIMITS = {
    "greater_than_equal": ("must be at least {}", "ge"),
    "greater_than": ("must be above {}", "gt"),
    "less_than_equal": ("must be at most {}", "le"),
    "less_than": ("must be below {}", "lt"),
    "literal_error": ("must be {}", "expected"),
    "enum": ("must be {}", "expected"),
    "string_pattern_mismatch": ("must match the pattern {}", "pattern"),
    "union_tag_not_found": ("must have {}", "discriminator"),
}
# Lengths: at least or at most, of what.
_LENGTHS = {
    "too_short": ("at least", "min_length", "item"),
    "too_long": ("at most", "max_length", "item"),
    "string_too_short": ("at least", "min_length", "character"),
    "string_too_long": ("at most", "max_length", "character"),
}


def problem_of(kind: str, context: dict[str, Any], message: str) -> str:
    """What follows the name of a field. `kind`, `context` and `message` are those of an error of pydantic."""
    if kind in _KINDS:
        return _KINDS[kind]
    if kind in _LIMITS:
        words, key = _LIMITS[kind]
        limit = context[key]
        return words.format(f"{limit:g}" if isinstance(limit, float) else f"{limit:,}" if type(limit) is int else limit)
    if kind in _LENGTHS:
        bound, key, what = _LENGTHS[kind]
        count = context[key]
        return f"must have {bound} {count:,} {what}{'' if count == 1 else 's'}"
    if kind == "union_tag_invalid":
        return f"must have {context['discriminator']} {context['expected_tags']}"
    if message.startswith("must "):  # ours
        return message
    return f"is wrong: {message[:1].lower()}{message[1:]}"
