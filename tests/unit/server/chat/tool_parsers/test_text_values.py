"""Arguments written as plain text: what they mean by their schema."""

from __future__ import annotations

import json

import pytest

from oarlock.server.chat.tool_parsers.text_values import argument_names, is_text, json_value, property_schema

ROOT = {
    "$defs": {
        "word": {"type": "string"},
        "loop": {"$ref": "#/$defs/loop"},
        "many": {"anyOf": [{"$ref": "#/$defs/word"}]},
    }
}
STRING_OR_NULL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "expected"),
    [
        ({"type": "string"}, "5", '"5"'),
        ({"type": "string"}, "true", '"true"'),
        ({"type": "string"}, ' {"a": 1} ', '" {\\"a\\": 1} "'),
        ({"type": "string"}, '"é"\n', '"\\"é\\"\\n"'),
        ({"type": "integer"}, " 5\n", "5"),
        ({"type": "integer"}, "five", '"five"'),
        ({"type": "number"}, "-1.50", "-1.50"),
        ({"type": "number"}, "NaN", '"NaN"'),
        ({"type": "boolean"}, "True", "true"),
        ({"type": "boolean"}, "false", "false"),
        ({"type": "null"}, "None", "null"),
        ({"type": "array"}, '["a", 1]', '["a", 1]'),
        ({"type": "array"}, "[1", '"[1"'),
        ({"type": "object"}, '{"a": {"b": []}}', '{"a": {"b": []}}'),
        ({"type": ["string", "null"]}, "null", "null"),
        ({"type": ["string", "null"]}, "5", '"5"'),
        ({"type": ["string", "integer"]}, "5", "5"),
        ({"type": ["string", "integer"]}, "5.5", '"5.5"'),
        (STRING_OR_NULL, '"null"', '"null"'),
        (STRING_OR_NULL, "words", '"words"'),
        ({"enum": ["1", "2"]}, "1", '"1"'),
        ({"enum": [1, 2]}, "1", "1"),
        ({"const": "7"}, "7", '"7"'),
        ({"$ref": "#/$defs/word"}, "7", '"7"'),
        ({"$ref": "#/$defs/many"}, "7", '"7"'),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "7", '"7"'),
        ({}, "7", "7"),
        (True, "x", '"x"'),
        ({"$ref": "#/$defs/loop"}, "7", "7"),
        ({"$ref": "#/none"}, "x", '"x"'),
        ({"type": "array"}, "[" * 100_000, json.dumps("[" * 100_000)),
    ],
)
def test_text_arguments_become_json_values(schema, text, expected):
    root = {**ROOT, "properties": {"a": schema}}
    found = property_schema(root, "a")
    assert json_value(text, found, root) == expected
    json.loads(expected)


def test_strings_alone_are_returned_as_they_come():
    assert is_text({"type": "string"}, ROOT)
    assert not is_text({"type": ["string", "null"]}, ROOT)
    assert not is_text(True, ROOT)


def test_the_order_of_arguments_is_the_schemas():
    schema = {"properties": {"b": {}, "never": False, "a": {}}, "required": ["a", "c"]}
    assert argument_names(schema) == [("b", False), ("a", True), ("c", True)]


def test_a_schema_that_refers_to_itself_many_times_takes_no_time():
    many = {"anyOf": [{"$ref": "#/$defs/a"}] * 50 + [{"$ref": "#/$defs/b"}] * 50}
    root = {"$defs": {"a": many, "b": {**many, "type": ["string", ["x"]]}}, "properties": {"p": many}}
    assert not is_text(property_schema(root, "p"), root)
