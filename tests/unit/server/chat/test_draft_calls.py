"""Calls inside thoughts: one that ends the answer is a call, one in thoughts that go on or close is a draft."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.server.chat.message_parser import REASONING_FORMATS, MessageParser, MessageShape
from oarlock.server.chat.tool_choice import RequestTools
from oarlock.server.chat.tool_parsers.call_parser import (
    ArgumentsDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCallStart,
    merged,
)
from oarlock.server.chat.tool_parsers.harmony import HARMONY
from oarlock.server.chat.tool_parsers.hermes import GENERIC, HERMES
from oarlock.server.chat.tool_parsers.registry import FORMATS
from oarlock.server.llm.output_processor import Delta
from oarlock.server.schemas.chat import Tool
from tests.unit.server.chat.tool_parsers.written import WHOLE_ANSWER, WRITERS

R, C, F, A = ReasoningDelta, ContentDelta, ToolCallStart("f"), ArgumentsDelta
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
TOOLS = tuple(
    Tool.model_validate({"type": "function", "function": {"name": name, "parameters": SCHEMA}}) for name in ("f", "g")
)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'
CALLED = [F, A('{"a": "x"}')]
THINKERS = [known for known in FORMATS if known is not HARMONY and known is not GENERIC]


def _shape(tool_format=HERMES, *, parallel=True, marks=REASONING_FORMATS[0]):
    choice = RequestTools(tool_format, TOOLS, TOOLS, False, False, parallel)
    return MessageShape(may_think=True, is_thinking=True, tool_choice=choice, reasoning=marks)


def _read(pieces, shape=None, finish_reason="stop"):
    parser = MessageParser(shape or _shape())
    events = [event for piece in pieces for event in parser.push(Delta(0, text=piece, num_tokens=1))]
    events += parser.push(Delta(0, finish_reason=finish_reason))
    return merged(events), parser


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"So. {CALL}", [R("So. "), *CALLED]),
        (f"So. {CALL}\n{CALL}\n", [R("So. "), *CALLED, *CALLED]),
        (f"So. {CALL}</think>", [R(f"So. {CALL}")]),
        (f"So. {CALL}\n\n</think>\n\nHi", [R(f"So. {CALL}"), C("Hi")]),
        (f"So. {CALL} No. {CALL}</think>{CALL}", [R(f"So. {CALL} No. {CALL}"), *CALLED]),
        (f"So. {CALL} No, {CALL}", [R(f"So. {CALL} No, "), *CALLED]),
        (f"So. {CALL} No.", [R(f"So. {CALL} No.")]),
        ("I <tool_call> and <tool_call>{}</tool_call>.", [R("I <tool_call> and <tool_call>{}</tool_call>.")]),
        ("So <tool_call", [R("So <tool_call")]),
        ('So <tool_call>{"name"', [R('So <tool_call>{"name"')]),
        ('So <tool_call>{"name": "f", "arguments": {"a": "x', [R("So "), F, A('{"a": "x')]),
        ('So <tool_call>{"name": "f", "arguments": {"a": 1 2}} x', [
            R('So <tool_call>{"name": "f", "arguments": {"a": 1 2}} x')]),
    ],
)  # fmt: skip
def test_calls_inside_reasoning(text, expected):
    for pieces in ([text], list(text)):
        assert _read(pieces)[0] == expected


@pytest.mark.parametrize("marks", REASONING_FORMATS, ids=lambda marks: marks.name)
@pytest.mark.parametrize("tool_format", THINKERS, ids=lambda tool_format: tool_format.name)
def test_every_format_and_every_kind_of_marks(tool_format, marks):
    call = WRITERS[tool_format.name]([("f", {"a": "x", "n": 1})])
    if tool_format.name in WHOLE_ANSWER:  # elsewhere such a call follows a tag
        call = {"llama3": f"<|python_tag|>{call}", "pythonic": f"<|python_start|>{call}<|python_end|>"}.get(
            tool_format.name, f"<|assistant|>{call}"
        )
    shape = _shape(tool_format, marks=marks)
    for pieces in ([f"So. {call}"], list(f"So. {call}")):
        events, parser = _read(pieces, shape)
        assert events[0] == R("So. ")
        assert isinstance(events[1], ToolCallStart)
        assert all(isinstance(event, ArgumentsDelta) for event in events[2:])
        assert parser.finish_reason(Delta(0, finish_reason="stop")) == "tool_calls"
    draft = f"So. {call}{marks.end}Hi"
    for pieces in ([draft], list(draft)):
        assert _read(pieces, shape)[0] == [R(f"So. {call}"), C("Hi")]
    assert set(WHOLE_ANSWER) <= {"llama3", "pythonic"} | {known.name for known in FORMATS}


def test_no_more_is_held_back_than_the_call():
    parser = MessageParser(_shape())

    def push(text):
        return parser.push(Delta(0, text=text, num_tokens=1))

    assert push("So <b> <tool") == [R("So <b> ")]
    assert push("s>") == [R("<tools>")]
    assert push("<tool_call> is") == [R("<tool_call> is")]
    assert push(CALL) == []
    assert push("\n") == []
    assert push("Or") == [R(f"{CALL}\nOr")]
    assert push(CALL) == []
    assert push("</think>") == [R(CALL)]


def test_the_first_call_counts_without_parallel_calls():
    events, _ = _read([f"So. {CALL}{CALL}"], _shape(parallel=False))
    assert events == [R("So. "), *CALLED]


def test_tokens_of_such_a_call_are_no_reasoning():
    assert _read(["So", ". ", CALL])[1].reasoning_tokens == 2
    assert _read(["So", ". ", CALL, "</think>"])[1].reasoning_tokens == 4
    assert _read(["So", ". ", CALL, " No"])[1].reasoning_tokens == 4


_PARTS = st.sampled_from(
    [CALL, "<tool_call>", "</tool_call>", "</think>", "<think>", '{"name": "f"', "{", " ", "\n", "x"]
)


@settings(max_examples=80, deadline=None)
@given(st.lists(_PARTS, max_size=12).map("".join), st.booleans(), st.data())
def test_how_the_text_is_cut_never_matters(text, parallel, data):
    shape = _shape(parallel=parallel)
    whole = _read([text], shape)[0]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert _read(pieces, shape)[0] == whole
    assert _read(list(text), shape)[0] == whole
