"""Parsers of tool calls: every format, malformed calls, any way to cut the text, and linear work."""

from __future__ import annotations

import json

import pytest

from oarlock.server.chat.tool_parsers.call_parser import (
    ArgumentsDelta,
    ContentDelta,
    JsonScanner,
    MalformedError,
    ToolCallStart,
    merged,
)
from oarlock.server.chat.tool_parsers.hermes import HermesToolParser
from oarlock.server.chat.tool_parsers.json_list import MistralToolParser
from oarlock.server.chat.tool_parsers.llama import LlamaToolParser

NAMES: dict[str, dict] = {"f": {}, "get_weather": {}}
F = ToolCallStart("f")
WEATHER = ToolCallStart("get_weather")
EMPTY = ArgumentsDelta("{}")

HERMES = {
    "one": ('<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": null}]}}\n</tool_call>', [
        F, ArgumentsDelta('{"a": [1, {"b": null}]}')]),
    "words before, between and behind": (
        'Let me see.\n<tool_call>{"name":"f","arguments":{}}</tool_call>and<tool_call>{"name":"f"}</tool_call> so',
        [ContentDelta("Let me see.\n"), F, EMPTY, ContentDelta("and"), F, EMPTY, ContentDelta(" so")]),
    "white space is packing": (
        '\n\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n\n<tool_call>{"name":"f"}</tool_call>\n',
        [F, EMPTY, F, EMPTY]),
    "arguments first": (
        '<tool_call>{"arguments":{"b":1},"id":7,"name":"f"}</tool_call>', [F, ArgumentsDelta('{"b":1}')]),
    "arguments in a string": (
        '<tool_call>{"name":"f","arguments":"{\\"a\\": \\"\\u00e9\\"}"}</tool_call>',
        [F, ArgumentsDelta('{"a": "é"}')]),
    "null for arguments": ('<tool_call>{"name":"f","arguments":null }</tool_call>', [F, EMPTY]),
    "a line end in a string": (
        '<tool_call>{"name":"f","arguments":{"a":"x\ny"}}', [F, ArgumentsDelta('{"a":"x\\ny"}')]),
    "delimiters inside strings": (
        '<tool_call>{"name":"f","arguments":{"a":"</tool_call>}"}}</tool_call>',
        [F, ArgumentsDelta('{"a":"</tool_call>}"}')]),
    "an unknown name": ('<tool_call>{"name":"g","arguments":{}}</tool_call>', None),
    "no name": ('<tool_call>{"arguments":{}}</tool_call>', None),
    "no object": ("<tool_call>[1]</tool_call>", None),
    "no JSON": ("<tool_call>f(1)</tool_call>", None),
    "bad arguments": ('<tool_call>{"name":"f","arguments":[1]}</tool_call>', None),
    "bad arguments in a string": ('<tool_call>{"name":"f","arguments":"[1]"}</tool_call>', None),
    "cut in the delimiter": ("words <tool_ca", None),
    "cut before the name": ('<tool_call>\n{"nam', None),
    "cut inside arguments": ('<tool_call>{"name":"f","arguments":{"a":', [F, ArgumentsDelta('{"a":')]),
    "only the end delimiter": ("x</tool_call>y", None),
    "broken arguments go on to the end delimiter": (
        '<tool_call>{"name":"f","arguments":{"a":1,,}}</tool_call>so',
        [F, ArgumentsDelta('{"a":1,,}}'), ContentDelta("so")]),
    "a delimiter inside an attempt begins anew": (
        '<tool_call><tool_call>{"name":"f"}</tool_call>', [ContentDelta("<tool_call>"), F, EMPTY]),
    "white space alone": ("  \n", None),
    "nothing": ("", None),
}  # fmt: skip
LLAMA = {
    "bare": ('{"name": "f", "parameters": {"a": 1}}', [F, ArgumentsDelta('{"a": 1}')]),
    "with the tag": ('<|python_tag|>{"name": "f", "parameters": {}}', [F, EMPTY]),
    "with a kind": ('{"type": "function", "name": "f", "parameters": {}}', [F, EMPTY]),
    "several": (
        '{"name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {}}', [F, EMPTY, WEATHER, EMPTY]),
    "words, then the tag": ('So <|python_tag|>{"name": "f", "parameters": {}}', [ContentDelta("So "), F, EMPTY]),
    "words behind": ('{"name": "f", "parameters": {}} done', [F, EMPTY, ContentDelta(" done")]),
    "words, then a call": (
        'So {"name": "f", "parameters": {}} {"name": "get_weather", "arguments": {"a": 1}}',
        [ContentDelta("So "), F, EMPTY, WEATHER, ArgumentsDelta('{"a": 1}')]),
    "words, then a name alone": ('So {"name": "f"}', None),
    "words, then an unknown name": ('So {"name": "g", "parameters": {"name": "f", "parameters": {}}}.', None),
    "words, then other JSON": ('So {"a": {"name": "f", "parameters": {}}} and {1', None),
    "words, then a broken object, then a call": (
        'So {"a": x {"name": "f", "parameters": {}}', [ContentDelta('So {"a": x '), F, EMPTY]),
    "other JSON": ('  {"answer": {"name": "f"}}', None),
    "a built-in tool": ('<|python_tag|>brave_search.call(query="x")', None),
    "a cut tag": ("<|pyth", None),
    "not the tag": ("<|x", None),
    "a separator alone": ("; x", None),
}  # fmt: skip
MISTRAL = {
    "a list": (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": {}, "id": "x"}]',
        [F, ArgumentsDelta('{"a": 1}'), WEATHER, EMPTY]),
    "one object": ('[TOOL_CALLS]{"name": "f", "arguments": {}}', [F, EMPTY]),
    "by name": ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]x1[ARGS]{}', [
        F, ArgumentsDelta('{"a": 1}'), WEATHER, EMPTY]),
    "by name, without a tag": ('So[TOOL_CALLS]f{"a": 1}', [ContentDelta("So"), F, ArgumentsDelta('{"a": 1}')]),
    "an unknown name": ("[TOOL_CALLS]g[ARGS]{}", None),
    "an unknown tag": ("[TOOL_CALLS]f[ARX]{}", None),
    "two names": ("[TOOL_CALLS]f g{}", None),
    "a list of numbers": ("[TOOL_CALLS][1]", None),
    "cut": ("[TOOL_CALLS]", None),
    "broken": ('[TOOL_CALLS]f[ARGS]{"a": 1 2}', [F, ArgumentsDelta('{"a": 1 2}')]),
    "a set": ('[TOOL_CALLS]f[ARGS]{"a" 1}', None),
}  # fmt: skip
CASES = [
    pytest.param(parser, text, expected, id=f"{parser.__name__}, {name}")
    for parser, cases in ((HermesToolParser, HERMES), (LlamaToolParser, LLAMA), (MistralToolParser, MISTRAL))
    for name, (text, expected) in cases.items()
]


def _parse(parser, pieces):
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged([*events, *parser.flush()])


@pytest.mark.parametrize(("parser", "text", "expected"), CASES)
def test_output_is_parsed_as_expected(parser, text, expected):
    expected = merged([ContentDelta(text)]) if expected is None else expected
    assert _parse(parser(NAMES), [text]) == expected
    assert _parse(parser(NAMES), list(text)) == expected


def test_arguments_are_returned_as_they_come():
    parser = HermesToolParser(NAMES)
    assert parser.push('<tool_call>{"name": "f", "arg') == []
    assert parser.push('uments": {"a"') == []  # it may still be no object
    assert parser.push(":") == [F, ArgumentsDelta('{"a":')]
    assert parser.push(" 1") == [ArgumentsDelta(" 1")]


@pytest.mark.parametrize("parser", [HermesToolParser, LlamaToolParser, MistralToolParser])
def test_without_parallel_calls_only_the_first_counts(parser):
    text = {
        HermesToolParser: (
            'a<tool_call>{"name":"f"}</tool_call>b<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>'
        ),
        LlamaToolParser: '<|python_tag|>{"name":"f"};{"name":"f","parameters":{"x":1}}',
        MistralToolParser: 'a[TOOL_CALLS][{"name":"f"},{"name":"f","arguments":{"x":1}}]',
    }[parser]
    before = [] if parser is LlamaToolParser else [ContentDelta("a")]
    assert _parse(parser(NAMES, parallel=False), [text]) == [*before, F, EMPTY]
    assert _parse(parser(NAMES, parallel=False), list(text)) == [*before, F, EMPTY]


def _long(kind, count):
    """(parser, text): inputs that would be expensive for a parser that starts over."""
    body = '{"name": "f", "arguments": {"a": "' + "x" * 40 + '"}}'
    return {
        "many calls": (HermesToolParser, f"<tool_call>{body}</tool_call>\n" * count),
        "one long call": (
            HermesToolParser,
            '<tool_call>{"name":"f","arguments":{"a":"' + "<tool_call" * 8 * count + '"}}',
        ),
        "many beginnings": (HermesToolParser, "<tool_call>{" * 8 * count),
        "almost delimiters": (HermesToolParser, "<tool_cal" * 8 * count),
        "white space": (LlamaToolParser, " \n" * 40 * count),
        "many objects": (LlamaToolParser, ";".join([body] * count)),
        "a long list": (MistralToolParser, "[TOOL_CALLS][" + ",".join([body] * count)),
        "a long name": (MistralToolParser, "[TOOL_CALLS]" + "f" * 80 * count),
    }[kind]


_KINDS = [
    "many calls",
    "one long call",
    "many beginnings",
    "almost delimiters",
    "white space",
    "many objects",
    "a long list",
]


@pytest.mark.parametrize("kind", [*_KINDS, "a long name"])
def test_twice_the_text_is_twice_the_work(kind):
    def work(count, size):
        make, text = _long(kind, count)
        parser = make(NAMES)
        _parse(parser, [text[start : start + size] for start in range(0, len(text), size)])
        return parser.scanned / len(text)

    for size in (1, 7, 10**9):
        small, large = work(20, size), work(40, size)
        assert large <= small * 1.05
        assert large <= 12  # the length of the longest delimiter: how often a character can be looked at


def test_numbers_and_escapes_are_checked():
    good = ["-0.5e+10", "true", '"\\u00e9\\n\\""', "[]", '{"a":{}}', "[1,[2]]"]
    bad = ["01", "1.", "+1", "tru", '"\\x"', '"\\u00g0"', "[1,]", '{"a"}', "{,}", "[1 2]", "nulll"]
    for value in good:
        text = f'<tool_call>{{"name":"f","arguments":{{"a":{value}}}}}</tool_call>'
        events = _parse(HermesToolParser(NAMES), [text])
        assert events == [F, ArgumentsDelta(f'{{"a":{value}}}')]
        json.loads(events[1].text)
    for value in bad:
        text = f'<tool_call>{{"x":{value},"name":"f"}}</tool_call>'
        assert _parse(HermesToolParser(NAMES), [text]) == [ContentDelta(text)], value


def test_an_escaped_character_has_four_digits():
    scanner = JsonScanner()
    for character in '{"a": "\\u00e':
        scanner.push(character)
    with pytest.raises(MalformedError):
        scanner.push('"')
