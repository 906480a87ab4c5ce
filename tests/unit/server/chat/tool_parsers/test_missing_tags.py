"""Calls whose tags are incomplete: the next tag ends a value, and a following call is read."""

from __future__ import annotations

import json

import pytest

from oarlock.server.chat.tool_parsers.call_parser import ArgumentsDelta, ContentDelta, ToolCallStart, merged
from oarlock.server.chat.tool_parsers.minimax_m3 import MINIMAX_M3
from oarlock.server.chat.tool_parsers.named import DEEPSEEK_V31, KIMI_K2
from oarlock.server.chat.tool_parsers.registry import FORMATS
from oarlock.server.chat.tool_parsers.xml import GLM45, QWEN3_CODER, SEED_OSS
from tests.unit.server.chat.tool_parsers.written import WRITERS, deepseek

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = {"f": SCHEMA, "g": {}}
QWEN = (
    "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n<parameter=n>\n5\n</parameter>\n</function>\n"
    "</tool_call>"
)
SEED = QWEN.replace("tool_call>", "seed:tool_call>").replace(">\nx\n<", ">x<").replace(">\n5\n<", ">5<")
GLM = (
    "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n<arg_key>n</arg_key>\n<arg_value>5</arg_value>\n"
    "</tool_call>"
)
WHOLE = {"a": "x", "n": 5}
XML = [(QWEN3_CODER, QWEN), (SEED_OSS, SEED), (GLM45, GLM)]


def _parse(tool_format, text, *, is_ended=True):
    """Calls with their arguments as text, and all content; the same for one piece and for single characters."""
    results = []
    for pieces in ([text], list(text)):
        parser = tool_format.parser(TOOLS)
        events = [event for piece in pieces for event in parser.push(piece)]
        results.append(merged([*events, *parser.flush(is_ended)]))
    assert results[0] == results[1]
    calls, content = [], ""
    for event in results[0]:
        if isinstance(event, ToolCallStart):
            calls.append([event.name, ""])
        elif isinstance(event, ArgumentsDelta):
            calls[-1][1] += event.text
        else:
            content += event.text
    return calls, content


def _read(tool_format, text, **options):
    calls, content = _parse(tool_format, text, **options)
    return [(name, json.loads(arguments)) for name, arguments in calls], content


def _without(text):
    """The text without each one of its closing tags."""
    for tag in ("</parameter>", "</function>", "</arg_key>", "</arg_value>", "</tool_call>", "</seed:tool_call>"):
        for number in range(text.count(tag)):
            parts = text.split(tag)
            before, behind = tag.join(parts[: number + 1]), tag.join(parts[number + 1 :])
            yield tag, before + behind.removeprefix("\n" if before.endswith("\n") else "")


CASES = [
    pytest.param(tool_format, changed, id=f"{tool_format.name} without {tag} {number}")
    for tool_format, text in XML
    for number, (tag, changed) in enumerate(_without(text))
]


@pytest.mark.parametrize(("tool_format", "text"), CASES)
def test_a_call_without_one_of_its_closing_tags_is_whole(tool_format, text):
    assert _read(tool_format, text) == ([("f", WHOLE)], "")


@pytest.mark.parametrize(("tool_format", "text"), CASES)
def test_the_call_behind_it_is_read(tool_format, text):
    following = WRITERS[tool_format.name]([("g", {})])
    assert _read(tool_format, f"So {text}\n{following}") == ([("f", WHOLE), ("g", {})], "So ")


@pytest.mark.parametrize(("tool_format", "text"), XML)
def test_all_closing_tags_are_missing(tool_format, text):
    for tag in ("</parameter>", "</function>", "</arg_value>", "</tool_call>", "</seed:tool_call>"):
        text = text.replace(f"\n{tag}", "").replace(tag, "")
    assert _read(tool_format, text) == ([("f", WHOLE)], "")
    assert _read(tool_format, text + text) == ([("f", WHOLE)] * 2, "")


@pytest.mark.parametrize(("tool_format", "text"), XML)
def test_an_answer_that_was_cut_is_not_completed(tool_format, text):
    for end in ("x", "5"):
        (call,), content = _parse(tool_format, text[: text.index(end) + 1], is_ended=False)
        assert content == ""
        with pytest.raises(json.JSONDecodeError):
            json.loads(call[1])


@pytest.mark.parametrize("name", ["a\n", " a >\n", '"a">\n', "'a'>"])
def test_a_misspelt_parameter_is_read(name):
    for tool_format, text in XML[:2]:
        end = ">\n" if tool_format is QWEN3_CODER else ">"
        if tool_format is SEED_OSS and name != "a\n":
            name = name.rstrip("\n")
        assert _read(tool_format, text.replace(f"<parameter=a{end}", f"<parameter={name}")) == ([("f", WHOLE)], "")


@pytest.mark.parametrize("name", ["", ">", "<", "a</parameter>", "a" * 300])
def test_a_call_that_begins_with_no_parameter_is_content(name):
    text = QWEN.replace("<parameter=a>", f"<parameter={name}")
    calls, content = _parse(QWEN3_CODER, text + QWEN)
    assert [call[0] for call in calls] == ["f"]
    assert json.loads(calls[0][1]) == WHOLE
    assert content.startswith("<tool_call>\n<function=f>\n<parameter=")


def test_values_keep_every_other_tag():
    value = "<b>\n<tool></tool> </param> <function> </arg>\n\n"
    text = QWEN.replace("\nx\n", f"\n{value}\n")
    assert _read(QWEN3_CODER, text) == ([("f", {"a": value, "n": 5})], "")


SECTION, CALL, ARGUMENTS, END, SECTION_END = (
    f"<|tool_{word}|>"
    for word in ("calls_section_begin", "call_begin", "call_argument_begin", "call_end", "calls_section_end")
)


@pytest.mark.parametrize("head", ["functions.f:0", "f:0", "functions.f", "f", " functions.f:12 ", "\nf:0\n"])
@pytest.mark.parametrize("before", ["", " ", "\n"])
def test_ids_around_the_arguments_of_kimi(head, before):
    text = f'{SECTION}{CALL}{head}{ARGUMENTS}{before}{{"a": "x"}}{END}{SECTION_END}'
    assert _read(KIMI_K2, text) == ([("f", {"a": "x"})], "")
    unknown = text.replace("f:", "h:").replace(f"f{ARGUMENTS}", f"h{ARGUMENTS}")
    if unknown != text:
        assert _parse(KIMI_K2, unknown) == ([], unknown)


NO_OBJECTS = ['{"x"}', '{"x")]', "{1}", "{a}", '["x"]', '"x"', "1", "{,}", "{{}}"]


@pytest.mark.parametrize("arguments", NO_OBJECTS)
@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        (next(known for known in FORMATS if known.name == name), text)
        for name, text in {
            "hermes": '<tool_call>{{"name": "f", "arguments": {}}}</tool_call>',
            "llama3": '{{"name": "f", "parameters": {}}}',
            "mistral": '[TOOL_CALLS][{{"name": "f", "arguments": {}}}]',
            "mistral_named": "[TOOL_CALLS]f[ARGS]{}",
            "granite": '<|tool_call|>[{{"name": "f", "arguments": {}}}]',
            "kimi_k2": f"{SECTION}{CALL}functions.f:0{ARGUMENTS}{{}}{END}{SECTION_END}",
            "qwen3_coder": "<tool_call><function=f>{}</function></tool_call>",
            "glm45": "<tool_call>f\n{}</tool_call>",
            "functiongemma": "<start_function_call>call:f{}<end_function_call>",
        }.items()
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_call_without_an_object_is_content(tool_format, text, arguments):
    written = text.format(arguments)
    assert _parse(tool_format, written) == ([], written)


def test_the_announcement_waits_for_the_first_key():
    begin, sep = deepseek("tool call begin"), deepseek("tool sep")
    parser = DEEPSEEK_V31.parser(TOOLS)
    assert parser.push(f'{deepseek("tool calls begin")}{begin}f{sep}{{"a') == []
    assert parser.push('":') == [ToolCallStart("f"), ArgumentsDelta('{"a":')]
    parser = QWEN3_CODER.parser(TOOLS)
    assert parser.push("<tool_call><function=f>\n<parameter=a") == []
    assert parser.push(">x") == [ToolCallStart("f"), ArgumentsDelta('{"a": "x')]
    parser = DEEPSEEK_V31.parser(TOOLS)
    text = f"{deepseek('tool calls begin')}{begin}f{sep}{{"
    assert parser.push(text) == []
    assert parser.flush() == [ContentDelta(text)]


M3_SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "string"},
        "l": {"type": "array", "items": {"type": "integer"}},
        "o": {"type": "object", "properties": {"k": {"type": "string"}, "deep": {"type": "array"}}},
    },
}


@pytest.mark.parametrize(
    ("written", "arguments"),
    [
        ("@<a>x@</a>@<l>@<item>1@</item>@<item>2@</item>@</l>", {"a": "x", "l": [1, 2]}),
        ("@<o>@<k>5@</k>@<deep>@<item>a@</item>@<item>@<b>true@</b>@</item>@</deep>@</o>",
         {"o": {"k": "5", "deep": ["a", {"b": True}]}}),
        ("@<a> <b>\n</b> @</a>", {"a": " <b>\n</b> "}),
        ("@<a>x@<l>[1]@</l>", {"a": "x", "l": [1]}),
        ("@<a>x", {"a": "x"}),
        ("@<l>@<item>1@</item>", {"l": [1]}),
        ("", {}),
    ],
)  # fmt: skip
def test_elements_of_minimax_m3(written, arguments):
    text = f'@<tool_call>\n@<invoke name="f">{written}@</invoke>\n@</tool_call>'.replace("@", "]<]minimax[>[")
    results = []
    for pieces in ([text], list(text)):
        parser = MINIMAX_M3.parser({"f": M3_SCHEMA})
        events = [event for piece in pieces for event in parser.push(piece)]
        results.append(merged([*events, *parser.flush()]))
    assert results[0] == results[1]
    start, written_arguments = results[0]
    assert start == ToolCallStart("f")
    assert json.loads(written_arguments.text) == arguments
