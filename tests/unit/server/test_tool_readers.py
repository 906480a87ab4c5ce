"""Calls in a growing text: every format, every way to go wrong, any way to cut the text, and linear work."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.chat.events import Arguments, CallStart, Content, merged
from server.chat.tool_parsers.base import HermesToolParser
from server.chat.tool_parsers.other_readers import LlamaToolParser, MistralToolParser

NAMES = frozenset({"f", "get_weather"})
F = CallStart("f")
WEATHER = CallStart("get_weather")
EMPTY = Arguments("{}")

HERMES = {
    "one": ('<tool_call>\n{"name": "f", "arguments": {"a": [1, {"b": null}]}}\n</tool_call>', [
        F, Arguments('{"a": [1, {"b": null}]}')]),
    "words before, between and behind": (
        'Let me see.\n<tool_call>{"name":"f","arguments":{}}</tool_call>and<tool_call>{"name":"f"}</tool_call> so',
        [Content("Let me see.\n"), F, EMPTY, Content("and"), F, EMPTY, Content(" so")]),
    "white space is packing": (
        '\n\n<tool_call>{"name":"f","arguments":{}}</tool_call>\n\n<tool_call>{"name":"f"}</tool_call>\n',
        [F, EMPTY, F, EMPTY]),
    "arguments first": ('<tool_call>{"arguments":{"b":1},"id":7,"name":"f"}</tool_call>', [F, Arguments('{"b":1}')]),
    "arguments in a string": (
        '<tool_call>{"name":"f","arguments":"{\\"a\\": \\"\\u00e9\\"}"}</tool_call>', [F, Arguments('{"a": "é"}')]),
    "null for arguments": ('<tool_call>{"name":"f","arguments":null }</tool_call>', [F, EMPTY]),
    "a line end in a string": ('<tool_call>{"name":"f","arguments":{"a":"x\ny"}}', [F, Arguments('{"a":"x\\ny"}')]),
    "marks inside strings": (
        '<tool_call>{"name":"f","arguments":{"a":"</tool_call>}"}}</tool_call>',
        [F, Arguments('{"a":"</tool_call>}"}')]),
    "an unknown name": ('<tool_call>{"name":"g","arguments":{}}</tool_call>', None),
    "no name": ('<tool_call>{"arguments":{}}</tool_call>', None),
    "no object": ("<tool_call>[1]</tool_call>", None),
    "no JSON": ("<tool_call>f(1)</tool_call>", None),
    "bad arguments": ('<tool_call>{"name":"f","arguments":[1]}</tool_call>', None),
    "bad arguments in a string": ('<tool_call>{"name":"f","arguments":"[1]"}</tool_call>', None),
    "cut in the mark": ("words <tool_ca", None),
    "cut before the name": ('<tool_call>\n{"nam', None),
    "cut inside arguments": ('<tool_call>{"name":"f","arguments":{"a":', [F, Arguments('{"a":')]),
    "only the end mark": ("x</tool_call>y", None),
    "broken arguments go on to the end mark": (
        '<tool_call>{"name":"f","arguments":{"a":1,,}}</tool_call>so', [F, Arguments('{"a":1,,}}'), Content("so")]),
    "a mark inside an attempt begins anew": (
        '<tool_call><tool_call>{"name":"f"}</tool_call>', [Content("<tool_call>"), F, EMPTY]),
    "white space alone": ("  \n", None),
    "nothing": ("", None),
}  # fmt: skip
LLAMA = {
    "bare": ('{"name": "f", "parameters": {"a": 1}}', [F, Arguments('{"a": 1}')]),
    "with the mark": ('<|python_tag|>{"name": "f", "parameters": {}}', [F, EMPTY]),
    "with a kind": ('{"type": "function", "name": "f", "parameters": {}}', [F, EMPTY]),
    "several": (
        '{"name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {}}', [F, EMPTY, WEATHER, EMPTY]),
    "words, then the mark": ('So <|python_tag|>{"name": "f", "parameters": {}}', [Content("So "), F, EMPTY]),
    "words behind": ('{"name": "f", "parameters": {}} done', [F, EMPTY, Content(" done")]),
    "words, then braces": ('So {"name": "f", "parameters": {}}', None),
    "other JSON": ('  {"answer": {"name": "f"}}', None),
    "a built-in tool": ('<|python_tag|>brave_search.call(query="x")', None),
    "a cut mark": ("<|pyth", None),
    "not the mark": ("<|x", None),
    "a separator alone": ("; x", None),
}  # fmt: skip
MISTRAL = {
    "a list": (
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "get_weather", "arguments": {}, "id": "x"}]',
        [F, Arguments('{"a": 1}'), WEATHER, EMPTY]),
    "one object": ('[TOOL_CALLS]{"name": "f", "arguments": {}}', [F, EMPTY]),
    "by name": ('[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]get_weather[CALL_ID]x1[ARGS]{}', [
        F, Arguments('{"a": 1}'), WEATHER, EMPTY]),
    "by name, without a tag": ('So[TOOL_CALLS]f{"a": 1}', [Content("So"), F, Arguments('{"a": 1}')]),
    "an unknown name": ("[TOOL_CALLS]g[ARGS]{}", None),
    "an unknown tag": ("[TOOL_CALLS]f[ARX]{}", None),
    "two names": ("[TOOL_CALLS]f g{}", None),
    "a list of numbers": ("[TOOL_CALLS][1]", None),
    "cut": ("[TOOL_CALLS]", None),
    "broken": ('[TOOL_CALLS]f[ARGS]{"a" 1}', [F, Arguments('{"a" 1}')]),
}  # fmt: skip
CASES = [
    pytest.param(reader, text, expected, id=f"{reader.__name__}, {name}")
    for reader, cases in ((HermesToolParser, HERMES), (LlamaToolParser, LLAMA), (MistralToolParser, MISTRAL))
    for name, (text, expected) in cases.items()
]


def _read(reader, pieces):
    events = [event for piece in pieces for event in reader.push(piece)]
    return merged([*events, *reader.flush()])


@pytest.mark.parametrize(("reader", "text", "expected"), CASES)
def test_what_is_read(reader, text, expected):
    expected = merged([Content(text)]) if expected is None else expected
    assert _read(reader(NAMES), [text]) == expected
    assert _read(reader(NAMES), list(text)) == expected


def test_arguments_are_handed_out_as_they_come():
    reader = HermesToolParser(NAMES)
    assert reader.push('<tool_call>{"name": "f", "arg') == []
    assert reader.push('uments": {"a"') == [F, Arguments('{"a"')]
    assert reader.push(": 1") == [Arguments(": 1")]


@pytest.mark.parametrize("reader", [HermesToolParser, LlamaToolParser, MistralToolParser])
def test_without_parallel_calls_only_the_first_counts(reader):
    text = {
        HermesToolParser: (
            'a<tool_call>{"name":"f"}</tool_call>b<tool_call>{"name":"f","arguments":{"x":1}}</tool_call>'
        ),
        LlamaToolParser: '<|python_tag|>{"name":"f"};{"name":"f","parameters":{"x":1}}',
        MistralToolParser: 'a[TOOL_CALLS][{"name":"f"},{"name":"f","arguments":{"x":1}}]',
    }[reader]
    before = [] if reader is LlamaToolParser else [Content("a")]
    assert _read(reader(NAMES, parallel=False), [text]) == [*before, F, EMPTY]
    assert _read(reader(NAMES, parallel=False), list(text)) == [*before, F, EMPTY]


# Pieces of all formats in any order: most are nonsense, some are calls.
_WORDS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<tool_", '{"name":', '"f"', ',"arguments":', ',"parameters":', '{"a":"\\', '"',
     "}", "[TOOL_CALLS]", "[", "]", "[ARGS]", "f", "<|python_tag|>", ";", " ", "\n", "null", "1", ",",
     "é", '{"name":"f"}']
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([HermesToolParser, LlamaToolParser, MistralToolParser]),
    st.booleans(),
    st.lists(_WORDS, max_size=25).map("".join),
    st.data(),
)
def test_how_the_text_is_cut_never_matters(reader, parallel, text, data):
    whole = _read(reader(NAMES, parallel), [text])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert _read(reader(NAMES, parallel), pieces) == whole
    assert _read(reader(NAMES, parallel), list(text)) == whole


def _long(kind, count):
    """(reader, text): inputs that would be expensive for a reader that starts over."""
    body = '{"name": "f", "arguments": {"a": "' + "x" * 40 + '"}}'
    return {
        "many calls": (HermesToolParser, f"<tool_call>{body}</tool_call>\n" * count),
        "one long call": (
            HermesToolParser,
            '<tool_call>{"name":"f","arguments":{"a":"' + "<tool_call" * 8 * count + '"}}',
        ),
        "many beginnings": (HermesToolParser, "<tool_call>{" * 8 * count),
        "almost marks": (HermesToolParser, "<tool_cal" * 8 * count),
        "white space": (LlamaToolParser, " \n" * 40 * count),
        "many objects": (LlamaToolParser, ";".join([body] * count)),
        "a long list": (MistralToolParser, "[TOOL_CALLS][" + ",".join([body] * count)),
        "a long name": (MistralToolParser, "[TOOL_CALLS]" + "f" * 80 * count),
    }[kind]


_KINDS = [
    "many calls",
    "one long call",
    "many beginnings",
    "almost marks",
    "white space",
    "many objects",
    "a long list",
]


@pytest.mark.parametrize("size", [1, 7, 10**9])
@pytest.mark.parametrize("kind", [*_KINDS, "a long name"])
def test_twice_the_text_is_twice_the_work(kind, size):
    def work(count):
        make, text = _long(kind, count)
        reader = make(NAMES)
        _read(reader, [text[start : start + size] for start in range(0, len(text), size)])
        return reader.scanned / len(text)

    small, large = work(20), work(40)
    assert large <= small * 1.05
    assert large <= 12  # the longest mark: how often a character can be looked at


def test_numbers_and_escapes_are_checked():
    good = ["-0.5e+10", "true", '"\\u00e9\\n\\""', "[]", '{"a":{}}', "[1,[2]]"]
    bad = ["01", "1.", "+1", "tru", '"\\x"', '"\\u00g0"', "[1,]", '{"a"}', "{,}", "[1 2]", "nulll"]
    for value in good:
        text = f'<tool_call>{{"name":"f","arguments":{{"a":{value}}}}}</tool_call>'
        events = _read(HermesToolParser(NAMES), [text])
        assert events == [F, Arguments(f'{{"a":{value}}}')]
        json.loads(events[1].text)
    for value in bad:
        text = f'<tool_call>{{"x":{value},"name":"f"}}</tool_call>'
        assert _read(HermesToolParser(NAMES), [text]) == [Content(text)], value
