"""Thoughts and answer, cut apart: the tags, the line ends around them, any cutting, the count of tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.server.chat.message_parser import REASONING_FORMATS, ReasoningParser
from oarlock.server.chat.tool_parsers.call_parser import ContentDelta, ReasoningDelta, merged

R, C = ReasoningDelta, ContentDelta


def _split(is_open, pieces):
    parser = ReasoningParser(is_open)
    events = [event for piece in pieces for event in parser.push(piece, 1)]
    return merged([*events, *parser.flush()]), parser.num_tokens


@pytest.mark.parametrize(
    ("is_open", "text", "expected"),
    [
        (False, "<think>\na\n\nb\n</think>\n\nHi\n", [R("a\n\nb"), C("Hi\n")]),
        (True, "\na</think>\nHi", [R("a"), C("Hi")]),
        (True, " a \n</think> Hi", [R(" a "), C(" Hi")]),
        (False, " \n<think></think>x", [C("x")]),
        (False, "  x <think>y</think>", [C("  x <think>y</think>")]),
        (False, "<thi", [C("<thi")]),
        (False, "<thin air", [C("<thin air")]),
        (True, "a\n</thi", [R("a\n</thi")]),
        (True, "a\n", [R("a")]),
        (True, "a < b</think", [R("a < b</think")]),
        (False, "<think>a</think>b</think>c", [R("a"), C("b</think>c")]),
        (False, "  ", [C("  ")]),
        (False, "", []),
    ],
)
def test_text_is_split_into_reasoning_and_content(is_open, text, expected):
    assert _split(is_open, [text])[0] == expected
    assert _split(is_open, list(text))[0] == expected


@pytest.mark.parametrize("marks", REASONING_FORMATS, ids=lambda marks: marks.name)
def test_every_kind_of_marks(marks):
    text = f" {marks.start}\na{marks.end[:-1]} <b>\n{marks.end}\n\nc{marks.start}"
    for pieces in ([text], list(text)):
        parser = ReasoningParser(False, marks)
        events = merged([event for piece in pieces for event in parser.push(piece)])
        assert events == [R(f"a{marks.end[:-1]} <b>"), C(f"c{marks.start}")]


def test_nothing_is_held_back_longer_than_needed():
    parser = ReasoningParser(True)
    assert parser.push("a\n") == [R("a")]
    assert parser.push("b</thi") == [R("\nb")]
    assert parser.push("s") == [R("</this")]


def test_tokens_are_counted_with_their_tags():
    assert _split(False, ["<think>", "a", "b", "</think>", "\n\n", "c"])[1] == 4
    assert _split(False, ["<th", "ink>", "a", "</think>", "c"])[1] == 4
    assert _split(True, ["a", "b"])[1] == 2
    assert _split(False, ["a", "<think>"])[1] == 0


_WORDS = st.sampled_from(["<think>", "</think>", "<", "/think>", "\n", " ", "a", "<think", "</"])


@settings(max_examples=60, deadline=None)
@given(st.booleans(), st.lists(_WORDS, max_size=20).map("".join), st.data())
def test_how_the_text_is_cut_never_matters(is_open, text, data):
    whole = _split(is_open, [text])[0]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert _split(is_open, pieces)[0] == whole
    assert _split(is_open, list(text))[0] == whole
