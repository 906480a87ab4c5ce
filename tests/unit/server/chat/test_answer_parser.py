"""Tags around a response: the line ends next to them, any cutting, tags in other places, and responses without tags."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.server.chat.answer_parser import AnswerParser, AnswerTags

TAGS = AnswerTags("<answer>", "</answer>", speaker="Bot:")


def _read(pieces, tags=TAGS):
    parser = AnswerParser(tags)
    return "".join([*map(parser.push, pieces), parser.flush()])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>\nHi\n\nthere\n</answer>", "Hi\n\nthere"),
        ("\n<answer>Hi</answer>\n", "Hi"),
        ("<answer>\nBot:Hi</answer>", "Hi"),
        ("Bot:Hi", "Hi"),
        ("Bot: <answer>Hi</answer>", " <answer>Hi</answer>"),  # the speaker comes after the tag
        ("Hi <answer>x</answer>", "Hi <answer>x</answer>"),
        ("<answers>Hi</answer>", "<answers>Hi</answer>"),
        ("Hi</answer>", "Hi</answer>"),
        ("<answer>a</answer>\n\nb</answer>", "a\n\nb</answer>"),
        ("<answer>a </ans < b", "a </ans < b"),
        ("<answer>a\n</answer", "a\n</answer"),
        ("<answer>\n", ""),
        ("  x", "  x"),
        ("<ans", "<ans"),
        ("", ""),
    ],
)
def test_tags_are_removed(text, expected):
    assert _read([text]) == expected
    assert _read(list(text)) == expected


def test_only_a_possible_tag_is_held_back():
    parser = AnswerParser(TAGS)
    assert [parser.push(piece) for piece in ("<ans", "wer>\n", "a\n", "b</", "i>")] == ["", "", "a", "\nb", "</i>"]
    plain = AnswerParser(TAGS)
    assert [plain.push(piece) for piece in (" B", "o", "b", "<answer>")] == ["", "", " Bob", "<answer>"]


_WORDS = st.sampled_from(["<answer>", "</answer>", "Bot:", "<", "answer>", "</", "\n", " ", "a"])


@settings(max_examples=60, deadline=None)
@given(st.lists(_WORDS, max_size=16).map("".join), st.data())
def test_how_the_text_is_cut_never_matters(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=10)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert _read(pieces) == _read([text]) == _read(list(text))
