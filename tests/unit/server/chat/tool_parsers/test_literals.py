"""Values in Python's notation and Gemma's: what is read, and what schemas make of Gemma's grammar."""

from __future__ import annotations

import json

import llguidance
import pytest

from oarlock.engine.errors import RequestError
from oarlock.server.chat.tool_parsers.call_parser import ArgumentsDelta, ContentDelta, ToolCallStart, merged
from oarlock.server.chat.tool_parsers.gemma import FUNCTIONGEMMA, GEMMA_4, SchemaGrammar
from oarlock.server.chat.tool_parsers.pythonic import PYTHONIC
from tests.unit.server.chat.tool_parsers.test_every_format import _admits, compiler  # noqa: F401

TOOLS: dict[str, dict] = {"f": {}, "g": {}}
F = ToolCallStart("f")


def _parse(tool_format, text):
    results = []
    for pieces in ([text], list(text)):
        parser = tool_format.parser(TOOLS)
        events = [event for piece in pieces for event in parser.push(piece)]
        results.append(merged([*events, *parser.flush()]))
    assert results[0] == results[1]
    return results[0]


@pytest.mark.parametrize(
    ("tool_format", "written", "value"),
    [
        (PYTHONIC, "'it\\'s \"x\"'", 'it\'s "x"'),
        (PYTHONIC, '"a\\n\\té\\x41\\u00e9\\\\ \\q"', "a\n\téAé\\ \\q"),
        (PYTHONIC, "'a\nb'", "a\nb"),
        (PYTHONIC, "True", True),
        (PYTHONIC, "None", None),
        (PYTHONIC, "-1.5e3", -1500.0),
        (PYTHONIC, "[1, 'a', [], ]", [1, "a", []]),
        (PYTHONIC, "(1, 2)", [1, 2]),
        (PYTHONIC, "{'a': {\"b\": [False]}, 'c': 1}", {"a": {"b": [False]}, "c": 1}),
        (FUNCTIONGEMMA, '<escape>a "{b}, \\ é\n<esc<escape>', 'a "{b}, \\ é\n<esc'),
        (FUNCTIONGEMMA, "<escape><escape>", ""),
        (FUNCTIONGEMMA, "12", 12),
        (FUNCTIONGEMMA, "true", True),
        (FUNCTIONGEMMA, "paris in spring", "paris in spring"),
        (FUNCTIONGEMMA, "[<escape>a<escape>,{k:1,m:null}]", ["a", {"k": 1, "m": None}]),
    ],
)
def test_a_value(tool_format, written, value):
    text = f"[f(a={written}, b=1)]" if tool_format is PYTHONIC else (
        f"<start_function_call>call:f{{a:{written},b:1}}<end_function_call><start_function_response>"
    )  # fmt: skip
    start, arguments = _parse(tool_format, text)
    assert start == F
    assert json.loads(arguments.text) == {"a": value, "b": 1}


@pytest.mark.parametrize(
    ("tool_format", "text", "expected"),
    [
        (PYTHONIC, " [f(), g(a=1)]", [F, ArgumentsDelta("{}"), ToolCallStart("g"), ArgumentsDelta('{"a": 1}')]),
        (PYTHONIC, "a<|python_start|>[f()]<|python_end|>", [ContentDelta("a"), F, ArgumentsDelta("{}")]),
        (PYTHONIC, "[1, 2]", None),
        (PYTHONIC, "[h()]", None),
        (PYTHONIC, "I [f()]", None),
        (PYTHONIC, "[f(a=b)]", [F, ArgumentsDelta('{"a": b)]')]),
        (PYTHONIC, "[f(1)]", None),
        (PYTHONIC, '[f("x")]', None),
        (PYTHONIC, '[g(), f("x")]', [ToolCallStart("g"), ArgumentsDelta("{}"), ContentDelta(', f("x")]')]),
        (PYTHONIC, "[f(x)]", None),
        (PYTHONIC, "[f(**{'a': 1})]", None),
        (PYTHONIC, "[f(a=NaN)]", [F, ArgumentsDelta('{"a": NaN)]')]),
        (PYTHONIC, '[f(a="x', [F, ArgumentsDelta('{"a": "x')]),
        (PYTHONIC, "[f(a=" + "[" * 70, None),
        (FUNCTIONGEMMA, "<start_function_call>call:h{}<end_function_call>", None),
        (FUNCTIONGEMMA, "<start_function_call>call:f{a:}<end_function_call>", [F, ArgumentsDelta('{"a": }')]),
        (FUNCTIONGEMMA, "<start_function_call>call:f{<escape>x<escape>}<end_function_call>", None),
        (GEMMA_4, "<|tool_call>:f{a:1}<tool_call|>", [F, ArgumentsDelta('{"a": 1}')]),
        (GEMMA_4, "<|tool_call>.f{a:1}<tool_call|>", None),
    ],
)
def test_output_is_parsed_as_expected(tool_format, text, expected):
    events = _parse(tool_format, text)
    if text.endswith("[["):  # too deep: broken, and no more is kept than what came
        assert events[0] == F
        assert events[1].text == '{"a": ' + "[" * 65 + "[" * 5
        return
    assert events == ([ContentDelta(text)] if expected is None else expected)


def _matcher(compiler, schema):  # noqa: F811
    bound = SchemaGrammar(schema, "<escape>", {})
    bound.arguments("start")
    source = llguidance.LLMatcher.grammar_from_lark("\n".join(bound.rules))
    assert llguidance.LLMatcher.validate_grammar(source, compiler) == ""
    return llguidance.LLMatcher(compiler, source)


Q = "<escape>"
_SHARED = {"$defs": {"point": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}}}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "string", "enum": ["a", "b"]}, [f"{Q}a{Q}"], ["a", f"{Q}c{Q}"]),
        ({"enum": [1, "1", None]}, ["1", f"{Q}1{Q}", "null"], ["2"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, [f"{Q}ab{Q}", f"{Q}<es{Q}"], [f"{Q}a{Q}", f"{Q}abcd{Q}"]),
        ({"type": "array", "minItems": 1, "maxItems": 2}, ["[1]", "[1,2]"], ["[]", "[1,2,3]"]),
        ({"type": "array", "items": {"type": "integer"}}, ["[]", "[1,2,3]"], ["[true]"]),
        ({"type": "array", "maxItems": 0}, ["[]"], ["[1]"]),
        ({"type": "array"}, ["[]", f"[1,{Q}a{Q},true]"], ["[1,]"]),
        ({"$ref": "#/$defs/point"}, ["{x:1.5}"], ["{}", "{x:true}", "{y:1}"]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, [f"{Q}{Q}", "null"], ["1"]),
        ({"type": ["integer", "boolean"]}, ["1", "false"], ["null", f"{Q}{Q}"]),
        ({"type": ["string", "object"], "properties": {}}, [f"{Q}a{Q}", "{}"], ["1"]),
        ({}, [f"{Q}a{Q}", "1.5", "null"], ["[1]"]),
        (True, ["7"], ["{}"]),
    ],
)  # fmt: skip
def test_the_grammar_admits_values_of_the_schema_only(compiler, schema, good, bad):  # noqa: F811
    matcher = _matcher(compiler, {**_SHARED, "properties": {"a": schema, "o": {"type": "null"}}, "required": ["a"]})
    for text in good:
        assert _admits(matcher, compiler, f"{{a:{text}}}"), text
        assert _admits(matcher, compiler, f"{{a:{text},o:null}}"), text
    for text in [*bad, ""]:
        assert not _admits(matcher, compiler, f"{{a:{text}}}"), text
    assert not _admits(matcher, compiler, "{o:null}")


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        ({"properties": {"a": {"type": "array", "minItems": "x"}}}, "minItems"),
        ({"properties": {"a b": {}}}, "a b"),
        ({"properties": {"a": {"type": "nothing"}}}, "that no value can have"),
        ({"properties": {"a": {"type": "string", "not": {"const": "x"}}}}, "not"),
        ({"oneOf": [{}, {}]}, "oneOf"),
        ({"properties": {"a": {"$ref": "#"}}}, "levels"),
        ({"properties": {"a": {"$ref": "other.json"}}}, "cannot be resolved"),
        ({"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}] * 9}}}, "levels"),
    ],
)
def test_schemas_that_cannot_be_enforced_are_refused_by_name(schema, said):
    with pytest.raises(RequestError, match=said):
        SchemaGrammar({"type": "object", **schema}, "<escape>", {}).arguments("start")
