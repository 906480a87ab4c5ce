"""Answers written in pieces are the JSON they would be in one, and no piece is much work."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.server.json_text import PIECE_NUMBERS, StreamedList, dumps, pieces_of

_PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(_PLAIN, st.lists(st.integers(0, 9), max_size=20), st.integers(1, PIECE_NUMBERS * 2))
def test_the_pieces_make_up_the_whole(plain, items, size) -> None:
    listed = StreamedList(str, items, lambda item: size)
    whole = [{"a": plain, "b": {"c": list(map(str, items))}}, {"d": []}]
    assert "".join(pieces_of([{"a": plain, "b": {"c": listed}}, {"d": StreamedList(str, (), int)}])) == dumps(whole)
    assert "".join(pieces_of(plain)) == dumps(plain)


def test_little_is_made_between_two_pieces() -> None:
    made = []

    def entry(item: int) -> str:
        made.append(item)
        return "x" * 70 * 21

    longest = before = 0
    parts = []
    for part in pieces_of({"list": StreamedList(entry, range(5000), lambda item: 21)}):
        longest, before = max(longest, len(made) - before), len(made)
        parts.append(part)
    assert longest <= PIECE_NUMBERS // 21 + 1 and len(json.loads("".join(parts))["list"]) == 5000
