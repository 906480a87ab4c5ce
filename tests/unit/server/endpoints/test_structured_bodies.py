"""Bodies with constraints, from bytes to the one grammar that the engine gets; what is refused names its field."""

import itertools
import json

import pytest

from oarlock.engine.errors import RequestError
from oarlock.engine.types import Grammar
from oarlock.server.http.request_body import parse
from oarlock.server.llm.input_processor import constraint_of
from oarlock.server.schemas.chat import ChatRequest
from oarlock.server.schemas.generation import (
    MAX_ALTERNATIVES,
    MAX_GRAMMAR_CHARACTERS,
    MAX_PATTERN_CHARACTERS,
    MAX_SCHEMA_CHARACTERS,
    MAX_SCHEMA_DEPTH,
    CompletionRequest,
)

ENDPOINTS = [(CompletionRequest, {"prompt": "a"}), (ChatRequest, {"messages": [{"role": "user", "content": "a"}]})]
SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"const": "ü"}}}
TEXT = '{"type":"object","properties":{"b":{"type":"integer"},"a":{"const":"ü"}}}'


def nested(levels: int) -> dict:
    value: dict = {}
    for _ in range(levels - 1):
        value = {"not": value}
    return value


DEEPEST = nested(MAX_SCHEMA_DEPTH)


def read(fields, endpoint=ENDPOINTS[0]):
    schema, rest = endpoint
    return constraint_of(parse(schema, json.dumps({**rest, **fields}).encode()))


def named(**members):
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", **members}}}


GOOD = [
    ({}, None),
    ({"response_format": None, "structured_outputs": None, "guided_json": None, "guided_choice": None}, None),
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, Grammar("json_object", "", "response_format")),
    (named(schema=SCHEMA, strict=True), Grammar("json_schema", TEXT, "response_format")),
    (named(description="d", strict=None), Grammar("json_schema", "{}", "response_format")),
    ({"structured_outputs": {"json": SCHEMA, "regex": None}}, Grammar("json_schema", TEXT)),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Grammar("json_schema", TEXT)),
    ({"structured_outputs": {"regex": "a|b"}}, Grammar("regex", "a|b")),
    ({"structured_outputs": {"choice": ["ü", 'b"']}}, Grammar("choice", '["ü","b\\""]')),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, Grammar("lark", 'start: "a"')),
    ({"structured_outputs": {"json_object": True}}, Grammar("json_object", "")),
    ({"structured_outputs": {"json_object": False, "choice": ["a"]}}, Grammar("choice", '["a"]')),
    ({"guided_json": SCHEMA}, Grammar("json_schema", TEXT, "guided_json")),
    ({"guided_json": True}, Grammar("json_schema", "{}", "guided_json")),
    ({"guided_json": nested(3)}, Grammar("json_schema", '{"not":{"not":{}}}', "guided_json")),
    ({"guided_json": DEEPEST}, Grammar("json_schema", json.dumps(DEEPEST).replace(" ", ""), "guided_json")),
    ({"guided_regex": "a+", "response_format": {"type": "text"}}, Grammar("regex", "a+", "guided_regex")),
    ({"guided_choice": ["a"]}, Grammar("choice", '["a"]', "guided_choice")),
    ({"guided_grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"', "guided_grammar")),
    ({"guided_grammar": 'start: "::="'}, Grammar("lark", 'start: "::="', "guided_grammar")),
    ({"structured_outputs": {"grammar": '# GBNF\nroot ::= "a"'}}, Grammar("ebnf", '# GBNF\nroot ::= "a"')),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Grammar("json_schema", TEXT, "response_format")),
    ({"response_format": {"type": "json_object", "schema": None}}, Grammar("json_object", "", "response_format")),
    ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, Grammar("json_schema", TEXT, "response_format")),
    (named(name=None, schema=SCHEMA), Grammar("json_schema", TEXT, "response_format")),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        Grammar("json_schema", TEXT, "response_format"),
    ),
    ({"regex": "a|b"}, Grammar("regex", "a|b", "regex")),
    ({"ebnf": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"', "ebnf")),
    ({"ebnf": "start: A"}, Grammar("ebnf", "start: A", "ebnf")),
    ({"grammar": 'root ::= "a"'}, Grammar("ebnf", 'root ::= "a"', "grammar")),
    ({"json_schema": SCHEMA}, Grammar("json_schema", TEXT, "json_schema")),
    ({"json_schema": json.dumps(SCHEMA)}, Grammar("json_schema", TEXT, "json_schema")),
]


@pytest.mark.parametrize(("fields", "grammar"), GOOD, ids=range(len(GOOD)))
def test_constraints_become_one_grammar(fields, grammar):
    assert [read(fields, endpoint) for endpoint in ENDPOINTS] == [grammar, grammar]


# One constraint by every name that it has.
NAMES = {
    "schema": [
        named(schema=SCHEMA),
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"structured_outputs": {"json": SCHEMA}},
        {"guided_json": json.dumps(SCHEMA)},
        {"json_schema": SCHEMA},
    ],
    "object": [{"response_format": {"type": "json_object"}}, {"structured_outputs": {"json_object": True}}],
    "regex": [{"structured_outputs": {"regex": "a|b"}}, {"guided_regex": "a|b"}, {"regex": "a|b"}],
    "choice": [{"structured_outputs": {"choice": ["a", "b"]}}, {"guided_choice": ["a", "b"]}],
    "grammar": [
        {"structured_outputs": {"grammar": 'root ::= "a"'}},
        {"guided_grammar": 'root ::= "a"'},
        {"grammar": 'root ::= "a"'},
        {"ebnf": 'root ::= "a"'},
    ],
}
PAIRS = [pair for kind in NAMES.values() for pair in itertools.permutations(kind, 2) if not pair[0].keys() & pair[1]]
OTHERS = [pair for kinds in itertools.permutations(NAMES, 2) for pair in itertools.product(*map(NAMES.get, kinds))]


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_equal_constraints_count_as_one(first, second):
    grammar = read({**first, **second})
    assert (
        (grammar.kind, grammar.text) == (read(first).kind, read(first).text) == (read(second).kind, read(second).text)
    )


@pytest.mark.parametrize(("first", "second"), [pair for pair in OTHERS if not pair[0].keys() & pair[1]])
def test_different_constraints_are_refused_with_both_names(first, second):
    with pytest.raises(RequestError) as refusal:
        read({**first, **second})
    assert all(name in refusal.value.message for name in (*first, *second))
    assert refusal.value.param in {*first, *second}


def test_the_same_name_with_another_value_is_another_constraint():
    for one, other in (({"guided_regex": "a"}, {"regex": "b"}), ({"guided_json": {}}, {"json_schema": SCHEMA})):
        with pytest.raises(RequestError, match="differ"):
            read({**one, **other})


BAD = [
    ({"response_format": "json_object"}, "response_format"),
    ({"response_format": {"type": "xml"}}, "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "json_object", "json_schema": {"name": "x"}}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": []}}, "response_format"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
    ({"response_format": {"type": "json_schema", "schema": {}, "json_schema": {"schema": SCHEMA}}}, "response_format"),
    ({"regex": ""}, "regex"),
    ({"ebnf": 5}, "ebnf"),
    ({"grammar": "x" * (MAX_GRAMMAR_CHARACTERS + 1)}, "grammar"),
    ({"json_schema": "no JSON"}, "json_schema"),
    (named(schema=[]), "response_format"),
    (named(schema=SCHEMA, extra=1), "response_format"),
    (named(schema=SCHEMA, strict="yes"), "response_format"),
    (named(name="a name", schema={}), "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"whitespace_pattern": " "}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "unknown": 1}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "guided_regex": "b"}, "guided_regex"),
    ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ({"guided_json": 5}, "guided_json"),
    ({"guided_json": False}, "guided_json"),
    ({"guided_json": "no JSON"}, "guided_json"),
    ({"guided_json": "[" * 100_000}, "guided_json"),
    ({"guided_json": '{"const": NaN}'}, "guided_json"),
    ({"guided_json": nested(MAX_SCHEMA_DEPTH + 1)}, "guided_json"),
    ({"guided_json": {"const": "x" * MAX_SCHEMA_CHARACTERS}}, "guided_json"),
    ({"guided_json": json.dumps({"const": "x" * MAX_SCHEMA_CHARACTERS})}, "guided_json"),
    ({"guided_regex": ""}, "guided_regex"),
    ({"guided_regex": "x" * (MAX_PATTERN_CHARACTERS + 1)}, "guided_regex"),
    ({"guided_choice": "a"}, "guided_choice"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [""]}, "guided_choice"),
    ({"guided_choice": ["a"] * (MAX_ALTERNATIVES + 1)}, "guided_choice"),
    ({"guided_grammar": "x" * (MAX_GRAMMAR_CHARACTERS + 1)}, "guided_grammar"),
]


@pytest.mark.parametrize(("fields", "param"), BAD, ids=range(len(BAD)))
def test_a_wrong_constraint_is_refused_by_name(fields, param):
    for endpoint in ENDPOINTS:
        with pytest.raises(RequestError) as refusal:
            read(fields, endpoint)
        assert refusal.value.param == param
        assert len(refusal.value.message) < 300, "the input is not repeated"
