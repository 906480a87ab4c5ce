"""Rewriting of JSON schemas with keywords that llguidance lacks, so that it compiles them.

    propertyNames           becomes `properties` or `patternProperties`
    oneOf                   if the branches have a tag, as in pydantic's discriminated unions, the tag becomes required,
                            so that the branches exclude each other
    format                  becomes an expression (`uuid4`), or is left out if it is only a note (`password`)
    pattern                 with look-ahead at its start becomes several patterns
    unevaluatedProperties, not: {}, uniqueItems of at most one item, limits larger than any number that is written

A rewritten schema allows no value that the original does not; it may allow fewer. A keyword that cannot be enforced
stays for the library to refuse. Knows JSON schemas (2020-12 and draft 7). Does not know llguidance.
"""

import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

from oarlock.engine.structured_output.schema_formats import (
    ANNOTATION_FORMATS,
    NAME_FORMATS,
    PATTERNS,
    WITHOUT_LOOK_AROUND,
)

Schema = dict[str, Any]

# Keywords whose value is a schema (`_ONE`), a list of schemas (`_LIST`), or schemas by name (`_NAMED`).
_ONE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
)
_LIST = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_APPLICATORS = frozenset(("$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "not", "if", "dependentSchemas"))
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "discriminator")
)
_OBJECT_KEYS = _ANNOTATIONS | {"type", "properties", "required", "additionalProperties"}
TYPES = ("string", "number", "integer", "boolean", "null", "array", "object")
_LARGEST = 10**18  # largest limit that the library can enforce; numbers have at most about this many digits anyway
_JSON_IN_LARK = re.compile(
    r"""
    "(?: [^"\\\n] | \\. )*"          # a text
  | //[^\n]*                         # a comment
  | /(?: [^/\\\n] | \\. )+/          # an expression
  | (?P<json> %json \s* ) (?= \{ )
    """,
    re.VERBOSE,
)


def rewritten(schema: Any) -> Any:
    """Return `schema` in the keywords of the library. A malformed schema is returned unchanged, for the library to
    refuse.
    """
    if not isinstance(schema, dict):
        return schema
    try:
        return _Rewriter(schema).whole()
    except (TypeError, AttributeError):
        return schema


def rewritten_in_lark(text: str) -> str:
    """Return a Lark grammar with the schemas after `%json` rewritten."""
    parts: list[str] = []
    done = 0
    for start, end, schema in _embedded(text):
        parts += [text[done:start], json.dumps(rewritten(schema), ensure_ascii=False)]
        done = end
    return "".join(parts) + text[done:]


def schemas_in_lark(text: str) -> list[Any]:
    """Return the schemas after `%json` in a Lark grammar."""
    return [schema for _, _, schema in _embedded(text)]


def _embedded(text: str) -> Iterator[tuple[int, int, Any]]:
    """Yield each schema in a Lark grammar as (start, end, schema)."""
    decoder, at = json.JSONDecoder(), 0
    while (match := _JSON_IN_LARK.search(text, at)) is not None:
        at = match.end()
        if match["json"]:
            schema, end = decoder.raw_decode(text, at)
            yield at, end, schema
            at = end


def schemas(value: Any, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Yield `value` and all schemas in it, each with its path, which begins with a dot."""
    if not isinstance(value, dict):
        return
    yield path, value
    for key in _ONE:
        yield from schemas(value.get(key), f"{path}.{key}")
    for key in _LIST:
        held = value.get(key)
        for number, one in enumerate(held if isinstance(held, list) else []):
            yield from schemas(one, f"{path}.{key}[{number}]")
    for key in _NAMED:
        named = value.get(key)
        for name, one in (named if isinstance(named, dict) else {}).items():
            yield from schemas(one, f"{path}.{key}.{name}")


class _Rewriter:
    """Rewrites one schema. Branches of unions that are references become copies with their tags required."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        # A nested $id changes the meaning of references inside it, so no reference is followed then.
        self._follows = not any(path and isinstance(part.get("$id"), str) for path, part in schemas(root))
        self._copies: dict[str, Schema] = {}  # name of a definition -> its copy
        self._names: dict[tuple[str, tuple[str, ...]], str] = {}  # (reference, tags) -> key in `_copies`

    def whole(self) -> Any:
        found = self._rewrite(self._root)
        if self._copies and isinstance(found, dict):
            found = {**found, "$defs": {**found.get("$defs", {}), **self._copies}}
        return found

    def _rewrite(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        found = dict(schema)
        for key in _ONE:
            if isinstance(found.get(key), dict):
                found[key] = self._rewrite(found[key])
        for key in _LIST:
            if isinstance(found.get(key), list) and key != "oneOf":
                found[key] = [self._rewrite(one) for one in found[key]]
        for key in _NAMED:
            if isinstance(found.get(key), dict):
                found[key] = {name: self._rewrite(one) for name, one in found[key].items()}
        if isinstance(found.get("oneOf"), list):
            self._replace_one_of(found)
        if "not" in found and found["not"] in ({}, True):
            return False
        # The library treats some notes as keywords that cannot be combined with a recursive reference.
        found = {key: value for key, value in found.items() if key not in _ANNOTATIONS and not _is_extension(key)}
        self._name_properties(found)
        self._close(found)
        _bound_numbers(found)
        _replace_format(found)
        _split_pattern(found)
        if found.get("uniqueItems") is False or found.get("maxItems") in (0, 1):
            found.pop("uniqueItems", None)
        return found

    def _resolve(self, schema: Any) -> Any:
        """Return the target of a schema that is only a reference, or None; return any other schema itself."""
        seen = set()
        while isinstance(schema, dict) and "$ref" in schema and not (schema.keys() - _ANNOTATIONS - {"$ref"}):
            reference = schema["$ref"]
            if not self._follows or not isinstance(reference, str) or reference in seen:
                return None
            seen.add(reference)
            schema = self._target(reference)
        return schema

    def _target(self, reference: str) -> Any:
        copied = self._copies.get(reference.removeprefix("#/$defs/"))
        if copied is not None:
            return copied
        found: Any = self._root
        if reference != "#" and not reference.startswith("#/"):
            return None
        for key in reference.split("/")[1:]:
            key = key.replace("~1", "/").replace("~0", "~")
            if isinstance(found, list) and key.isdigit() and int(key) < len(found):
                found = found[int(key)]
            elif isinstance(found, dict):
                found = found.get(key)
            else:
                return None
        return found

    # -- oneOf

    def _replace_one_of(self, found: Schema) -> None:
        """Flatten nested unions, require the tags of objects, and make an anyOf of branches that exclude each other."""
        flat = list(self._flattened(found, ()))
        shared = None if any(tags for _, tags in flat) else self._shared_tag([branch for branch, _ in flat])
        branches = [self._tagged(branch, tags or ((shared,) if shared else ())) for branch, tags in flat]
        signatures = [self._signature(branch) for branch in branches]
        are_apart = all(_exclude_each_other(*pair) for pair in itertools.combinations(signatures, 2))
        if are_apart and "anyOf" not in found:
            del found["oneOf"]
            found["anyOf"] = branches
        else:
            found["oneOf"] = branches

    def _signature(self, branch: Any) -> tuple[set[str], dict[str, set[str]]]:
        """Return the types of a branch (all if it names none), and the constants of its required properties."""
        found = self._resolve(branch)
        if not isinstance(found, dict):
            return set(TYPES), {}
        kinds = found.get("type", TYPES)
        required, properties = found.get("required", ()), found.get("properties", {})
        constants = {name: set(self._constants(properties.get(name))) for name in required}
        return {kinds} if isinstance(kinds, str) else set(kinds), constants

    def _flattened(self, union: Schema, tags: tuple[str, ...]) -> Iterator[tuple[Any, tuple[str, ...]]]:
        discriminator = union.get("discriminator")
        name = discriminator.get("propertyName") if isinstance(discriminator, dict) else None
        if isinstance(name, str):
            tags = (*tags, name)
        for branch in union["oneOf"]:
            inner = self._resolve(branch)
            is_union = isinstance(inner, dict) and not (inner.keys() - _ANNOTATIONS - {"oneOf"})
            if is_union and isinstance(inner.get("oneOf"), list) and inner is not union:
                yield from self._flattened(inner, tags)
            else:
                yield branch, tags

    def _shared_tag(self, branches: list[Any]) -> str | None:
        """Return a property whose constants differ in all branches that are objects, or None."""
        objects = [found for branch in branches if (found := self._object(branch)) is not None]
        if len(objects) < 2:
            return None
        for name in objects[0].get("properties", {}):
            values: list[str] = []
            for one in objects:
                constants = self._constants(one.get("properties", {}).get(name))
                if not constants:
                    break
                values += constants
            else:
                if len(values) == len(set(values)):
                    return name
        return None

    def _object(self, branch: Any) -> Schema | None:
        found = self._resolve(branch)
        if isinstance(found, dict) and isinstance(found.get("properties"), dict):
            return found if found.get("type", "object") == "object" else None
        return None

    def _constants(self, schema: Any) -> list[str]:
        """Return the values that a schema lists, as JSON; empty if it lists none."""
        found = self._resolve(schema)
        if not isinstance(found, dict):
            return []
        values = [found["const"]] if "const" in found else found.get("enum")
        return [json.dumps(value, sort_keys=True) for value in values] if isinstance(values, list) else []

    def _tagged(self, branch: Any, tags: tuple[str, ...]) -> Any:
        """Return a rewritten branch, in which the `tags` that it has are required."""
        found = self._object(branch)
        if found is None:
            return self._rewrite(branch)
        required = found.get("required")
        required = list(required) if isinstance(required, list) else []
        missing = [tag for tag in tags if tag not in required and self._constants(found["properties"].get(tag))]
        if not missing and "type" in found:
            return self._rewrite(branch)
        if found is branch:
            return {**self._rewrite(found), "type": "object", "required": [*required, *missing]}
        key = (branch["$ref"], tuple(missing))
        if key not in self._names:
            readable = re.sub(r"[^A-Za-z0-9_.-]", "_", key[0].rsplit("/", 1)[-1])
            self._names[key] = name = f"{readable}-tagged-{len(self._names)}"
            tagged = {"type": "object", "required": [*required, *missing]}
            self._copies[name] = {**found, **tagged}  # a recursive schema finds this copy while it is rewritten
            self._copies[name] = {**self._rewrite(found), **tagged}
        return {"$ref": f"#/$defs/{self._names[key]}"}

    # -- objects

    def _name_properties(self, found: Schema) -> None:
        """Replace `propertyNames` if the names are listed or match one expression."""
        names = self._resolve(found.get("propertyNames", None))
        if names is True:
            names = {}
        if not isinstance(names, dict) or names.get("type", "string") != "string":
            return
        names = {key: value for key, value in names.items() if key != "type" and key not in _ANNOTATIONS}
        others, own = found.get("additionalProperties", True), found.get("properties", {})
        listed = self._constants({key: value for key, value in names.items() if key in ("const", "enum")})
        if listed and len(names) == 1 and not found.get("patternProperties"):
            texts = [json.loads(text) for text in listed]
            properties = {text: own.get(text, others) for text in texts if isinstance(text, str)}
            changed = {"properties": properties, "additionalProperties": False}
        elif not names or (others is False and not found.get("patternProperties") and not own):
            changed = {}
        else:
            expression = _expression_of_names(names)
            if expression is None or own or found.get("patternProperties"):
                return
            changed = {"patternProperties": {expression: others}, "additionalProperties": False}
        del found["propertyNames"]
        found |= changed

    def _close(self, found: Schema) -> None:
        """Replace `unevaluatedProperties` and `unevaluatedItems` if it is clear which of them are evaluated."""
        if "unevaluatedProperties" in found and found.keys() & _APPLICATORS == {"allOf"}:
            self._merge(found)
        if found.keys() & _APPLICATORS:
            return
        for rest, general in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if rest in found:
                found.setdefault(general, found[rest])
                del found[rest]

    def _merge(self, found: Schema) -> None:
        """Merge the objects of an allOf if each is open and all have different properties."""
        parts = [self._resolve(part) for part in found["allOf"]]
        merged = {key: value for key, value in found.items() if key != "allOf"}
        properties, required = dict(merged.get("properties", {})), list(merged.get("required", ()))
        for part in parts:
            part = self._rewrite(part)
            is_open = isinstance(part, dict) and not part.keys() - _OBJECT_KEYS and "additionalProperties" not in part
            if not is_open or properties.keys() & part.get("properties", {}).keys():
                return
            properties |= part.get("properties", {})
            required += part.get("required", [])
        found.clear()
        found |= {**merged, "type": "object", "properties": properties, "required": required}


def _is_extension(key: str) -> bool:
    return key.startswith("x-") and key != "x-guidance"


def _exclude_each_other(one: tuple[set[str], dict[str, set[str]]], other: tuple[set[str], dict[str, set[str]]]) -> bool:
    """Return whether no value matches both branches, as far as their signatures show."""
    shared = one[0] & other[0]
    if not shared and {"integer", "number"} - one[0] - other[0]:
        return True
    if shared != {"object"}:
        return False
    values = ((one[1][name], other[1][name]) for name in one[1].keys() & other[1].keys())
    return any(ours and theirs and not ours & theirs for ours, theirs in values)


def _expression_of_names(names: Schema) -> str | None:
    """Return the expression that the names of properties match, or None if a single one is not enough."""
    if names.keys() == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    if names.keys() == {"format"} and names["format"] in NAME_FORMATS:
        return f"^(?:{NAME_FORMATS[names['format']]})$"
    least, most = names.get("minLength", 0), names.get("maxLength", "")
    if names.keys() <= {"minLength", "maxLength"} and isinstance(least, int) and isinstance(most, int | str):
        return rf"^[\s\S]{{{least},{most}}}$"
    return None


def _bound_numbers(found: Schema) -> None:
    """Lower the limits that exceed the library's range."""
    for key, sign in (("maximum", 1), ("exclusiveMaximum", 1), ("minimum", -1), ("exclusiveMinimum", -1)):
        limit = found.get(key)
        if isinstance(limit, int | float) and not isinstance(limit, bool) and limit * sign > _LARGEST:
            found[key] = sign * _LARGEST


def _replace_format(found: Schema) -> None:
    form = found.get("format")
    if not isinstance(form, str):
        return
    if form in ANNOTATION_FORMATS or ("pattern" in found and (form in PATTERNS or form in ("time", "duration"))):
        del found["format"]  # an explicit pattern is more precise; zod's times and durations differ from JSON Schema's
    elif form in PATTERNS:
        del found["format"]
        found["pattern"] = f"^(?:{PATTERNS[form]})$"


def _split_pattern(found: Schema) -> None:
    """Turn look-ahead at the start into separate patterns, as in `^(?=.*[0-9])(?=.*[a-z]).{8,}$`."""
    pattern = found.get("pattern")
    if not isinstance(pattern, str) or "(?" not in pattern:
        return
    if pattern in WITHOUT_LOOK_AROUND:
        found["pattern"] = WITHOUT_LOOK_AROUND[pattern]
        return
    rest, ahead = pattern.removeprefix("^"), []
    while pattern.startswith("^") and rest.startswith("(?="):
        end = _end_of_group(rest)
        if end is None:
            return
        ahead.append(f"^(?:{rest[3:end]})")
        rest = rest[end + 1 :]
    if ahead and not _has_alternatives(rest):
        found["pattern"] = f"^{rest}"
        found["allOf"] = [*found.get("allOf", ()), *({"pattern": one} for one in ahead)]


def _depths(pattern: str) -> Iterator[tuple[int, str, int]]:
    """Yield (index, character, number of groups open after it) for characters outside of classes and escapes."""
    depth, index, in_class = 0, 0, False
    while index < len(pattern):
        character = pattern[index]
        if character == "\\":
            index += 2
            continue
        if in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        else:
            depth += (character == "(") - (character == ")")
            yield index, character, depth
        index += 1


def _end_of_group(pattern: str) -> int | None:
    """Return the index of the parenthesis that closes the first group."""
    return next((at for at, character, depth in _depths(pattern) if character == ")" and depth == 0), None)


def _has_alternatives(pattern: str) -> bool:
    return any(character == "|" and depth == 0 for _, character, depth in _depths(pattern))
