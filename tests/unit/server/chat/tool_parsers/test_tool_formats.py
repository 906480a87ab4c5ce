"""Tool formats: grammars admit what the parsers parse and nothing outside the schema; detection; a new format."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import llguidance
import pytest

from oarlock.engine.types import Grammar
from oarlock.server.chat import detection
from oarlock.server.chat.message_parser import REASONING_FORMATS as MARKS
from oarlock.server.chat.prompt import ChatPrompt, response_grammar
from oarlock.server.chat.tool_choice import resolve_tool_choice
from oarlock.server.chat.tool_parsers.base import ToolFormat, ToolParser
from oarlock.server.chat.tool_parsers.call_parser import ArgumentsDelta, CallParser, ContentDelta, ToolCallStart, merged
from oarlock.server.chat.tool_parsers.grammar import call_objects, text_then_calls
from oarlock.server.chat.tool_parsers.hermes import HERMES
from oarlock.server.chat.tool_parsers.json_list import MISTRAL
from oarlock.server.chat.tool_parsers.llama import LLAMA
from oarlock.server.chat.tool_parsers.registry import FORMATS
from oarlock.server.schemas.chat import ChatRequest
from tests.unit.server.chat.tool_parsers.test_every_format import _detected
from tests.unit.server.chat.tool_parsers.written import TEMPLATES

DEMO = Path(__file__).resolve().parents[5] / "models" / "oarlock-demo"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
GOOD = '{"city":"Zürich","days":3}'


@pytest.fixture(scope="module")
def compiler():
    return llguidance.LLTokenizer((DEMO / "tokenizer.json").read_text())


def _admits(compiler, grammar: Grammar, text: str) -> bool:
    """Whether a grammar admits the whole text, and lets it end there."""
    assert grammar.kind == "lark"
    source = llguidance.LLMatcher.grammar_from_lark(grammar.text)
    assert llguidance.LLMatcher.validate_grammar(source, compiler) == ""
    matcher = llguidance.LLMatcher(compiler, source)
    ids = compiler.tokenize_str(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def _grammar(tool_format, own=None, think=(False, False), **fields) -> Grammar:
    messages = [{"role": "user", "content": "x"}]
    request = ChatRequest.model_validate({"messages": messages, "tools": TOOLS, "tool_choice": "required", **fields})
    grammar = response_grammar(own, ChatPrompt("x", resolve_tool_choice(request, tool_format), *think), {})
    assert grammar is not None
    return grammar


def _written(tool_format, arguments=GOOD, name="weather"):
    body = f'{{"name": "{name}", "arguments": {arguments}}}'
    return {
        "llama3": f'{{"name": "{name}", "parameters": {arguments}}}',
        "mistral": f"[TOOL_CALLS][{body}]",
        "mistral_named": f"[TOOL_CALLS]{name}[ARGS]{arguments}",
    }.get(tool_format.name, f"<tool_call>\n{body}\n</tool_call>")


def test_special_tokens_begin_calls(compiler):
    messages = [{"role": "user", "content": "x"}]
    strict = [{"type": "function", "function": {"name": "now", "strict": True}}]
    request = ChatRequest.model_validate({"messages": messages, "tools": strict})
    for tool_format, delimiter in (
        (MISTRAL, "[TOOL_CALLS]"),
        (LLAMA, "<|python_tag|>"),
        (HERMES, "<tool_call>"),
    ):
        prompt = ChatPrompt("x", resolve_tool_choice(request, tool_format), False, False)
        grammar = response_grammar(None, prompt, {delimiter: 1})
        assert grammar is not None
        assert "<[1]>" in grammar.text
        assert _admits(compiler, grammar, "Hello")


@pytest.mark.parametrize("marks", MARKS, ids=lambda marks: marks.name)
@pytest.mark.parametrize("is_special", [False, True])
def test_every_kind_of_reasoning_comes_before_the_grammar(compiler, marks, is_special):
    messages = [{"role": "user", "content": "x"}]
    request = ChatRequest.model_validate({"messages": messages, "tools": TOOLS, "tool_choice": "required"})
    prompt = ChatPrompt("x", resolve_tool_choice(request, HERMES), True, False, marks)
    # Any special token of this vocabulary stands for the marks.
    special = dict.fromkeys(marks.tokens, 1) if is_special else {}
    grammar = response_grammar(None, prompt, special)
    assert grammar is not None
    if not is_special:
        assert _admits(compiler, grammar, f"{marks.start}so <tool_call>\n{marks.end}\n{_written(HERMES)}")
    assert grammar.text.count("<[1]>") == (2 if is_special else 0)
    assert _admits(compiler, grammar, _written(HERMES))


@pytest.mark.parametrize("marks", [marks for marks in MARKS if marks.answer], ids=lambda marks: marks.name)
def test_a_grammar_admits_the_tags_around_a_response(compiler, marks):
    messages = [{"role": "user", "content": "x"}]
    request = ChatRequest.model_validate({"messages": messages, "tools": TOOLS, "tool_choice": "required"})
    prompt = ChatPrompt("x", resolve_tool_choice(request, HERMES), True, False, marks)
    grammar = response_grammar(None, prompt, {})
    assert grammar is not None
    call, (start, end) = _written(HERMES), marks.answer_tokens
    for before in ("", f"{marks.start}so{marks.end}\n"):
        assert _admits(compiler, grammar, f"{before}{start}\n{call}\n{end}")
        assert _admits(compiler, grammar, before + call)
        assert not _admits(compiler, grammar, f"{before}{start}\n{call}")


def test_reasoning_comes_before_the_grammar(compiler):
    call = _written(HERMES)
    inside = _grammar(HERMES, think=(False, True))
    assert _admits(compiler, inside, "so <tool_call> or {\n</think>\n\n" + call)
    assert not _admits(compiler, inside, call)
    optional = _grammar(HERMES, think=(True, False))
    assert _admits(compiler, optional, "<think>so</think>" + call)
    assert _admits(compiler, optional, call)


@pytest.mark.parametrize(
    ("own", "good", "bad"),
    [
        (Grammar("json_schema", json.dumps(SCHEMA), "response_format"), GOOD, "{}"),
        (Grammar("json_object", "", "response_format"), '{"a":1}', "[]"),
        (Grammar("choice", '["yes", "n/o"]', "guided_choice"), "n/o", "maybe"),
        (Grammar("choice", '["a::=", "b"]', "guided_choice"), "a::=", "a"),
        (Grammar("regex", r"(?::=|x)::=\n", "guided_regex"), "x::=\n", "x::"),
        (Grammar("regex", r"[a-c]+/\/x", "guided_regex"), "ab//x", "d"),
    ],
)
def test_the_callers_own_constraint_or_a_call(compiler, own, good, bad):
    either = _grammar(HERMES, own, tool_choice="auto")
    for text in (good, _written(HERMES)):
        assert _admits(compiler, either, text)
    assert not _admits(compiler, either, bad)
    thinking = response_grammar(own, ChatPrompt("x", None, False, True), {})
    assert thinking is not None
    assert _admits(compiler, thinking, "so</think>\n" + good)
    assert not _admits(compiler, thinking, good)


def test_without_tools_or_reasoning_the_constraint_is_the_callers():
    own = Grammar("regex", "x", "guided_regex")
    assert response_grammar(own, ChatPrompt("x", None, False, False), {}) is own
    assert response_grammar(None, ChatPrompt("x", None, True, False), {}) is None


class ToyToolParser(ToolParser):
    """`<toy>{"name": …, "arguments": {…}}`."""

    DELIMITERS = ("<toy>",)

    def _reader(self, delimiter):
        return CallParser(self._tools)


def _toy_calls(tools, most, special_ids):
    return "\n".join(['calls: "<toy>" tail', "tail: call", *call_objects(tools, "arguments")])


TOY = ToolFormat(
    name="toy",
    models="toys",
    example="",
    parser=ToyToolParser,
    delimiters=("<toy>",),
    forced_calls=_toy_calls,
    optional_calls=partial(text_then_calls, "<toy>"),
)


def test_a_new_format_is_one_line_of_the_registry(compiler, monkeypatch):
    template = TEMPLATES["hermes"].replace("\n<tool_call>", "<toy>").replace("</tool_call>", "")
    assert _detected(template) == "unknown"
    monkeypatch.setattr(detection, "FORMATS", [TOY, *FORMATS])
    assert _detected(template) == "toy"
    call = f'<toy>{{"name": "weather", "arguments": {GOOD}}}'
    parser = TOY.parser({"weather": SCHEMA})
    events = [ContentDelta("So "), ToolCallStart("weather"), ArgumentsDelta(GOOD), ContentDelta("; <to")]
    assert merged([*parser.push(f"So {call}; <to"), *parser.flush()]) == events
    assert _admits(compiler, _grammar(TOY), call)
    assert not _admits(compiler, _grammar(TOY), call.replace("3", "10"))
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}]
    optional = _grammar(TOY, tools=strict, tool_choice="auto")
    for text, is_right in (("So", True), (f"So {call}", True), (f"So {call.replace('3', '10')}", False)):
        assert _admits(compiler, optional, text) is is_right
