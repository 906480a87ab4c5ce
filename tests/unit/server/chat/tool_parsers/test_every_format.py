"""Properties of every format: calls are read back however the text is cut, and forced ones match their schema."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import re
from pathlib import Path

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.engine.errors import RequestError
from oarlock.server.chat.detection import tool_format_of
from oarlock.server.chat.message_parser import HARMONY as HARMONY_MARKS
from oarlock.server.chat.message_parser import REASONING_FORMATS as MARKS
from oarlock.server.chat.prompt import ChatPrompt, response_grammar
from oarlock.server.chat.tool_choice import resolve_tool_choice
from oarlock.server.chat.tool_parsers.call_parser import ArgumentsDelta, ContentDelta, ToolCallStart, merged
from oarlock.server.chat.tool_parsers.harmony import HARMONY
from oarlock.server.chat.tool_parsers.hermes import UNKNOWN
from oarlock.server.chat.tool_parsers.registry import FORMATS
from oarlock.server.config.model_options import REASONING_PARSERS, TOOL_CALL_PARSERS
from oarlock.server.config.settings import Settings
from oarlock.server.llm.chat_template import ChatTemplate
from oarlock.server.llm.tokenizer import find_files
from oarlock.server.schemas.chat import ChatRequest
from tests.unit.server.chat.tool_parsers.written import ARGUMENTS_AS_TEXT, ONE_CALL, TEMPLATES, WHOLE_ANSWER, WRITERS

TOKENIZER = Path(__file__).resolve().parents[5] / "models" / "oarlock-demo" / "tokenizer.json"
SCHEMA = {
    "type": "object",
    "properties": {
        "s": {"type": "string"},
        "n": {"type": "integer", "minimum": -9, "maximum": 9999},
        "b": {"type": "boolean"},
        "l": {"type": "array", "items": {"type": "string"}},
        "o": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "e": {"enum": ["1", "two\n"]},
        "p": {"type": "string", "pattern": "^[a-z]{2}$", "maxLength": 3},
    },
    "required": ["s", "n"],
    "additionalProperties": False,
}
TOOLS = {"f": SCHEMA, "now": {"type": "object", "properties": {}, "additionalProperties": False}}
MESSAGES = [{"role": "user", "content": "x"}]
every_format = pytest.mark.parametrize("tool_format", [*FORMATS, UNKNOWN], ids=lambda tool_format: tool_format.name)

# Any text but the tags that no format of texts can hold inside a value.
_TEXT = st.text(st.sampled_from('ab1"\\{}[]<>/\n =é,:.'), max_size=12)
_OPTIONAL = {
    "b": st.booleans(),
    "l": st.lists(_TEXT, max_size=2),
    "o": st.none(),
    "e": st.sampled_from(["1", "two\n"]),
    "p": st.sampled_from(["ab", "zz"]),
}
_ARGUMENTS = st.fixed_dictionaries({"s": _TEXT, "n": st.integers(-9, 9999)}, optional=_OPTIONAL)


@pytest.fixture(scope="module")
def compiler():
    return llguidance.LLTokenizer(TOKENIZER.read_text())


def _request(**fields):
    tools = [{"type": "function", "function": {"name": name, "parameters": TOOLS[name]}} for name in TOOLS]
    return ChatRequest.model_validate({"messages": MESSAGES, "tools": tools, "tool_choice": "required", **fields})


def _matcher(compiler, tool_format, special_ids=None, **fields):
    choice = resolve_tool_choice(_request(**fields), tool_format)
    grammar = response_grammar(None, ChatPrompt("x", choice, False, False), special_ids or {})
    assert grammar is not None
    source = llguidance.LLMatcher.grammar_from_lark(grammar.text)
    assert llguidance.LLMatcher.validate_grammar(source, compiler) == ""
    return llguidance.LLMatcher(compiler, source)


def _admits(matcher, compiler, text):
    """Whether a grammar admits the whole text, and lets it end there."""
    matcher.reset()
    ids = compiler.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def _parse(parser, pieces):
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged([*events, *parser.flush()])


def _calls(events):
    """[(name, arguments)], and all content."""
    calls, content = [], ""
    for event in events:
        if isinstance(event, ToolCallStart):
            calls.append([event.name, ""])
        elif isinstance(event, ArgumentsDelta):
            calls[-1][1] += event.text
        else:
            content += event.text
    return [(name, json.loads(arguments)) for name, arguments in calls], content


def _cut(data, text):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def _detected(source, parsers=None):
    """The name of the format that is found for a template."""
    template = ChatTemplate(source, {"bos_token": "", "eos_token": ""}, parsers)
    try:
        return asyncio.run(tool_format_of(template)).name
    finally:
        template.close()


def test_every_format_has_a_writer_and_a_template():
    names = [tool_format.name for tool_format in [*FORMATS, UNKNOWN]]
    assert sorted(names) == sorted(WRITERS) == sorted(TEMPLATES)
    assert [_detected(TEMPLATES[name]) for name in names] == names


@every_format
@settings(max_examples=12, deadline=None)
@given(st.lists(st.tuples(st.just("f"), _ARGUMENTS) | st.just(("now", {})), min_size=1, max_size=3), st.data())
def test_written_calls_are_parsed_and_admitted_by_the_grammar(compiler, tool_format, calls, data):
    calls = [
        (name, {key: arguments[key] for key in TOOLS[name]["properties"] if key in arguments})
        for name, arguments in calls
    ]
    if tool_format.name in ONE_CALL:
        calls = calls[:1]
    text = WRITERS[tool_format.name](calls)
    for pieces in ([text], list(text), _cut(data, text)):
        assert _calls(_parse(tool_format.parser(TOOLS), pieces)) == (calls, "")
    assert _calls(_parse(tool_format.parser(TOOLS, parallel=False), [text])) == (calls[:1], "")
    assert _admits(_matcher(compiler, tool_format), compiler, text)


@every_format
def test_forced_calls_match_their_schema(compiler, tool_format):
    write, good = WRITERS[tool_format.name], {"s": "5", "n": 3}
    bound = _matcher(compiler, tool_format)
    assert _admits(bound, compiler, write([("f", good)]))
    for wrong in ({"s": "x"}, {"n": 3}, {**good, "n": 10_000}, {**good, "n": "x"}, {**good, "b": 2}, {**good, "z": 1}):
        assert not _admits(bound, compiler, write([("f", wrong)])), wrong
    for wrong in ({**good, "e": "2"}, {**good, "p": "abc"}, {**good, "o": [1]}):
        assert not _admits(bound, compiler, write([("f", wrong)])), wrong
    assert not _admits(bound, compiler, write([("g", good)]))
    assert not _admits(bound, compiler, "words " + write([("f", good)]))
    assert not _admits(bound, compiler, write([("f", good)])[:-1])
    named = _matcher(compiler, tool_format, tool_choice={"type": "function", "function": {"name": "now"}})
    assert _admits(named, compiler, write([("now", {})]))
    assert not _admits(named, compiler, write([("f", good)]))
    two = write([("now", {}), ("f", good)])
    assert _admits(bound, compiler, two) is (tool_format.name not in ONE_CALL)
    alone = _matcher(compiler, tool_format, parallel_tool_calls=False)
    assert not _admits(alone, compiler, two)
    assert _admits(alone, compiler, write([("now", {})]))


@every_format
def test_delimiters_that_are_special_tokens_can_be_forced(compiler, tool_format):
    """Every delimiter as a special token: the grammar compiles, and the tokens it begins with are the delimiter's."""
    special_ids = {text: number for number, text in enumerate(tool_format.delimiters, 300)}
    matcher = _matcher(compiler, tool_format, special_ids)
    written = WRITERS[tool_format.name]([("now", {})])
    opening = next((text for text in tool_format.delimiters if written.startswith(text)), None)
    if opening is not None:
        assert matcher.try_consume_tokens([special_ids[opening]]) == 1
    else:  # the format's calls begin with plain text
        assert tool_format.name in (
            *WHOLE_ANSWER,
            "phi4_mini_json",
            "command_r",
            "deepseek_v32",
            "deepseek_v4",
            "unknown",
        )


@every_format
def test_a_strict_tool_is_bound_where_the_model_may_choose(compiler, tool_format):
    if not tool_format.is_parsed:
        return
    strict = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}]
    matcher = _matcher(compiler, tool_format, tools=strict, tool_choice="auto")
    write, before = WRITERS[tool_format.name], "" if tool_format.name in WHOLE_ANSWER else "So < [ {\n"
    for text in ("", "Hello < [ world", before + write([("f", {"s": "x", "n": 1})])):
        assert _admits(matcher, compiler, text), text
    assert not _admits(matcher, compiler, before + write([("f", {"s": "x", "n": "y"})]))


def _fragments(name):
    """Pieces of two calls of the format, and of other things."""
    sample = WRITERS[name]([("f", {"s": "a<b", "n": 1}), ("now", {})])
    return [*re.findall(r"<[^<>]*>|\[[A-Z_]+\]|\w+|\s|.", sample), sample, "x", "</", "<tool_", "g", "\\", '"', "é"]


@every_format
@settings(max_examples=20, deadline=None)
@given(st.data())
def test_how_the_text_is_cut_never_matters(tool_format, data):
    fragments = st.sampled_from(_fragments(tool_format.name))
    text = data.draw(st.lists(fragments, max_size=25).map("".join))
    parallel = data.draw(st.booleans())
    whole = _parse(tool_format.parser(TOOLS, parallel), [text])
    assert _parse(tool_format.parser(TOOLS, parallel), _cut(data, text)) == whole
    assert _parse(tool_format.parser(TOOLS, parallel), list(text)) == whole


@every_format
def test_text_that_is_no_call_stays_content_exactly(tool_format):
    write = WRITERS[tool_format.name]
    if tool_format is HARMONY:  # each message has a head, which is packing
        assert _parse(HARMONY.parser(TOOLS), [write([("unknown", {})])]) == [ContentDelta("{}")]
        return
    opening = write([("now", {})]).partition("now")[0]
    texts = [write([("unknown", {})]), f"a {opening}x y", opening[:-1], f"{opening}{opening}no", f"b\n{opening}"]
    for text in filter(None, texts):
        assert _parse(tool_format.parser(TOOLS), [text]) == [ContentDelta(text)], text


@every_format
def test_a_call_that_is_cut_short_begins_and_nothing_is_made_up(tool_format):
    text = WRITERS[tool_format.name]([("f", {"s": "abc", "n": 12})])
    events = _parse(tool_format.parser(TOOLS), [text[: text.index("abc") + 2]])
    assert events[0] == ToolCallStart("f")
    assert '{"s":"ab'.startswith("".join(event.text for event in events[1:]).replace(" ", ""))
    assert all(isinstance(event, ArgumentsDelta) for event in events[1:])


@every_format
def test_twice_the_text_is_twice_the_work(tool_format):
    write = WRITERS[tool_format.name]
    opening = write([("now", {})]).partition("now")[0]

    def work(text, size):
        parser = tool_format.parser(TOOLS)
        _parse(parser, [text[start : start + size] for start in range(0, len(text), size)])
        return parser.scanned / len(text)

    call = write([("f", {"s": "x" * 40 + "</" * 20, "n": 1})])
    texts = filter(None, (call, opening + "f", opening[:-1], opening))
    for text, size in itertools.product(texts, (1, 7, 10**9)):
        small, large = work(text * 20, size), work(text * 40, size)
        assert large <= small * 1.05
        assert large <= 30  # the length of the longest delimiter: how often a character can be looked at


@pytest.mark.parametrize("name", [*ARGUMENTS_AS_TEXT, "functiongemma", "gemma4", "pythonic"])
def test_arguments_that_cannot_be_written_are_refused(name):
    tool_format = next(known for known in FORMATS if known.name == name)
    cases = [({"anyOf": [{}, {}]}, "anyOf"), ({"properties": {"a b": {}}}, "a b")]
    if name != "pythonic":  # its values are JSON
        cases.append(({"properties": {"a": {"allOf": [{"type": "string"}, {"minLength": 2}]}}}, "allOf"))
    for schema, said in cases:
        tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
        choice = resolve_tool_choice(_request(tools=tools), tool_format)
        with pytest.raises(RequestError, match=said) as caught:
            response_grammar(None, ChatPrompt("x", choice, False, False), {})
        assert caught.value.param == "tools"


def test_the_operator_chooses_by_any_name_of_a_format():
    names = [name for known in FORMATS for name in (known.name, *known.aliases)]
    assert sorted(names) == sorted(set(names)) == sorted(set(TOOL_CALL_PARSERS) - {"auto"})
    assert _detected(TEMPLATES["llama3"], {"tool_call_parser": "glm47"}) == "glm45"
    assert _detected(TEMPLATES["llama3"], {}) == "llama3"
    assert _detected(TEMPLATES["llama3"], {"tool_call_parser": "hermes"}) == "hermes"
    assert _detected(TEMPLATES["generic"], {"tool_call_parser": "hermes"}) == "generic"
    assert _detected(TEMPLATES["unknown"], {"reasoning_parser": "openai_gptoss"}) == "openai"
    settings = Settings(model=str(TOKENIZER.parent), tool_call_parser="glm47", reasoning_parser="none")
    files = asyncio.run(find_files(settings, print))
    tokenizer, plain = files.load_tokenizer(), dataclasses.replace(files, parsers={}).load_tokenizer()
    assert tokenizer.template.parsers == {"tool_call_parser": "glm47", "reasoning_parser": "none"}
    assert tokenizer.digest != plain.digest  # answers may differ
    tokenizer.close(), plain.close()
    marks = [name for known in [*MARKS, HARMONY_MARKS] for name in (known.name, *known.aliases)]
    assert sorted(marks) == sorted(set(marks)) == sorted(set(REASONING_PARSERS) - {"auto", "none"})
