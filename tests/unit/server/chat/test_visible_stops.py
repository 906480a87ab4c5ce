"""Stop strings of answers with thoughts and calls: they end the visible text, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.server.chat.message_parser import MessageParser, MessageShape
from oarlock.server.chat.tool_choice import RequestTools
from oarlock.server.chat.tool_parsers.call_parser import (
    ArgumentsDelta,
    ContentDelta,
    ReasoningDelta,
    ToolCallStart,
    merged,
)
from oarlock.server.chat.tool_parsers.harmony import HARMONY
from oarlock.server.chat.tool_parsers.hermes import HERMES
from oarlock.server.chat.visible_stops import VisibleStops
from oarlock.server.llm.detokenizer import StopStringMatcher, StopStrings
from oarlock.server.schemas.chat import Tool

R, C, F, A = ReasoningDelta, ContentDelta, ToolCallStart("f"), ArgumentsDelta
TOOLS = (Tool.model_validate({"type": "function", "function": {"name": "f"}}),)
CALL = '<tool_call>{"name": "f", "arguments": {"a": "STOP"}}</tool_call>'
HERMES_SHAPE = MessageShape(may_think=True, tool_choice=RequestTools(HERMES, TOOLS, TOOLS, False, False, True))
HARMONY_SHAPE = MessageShape(
    may_think=True, tool_choice=RequestTools(HARMONY, TOOLS, TOOLS, False, False, True), harmony=""
)
THOUGHTS = "<|channel|>analysis<|message|>a STOP b<|end|><|start|>assistant"
CALLED = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "STOP"}'


def _read(shape, pieces, stops, include=False):
    """All events, and the stop string that ended them."""
    reader = VisibleStops(shape, False, StopStrings(stops), include)
    events, found = [], None
    for piece in pieces:
        assert reader.push(piece)[0] == ""
        events += reader.take().events
    found = reader.finish("", True)[1]
    events += reader.take().events
    return merged(events), found


@pytest.mark.parametrize(
    ("shape", "text", "expected", "found"),
    [
        (HERMES_SHAPE, "<think>a STOP b</think>c STOP d", [R("a STOP b"), C("c ")], "STOP"),
        (HERMES_SHAPE, "<think>a STOP b</think>c", [R("a STOP b"), C("c")], None),
        (HERMES_SHAPE, "<think>a STOP b", [R("a STOP b")], None),
        (HERMES_SHAPE, "<think>a ST</think>OP b", [R("a ST"), C("OP b")], None),
        (HERMES_SHAPE, "c STOP <think>d", [C("c ")], "STOP"),
        (HERMES_SHAPE, f"b{CALL}c STOP", [C("b"), F, A('{"a": "STOP"}'), C("c ")], "STOP"),
        (HERMES_SHAPE, f"b ST{CALL}OP", [C("b ST"), F, A('{"a": "STOP"}'), C("OP")], None),
        (HERMES_SHAPE, f"STOP{CALL}", [], "STOP"),
        (HERMES_SHAPE, "b <tool_call>STOP", [C("b <tool_call>")], "STOP"),
        (HERMES_SHAPE, "b ST", [C("b ST")], None),
        (HARMONY_SHAPE, f"{THOUGHTS}<|channel|>final<|message|>c STOP d", [R("a STOP b"), C("c ")], "STOP"),
        (HARMONY_SHAPE, f"{THOUGHTS}{CALLED}<|call|>", [R("a STOP b"), F, A('{"a": "STOP"}')], None),
        (HARMONY_SHAPE, f"{THOUGHTS}<|channel|>commentary<|message|>c STOP", [R("a STOP b"), C("c ")], "STOP"),
    ],
)
def test_stop_strings_count_in_visible_text_only(shape, text, expected, found):
    for pieces in ([text], list(text)):
        assert _read(shape, pieces, ["STOP"]) == (expected, found)


def test_the_stop_string_is_shown_on_request():
    events, found = _read(HERMES_SHAPE, ["<think>STOP</think>", "c STOP d"], ["STOP"], include=True)
    assert (events, found) == ([R("STOP"), C("c STOP")], "STOP")


@pytest.mark.parametrize("text", ["<think>a STOP</think>b STOP", "b STOP", f"<think>x</think>{CALL} STOP"])
def test_before_the_least_number_of_tokens_none_counts(text):
    reader = VisibleStops(HERMES_SHAPE, False, StopStrings(["STOP"]), False)
    assert reader.push(text, False) == ("", None)
    assert reader.push(" and STOP now", True)[1] == "STOP"


def test_no_piece_of_a_stop_string_is_shown_before_it_is_known_not_to_be_one():
    reader = VisibleStops(HERMES_SHAPE, False, StopStrings(["STOP"]), False)
    shown = []
    for piece in ("<think>", "ST", "</think>", "a S", "T", "O", "x S", "TO", "P"):
        reader.push(piece)
        shown.append("".join(event.text for event in reader.take().events))
    assert shown == ["", "ST", "", "a ", "", "", "STOx ", "", ""]


_PARTS = st.sampled_from(["<think>", "</think>", CALL, "ab", "a", "b", "<tool_call>", "\n", " "])


@settings(max_examples=80, deadline=None)
@given(st.lists(_PARTS, max_size=12).map("".join), st.lists(st.sampled_from(["ab", "ba", "\n", "a b"]), max_size=2))
def test_the_content_ends_where_a_finder_in_it_says(text, stops):
    """Compare with reading everything first, and looking for stop strings in each stretch of content then."""
    parser = MessageParser(HERMES_SHAPE)
    read = merged([*parser.read(text, 1, is_last=False), *parser.read("", 0, is_last=True)])
    expected, found = [], None
    for event in read:
        if isinstance(event, ContentDelta):
            matcher = StopStringMatcher(StopStrings(stops))
            shown, found = matcher.push(event.text)
            expected.append(C(shown + matcher.flush()))
            if found is not None:
                break
        else:
            expected.append(event)
    for pieces in ([text], list(text)):
        assert _read(HERMES_SHAPE, pieces, stops) == (merged(expected), found)
