"""FunctionGemma's calls, `call:f{a:<escape>x<escape>}`, and Gemma 4's, which differ in their special tokens.

Strings are enclosed in special tokens and not escaped; keys have no quotes
(https://ai.google.dev/gemma/docs/functiongemma/formatting-and-best-practices). A JSON schema is translated to grammar
rules for values in this notation.
"""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from oarlock.engine.errors import RequestError
from oarlock.server.chat.tool_parsers import grammar
from oarlock.server.chat.tool_parsers.base import ToolFormat, ToolParser
from oarlock.server.chat.tool_parsers.call_parser import CallReader, Steps, Tools
from oarlock.server.chat.tool_parsers.grammar import SpecialIds, ToolSchema, delimiter, literal, pairs, schema_rule
from oarlock.server.chat.tool_parsers.pythonic import LiteralCall
from oarlock.server.chat.tool_parsers.text_values import Schema, admitted_types, resolved, text_rules

_MAX_DEPTH = 16
_MAX_RULES = 4096
_SCALARS = ("integer", "number", "boolean", "null")
_UNBOUND = frozenset(
    {"allOf", "not", "if", "patternProperties", "propertyNames", "minProperties", "maxProperties", "prefixItems"}
) | {"contains", "uniqueItems", "dependentRequired", "dependentSchemas", "unevaluatedProperties"}
_CHOICES = ("anyOf", "oneOf", "enum", "const")


class SchemaGrammar:
    """Builder of the rules for one function's arguments. Methods raise `RequestError` if a schema is unsupported."""

    def __init__(self, root: Schema, quote: str, special_ids: SpecialIds) -> None:
        """`quote`: the token on either side of a string. References are resolved within `root`."""
        self.rules: list[str] = []
        self._root = root
        self._quote = quote
        self._special_ids = special_ids

    def arguments(self, rule: str) -> None:
        """Add the rules for `rule`: an object that matches the whole schema."""
        schema = resolved(self._root, self._root)
        choice = next((name for name in _CHOICES if name in schema), None)
        if choice is not None:
            raise _refused(f"'{choice}' at the top level")
        self._object(rule, schema, 0)

    def _value(self, rule: str, given: Any, depth: int) -> None:
        if depth > _MAX_DEPTH or len(self.rules) > _MAX_RULES:
            raise _refused(f"more than {_MAX_DEPTH} levels or {_MAX_RULES} rules")
        schema = resolved(given, self._root)
        schema = schema if isinstance(schema, Mapping) else {}
        if "$ref" in schema:
            raise _refused("a '$ref' that cannot be resolved")
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                shared = {key: value for key, value in schema.items() if key != name}
                self._either(rule, [{**shared, **self._mapping(branch)} for branch in schema[name]], depth)
                return
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            self.rules.append(f"{rule}: {' | '.join(map(self._constant, values))}")
            return
        types = admitted_types(schema, self._root)
        if not types:
            raise _refused("a 'type' that no value can have")
        if types == {"string"}:
            self.rules.append(f"{rule}: {delimiter(self._quote, self._special_ids)} {rule}_text")
            self.rules += text_rules(f"{rule}_text", schema, "", self._quote, self._special_ids)
        elif types == {"array"}:
            self._array(rule, schema, depth)
        elif types == {"object"}:
            self._object(rule, schema, depth)
        elif types <= set(_SCALARS):
            kinds = [kind for kind in _SCALARS if kind in types]
            self.rules.append(schema_rule(rule, {**schema, "type": kinds[0] if len(kinds) == 1 else kinds}))
        else:  # several types; if the schema names no type, a string or a scalar
            kinds = ["string", *_SCALARS] if "type" not in schema else sorted(types)
            self._either(rule, [{**schema, "type": kind} for kind in kinds], depth)

    def _object(self, rule: str, schema: Schema, depth: int) -> None:
        self._check(schema)
        properties, required = self._mapping(schema.get("properties")), schema.get("required")
        required = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        names = [name for name in properties if properties[name] is not False]
        written: list[tuple[str, bool]] = []
        for number, name in enumerate(dict.fromkeys([*names, *required])):
            if not name.replace("-", "_").replace(".", "_").isidentifier():
                raise _refused(f"an argument named '{name[:64]}'")
            self._value(f"{rule}_{number}", properties.get(name, True), depth + 1)
            written.append((f"{literal(name + ':')} {rule}_{number}", name in required))
        self.rules.append(f"{rule}: {literal('{')} {rule}_pairs {literal('}')}")
        self.rules += pairs(f"{rule}_pairs", written, ",")

    def _array(self, rule: str, schema: Schema, depth: int) -> None:
        self._check(schema)
        least, most = schema.get("minItems", 0), schema.get("maxItems", 2**31)
        if not (isinstance(least, int) and isinstance(most, int) and 0 <= least <= most):
            raise _refused("these 'minItems' and 'maxItems'")
        more = f"{max(least - 1, 0)},{'' if 'maxItems' not in schema else max(most - 1, 0)}"
        items = f'({rule}_item ("," {rule}_item){{{more}}}){"" if least else "?"}' if most else ""
        self.rules.append(f"{rule}: {literal('[')} {items} {literal(']')}")
        if most:
            self._value(f"{rule}_item", schema.get("items", True), depth + 1)

    def _either(self, rule: str, alternatives: Sequence[Schema], depth: int) -> None:
        self.rules.append(f"{rule}: {' | '.join(f'{rule}_{number}' for number in range(len(alternatives)))}")
        for number, alternative in enumerate(alternatives):
            self._value(f"{rule}_{number}", alternative, depth + 1)

    def _check(self, schema: Schema) -> None:
        unbound = sorted(_UNBOUND & schema.keys())
        if schema.get("propertyNames") in (True, {}, {"type": "string"}):  # zod writes it, and every name is a string
            unbound.remove("propertyNames")
        if unbound:
            raise _refused(f"'{unbound[0]}'")

    def _mapping(self, schema: Any) -> Schema:
        found = resolved(schema, self._root)
        return found if isinstance(found, Mapping) else {}

    def _constant(self, value: Any) -> str:
        mark = delimiter(self._quote, self._special_ids)
        return f"{mark} {literal(value)} {mark}" if isinstance(value, str) else literal(json.dumps(value))


def _refused(what: str) -> RequestError:
    message = (
        "This model writes arguments in its own notation, so a forced call cannot follow a schema with "
        f"{what}. Remove that from 'parameters', or let the model choose."
    )
    return RequestError(message, "tools")


FUNCTION_GEMMA = ("<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>")
GEMMA4 = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>")


class GemmaCall(LiteralCall):
    """Reader of a call such as `call:f{a:1}`."""

    is_lenient = True

    def __init__(self, tools: Tools, quote: str) -> None:
        self._quote = quote
        super().__init__(tools)

    def _read(self) -> Steps:
        yield from self._space()
        yield from self._one_of("call:", ":")  # the model sometimes omits the word
        name = yield from self._word()
        yield from self._one_of("{")
        self._expect(name)
        yield from self._pairs("}", ":")

    def _begins_string(self, character: str) -> bool:
        return character == "<"

    def _string(self) -> Steps:
        quote = self._quote
        yield from self._one_of(quote[1:])
        held = ""  # possible start of the closing quote
        while True:
            held += yield from self._character()
            if held == quote:
                return
            if not quote.startswith(held):
                text, held = (held[:-1], held[-1]) if held[-1] == quote[0] else (held, "")
                self._write(json.dumps(text, ensure_ascii=False)[1:-1])


class FunctionGemmaToolParser(ToolParser):
    """Parser of FunctionGemma's calls. A response token, at which the model should have stopped, is dropped."""

    TOKENS = FUNCTION_GEMMA
    DELIMITERS = (TOKENS[0], TOKENS[1], TOKENS[3])
    CLOSING = (TOKENS[1], TOKENS[3])

    def _reader(self, delimiter: str) -> CallReader:
        return GemmaCall(self._tools, self.TOKENS[2])


class Gemma4ToolParser(FunctionGemmaToolParser):
    """Parser of Gemma 4's calls: FunctionGemma's format with other special tokens."""

    TOKENS = GEMMA4
    DELIMITERS = (TOKENS[0], TOKENS[1], TOKENS[3])
    CLOSING = (TOKENS[1], TOKENS[3])


def _forced_calls(tokens: Sequence[str], tools: Sequence[ToolSchema], most: int, special_ids: SpecialIds) -> str:
    """Return rules for forced calls between `tokens`. Raises `RequestError` if a schema cannot be enforced."""
    start, end = delimiter(tokens[0], special_ids), delimiter(tokens[1], special_ids)
    more = f" ({start} body){{0,{most - 1}}}" if most > 1 else ""
    rules = [f"calls: {start} tail", f"tail: body{more}", f"body: call {end}", grammar.one_of_calls(tools)]
    for index, (name, schema) in enumerate(tools):
        rules.append(f"call_{index}: {literal('call:' + name)} args_{index}")
        bound = SchemaGrammar(schema, tokens[2], special_ids)
        bound.arguments(f"args_{index}")
        rules += bound.rules
    return "\n".join(rules)


def _format(name: str, models: str, parser: type[FunctionGemmaToolParser]) -> ToolFormat:
    tokens = parser.TOKENS
    return ToolFormat(
        name=name,
        models=models,
        example=f"{tokens[0]}call:f{{a:{tokens[2]}x{tokens[2]}}}{tokens[1]}",
        parser=parser,
        delimiters=tokens,
        forced_calls=partial(_forced_calls, tokens),
        optional_calls=partial(grammar.text_then_calls, tokens[0]),
    )


FUNCTIONGEMMA = _format("functiongemma", "FunctionGemma", FunctionGemmaToolParser)
GEMMA_4 = _format("gemma4", "Gemma 4", Gemma4ToolParser)
