"""The fields of a request that constrain its answer, as one grammar for the engine.

How to call it: `constraint_of(request)` with any `SamplingFields`, completions and chat alike. None: the answer is
free. `RequestError` names the field. The engine compiles it: a grammar that does not compile, or not in time,
comes back from `EngineClient.generate` as a `RequestError` that names `Grammar.param`, before the first token.

A grammar of one's own, such as for tool calls, is `Grammar("lark", text, "tools")` in the Lark dialect of llguidance:
literal text in double quotes, special tokens as `<[id]>`, arguments as `rule: %json {…}`. A schema inlined there needs
`"x-guidance": {"whitespace_flexible": false, "item_separator": ",", "key_separator": ":"}` at its top to be compact;
a grammar with `%json` has the digits of its numbers bounded like those of JSON answers.

Knows the wire types and the engine's `Grammar`. Knows no endpoint, no tokenizer and no grammar library.
"""

import json
from collections.abc import Iterator
from typing import Any

from oarlock.engine.errors import RequestError
from oarlock.engine.sampling_params import Grammar
from oarlock.server.endpoints.schema import SamplingFields


def constraint_of(request: SamplingFields) -> Grammar | None:
    """The one grammar that the fields of `request` ask for. Raises `RequestError` when they ask for two."""
    found = list(_constraints(request))
    if len(found) > 1:
        first, second = found[0].param, found[1].param
        if first == second:
            problem = f"'{first}' holds more than one constraint"
        else:
            problem = f"'{second}' cannot be combined with '{first}'"
        raise RequestError(f"{problem}: the whole answer matches one. Leave one of them out.", second)
    return found[0] if found else None


def _constraints(request: SamplingFields) -> Iterator[Grammar]:
    yield from _of_response_format(request)
    yield from _of_structured_outputs(request)
    aliases = (
        ("guided_json", request.guided_json, "json_schema"),
        ("guided_regex", request.guided_regex, "regex"),
        ("guided_choice", request.guided_choice, "choice"),
        ("guided_grammar", request.guided_grammar, "lark"),
    )
    for name, value, kind in aliases:
        if value is not None:
            yield _grammar(kind, value, name)


def _of_response_format(request: SamplingFields) -> Iterator[Grammar]:
    wanted = request.response_format
    if wanted is None or wanted.type == "text":
        return
    if wanted.json_schema is None:
        yield Grammar("json_object", "", "response_format")
    else:
        schema = wanted.json_schema.schema_
        yield _grammar("json_schema", True if schema is None else schema, "response_format")


def _of_structured_outputs(request: SamplingFields) -> Iterator[Grammar]:
    wanted, name = request.structured_outputs, "structured_outputs"
    if wanted is None:
        return
    found = [
        _grammar(kind, value, name)
        for value, kind in (
            (wanted.json_, "json_schema"),
            (wanted.regex, "regex"),
            (wanted.choice, "choice"),
            (wanted.grammar, "lark"),
        )
        if value is not None
    ]
    if wanted.json_object:
        found.append(Grammar("json_object", "", name))
    if not found:
        message = (
            f"'{name}' holds no constraint. Give one of json, regex, choice, grammar, json_object, or leave it out."
        )
        raise RequestError(message, name)
    yield from found


def _grammar(kind: str, value: Any, param: str) -> Grammar:
    """Text is taken as it is; what is JSON is written without needless space, its order kept."""
    if isinstance(value, str):
        return Grammar(kind, value, param)
    plain: Any = {} if value is True else value
    return Grammar(kind, json.dumps(plain, ensure_ascii=False, separators=(",", ":")), param)
