"""Harmony: channels, recipients, prompts that end inside an answer, and grammars of messages before the bound one."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.engine.types import Grammar
from oarlock.server.chat.message_parser import MessageParser, MessageShape
from oarlock.server.chat.prompt import ChatPrompt, response_grammar
from oarlock.server.chat.tool_choice import resolve_tool_choice
from oarlock.server.chat.tool_parsers.call_parser import (
    ArgumentsDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCallStart,
    merged,
)
from oarlock.server.chat.tool_parsers.harmony import HARMONY, HarmonyParser
from oarlock.server.llm.output_processor import Delta
from oarlock.server.schemas.chat import ChatRequest
from tests.unit.server.chat.tool_parsers.test_every_format import _admits, compiler  # noqa: F401

R, C, F = ReasoningDelta, ContentDelta, ToolCallStart("f")
TOOLS = {"f": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}
THOUGHTS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
TOLD = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a":1}'


def _parse(pieces, **options):
    parser = HarmonyParser(TOOLS, **options)
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged([*events, *parser.flush()])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{THOUGHTS}{FINAL}Hi <b> <|", [R("Hm."), C("Hi <b> <|")]),
        (f"{THOUGHTS}{CALL}<|call|>", [R("Hm."), F, ArgumentsDelta('{"a":1}')]),
        (' to=functions.f<|channel|>commentary json<|message|>{"a":1}<|call|>', [F, ArgumentsDelta('{"a":1}')]),
        (f"{TOLD}{CALL}", [C("I look."), F, ArgumentsDelta('{"a":1}')]),
        (f"{THOUGHTS}{THOUGHTS}{FINAL}x", [R("Hm.\nHm."), C("x")]),
        (f"{CALL[:-2]}", [F, ArgumentsDelta('{"a":')]),
        (CALL.replace("1}", "1,,}<|call|>"), [F, ArgumentsDelta('{"a":1,,}')]),
        (CALL.replace(".f", ".g"), [C('{"a":1}')]),
        (CALL.replace('{"a":1}', "[1]<|call|>"), [C("[1]")]),
        ("<|channel|>analysis to=browser.search<|message|>{}<|end|>", [R("{}")]),
        ("<|channel|>ana", []),
        ("Hello", [C("Hello")]),
        ("assist me", [C("assist me")]),
        ("a<|end|>b", [C("a<|end|>b")]),
        ("<|channel|>" + "x" * 600, [C("<|channel|>" + "x" * 600)]),
        (f"<|start|>assistant{FINAL}x<|return|>", [C("x")]),
        (f"{FINAL}", []),
        ("", []),
    ],
)  # fmt: skip
def test_output_is_parsed_as_expected(text, expected):
    assert _parse([text]) == expected
    assert _parse(list(text)) == expected


_MARKS = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|"]
_OTHERS = ["assistant", "analysis", "final", "commentary", " to=functions.f", "json", '{"a":', "1}", " ", "\n", "x"]
_WORDS = st.sampled_from([*_MARKS, *_OTHERS, THOUGHTS, FINAL, CALL])


@settings(max_examples=100, deadline=None)
@given(st.lists(_WORDS, max_size=20).map("".join), st.booleans(), st.data())
@pytest.mark.slow
def test_how_the_text_is_cut_never_matters(text, parallel, data):
    whole = _parse([text], parallel=parallel)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert _parse(pieces, parallel=parallel) == whole
    assert _parse(list(text), parallel=parallel) == whole


def test_a_message_of_an_answer_without_tools_and_its_tokens():
    parser = MessageParser(MessageShape(may_think=True, harmony=""))
    pieces = ["<|channel|>", "analysis", "<|message|>", "a", "b", "<|end|>", "<|start|>assistant", FINAL, "c"]
    events = [parser.push(Delta(0, text=piece, num_tokens=1)) for piece in pieces]
    assert merged([event for some in events for event in some]) == [R("ab"), C("c")]
    assert parser.reasoning_tokens == 2
    unnamed = MessageParser(MessageShape(harmony=""))
    assert unnamed.push(Delta(0, text=f"{THOUGHTS}{FINAL}c", num_tokens=9)) == [C("Hm.\nc")]
    assert unnamed.reasoning_tokens == 0
    ongoing = MessageParser(MessageShape(harmony=f"{FINAL}So"))
    assert ongoing.push(Delta(0, text=": <|channel|", num_tokens=1, finish_reason="length")) == [C(": <|channel|")]


def _bound(own=None, harmony="", special_ids=None, **fields):
    tools = [{"type": "function", "function": {"name": "f", "parameters": TOOLS["f"], "strict": True}}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, **fields}
    choice = resolve_tool_choice(ChatRequest.model_validate(body), HARMONY) if fields else None
    grammar = response_grammar(own, ChatPrompt("x", choice, False, False, harmony=harmony), special_ids or {})
    assert grammar is not None
    return grammar


OWN = Grammar("json_schema", json.dumps(TOOLS["f"]), "response_format")


def test_reasoning_may_come_before_the_grammar(compiler):  # noqa: F811
    for before in ("", THOUGHTS):
        forced = _bound(tool_choice="required")
        assert _admits(_matcher(compiler, forced), compiler, before + CALL)
        assert not _admits(_matcher(compiler, forced), compiler, before + CALL.replace("1", "x"))
        assert not _admits(_matcher(compiler, forced), compiler, f"{before}{FINAL}x")
        form = _matcher(compiler, _bound(OWN))
        assert _admits(form, compiler, f'{before}{FINAL}{{"a":1}}')
        assert not _admits(form, compiler, f"{before}{FINAL}x")
    either = _matcher(compiler, _bound(OWN, tool_choice="auto"))
    for text in (CALL, f'{FINAL}{{"a":1}}', f'{THOUGHTS}{FINAL}{{"a":1}}'):
        assert _admits(either, compiler, text)
    assert not _admits(either, compiler, '{"a":1}')
    assert _admits(_matcher(compiler, _bound(OWN, harmony=FINAL)), compiler, '{"a":1}')


def _matcher(compiler, grammar):  # noqa: F811
    import llguidance

    source = llguidance.LLMatcher.grammar_from_lark(grammar.text)
    assert llguidance.LLMatcher.validate_grammar(source, compiler) == ""
    return llguidance.LLMatcher(compiler, source)


def test_the_marks_as_special_tokens(compiler):  # noqa: F811
    ids = {token: number for number, token in enumerate(HARMONY.delimiters, 300)}

    def tokens(text):
        for token, number in ids.items():
            text = text.replace(token, f"\0{number}\0")
        parts = [part for part in text.split("\0") if part]
        return [i for part in parts for i in ([int(part)] if part.isdigit() else compiler.tokenize_str(part))]

    strict = _matcher(compiler, _bound(special_ids=ids, tool_choice="auto"))
    forced = _matcher(compiler, _bound(special_ids=ids, tool_choice="required"))
    cases = [
        (f"{THOUGHTS}{CALL}", True, True),
        (f"{THOUGHTS}{FINAL}Hi", True, False),
        (CALL.replace("1", "x"), False, False),
    ]
    for text, is_optional, is_forced in cases:
        for matcher, expected in ((strict, is_optional), (forced, is_forced)):
            matcher.reset()
            taken = tokens(text)
            assert (matcher.try_consume_tokens(taken) == len(taken) and matcher.is_accepting()) is expected, text
