"""Stop strings against a naive oracle, over every way to cut the text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.server.llm.detokenizer import StopStringMatcher, StopStrings

LETTERS = st.text("ab", max_size=24)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The first position at which any stop string is complete; the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text: str, cuts: list[int]) -> list[str]:
    edges = [0, *sorted({c % (len(text) + 1) for c in cuts}), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(edges)]


@settings(max_examples=600, deadline=None)
@given(LETTERS, STOPS, st.lists(st.integers(0, 100), max_size=8))
@pytest.mark.slow
def test_any_chunking_gives_the_naive_answer(text, stops, cuts):
    finder = StopStringMatcher(StopStrings(stops))
    shown, found = "", None
    for piece in cut(text, cuts):
        emitted, found = finder.push(piece)
        shown += emitted
        # nothing that could still become a stop string is shown, and nothing else is held back
        consumed = text[: len(shown) + len(finder._held)]
        if found is None:
            assert shown + finder._held == consumed
            held = max((k for s in stops for k in range(len(s)) if consumed.endswith(s[:k]) and k), default=0)
            assert len(finder._held) == held
    if found is None:
        shown += finder.flush()
    assert (shown, found) == naive(text, stops)


def test_after_a_match_everything_is_swallowed():
    finder = StopStringMatcher(StopStrings(["END"]))
    assert finder.push("one E") == ("one ", None)
    assert finder.push("ND two") == ("", "END")
    assert finder.push(" three") == ("", "END")


def test_a_half_match_is_flushed_not_lost():
    finder = StopStringMatcher(StopStrings(["</answer>"]))
    assert finder.push("text </ans") == ("text ", None)
    assert finder.flush() == "</ans"


def test_without_stop_strings_nothing_is_held():
    assert StopStringMatcher(StopStrings([])).push("anything") == ("anything", None)


@pytest.mark.parametrize("text", ["a" * 20_000, "ab" * 10_000])
def test_adversarial_stop_strings_stay_linear(text):
    stops = StopStrings([("a" * 1023) + "b", ("ab" * 511) + "b"])
    finder = StopStringMatcher(stops)
    shown = "".join(finder.push(character)[0] for character in text)
    assert shown + finder.flush() == text


@pytest.mark.parametrize("size", [1, 2, 3, 7, 50])
def test_a_match_that_is_to_be_shown_holds_nothing_back(size):
    text = "abcabd and abce then more"
    finder, shown = StopStringMatcher(StopStrings(["abce", "zz"]), include=True), []
    for start in range(0, len(text), size):
        piece, found = finder.push(text[start : start + size])
        shown.append(piece)
        if found:
            break
        assert "".join(shown) == text[: start + size]
    assert ("".join(shown), found, finder.flush()) == ("abcabd and abce", "abce", "")
