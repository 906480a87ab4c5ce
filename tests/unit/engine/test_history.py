"""Counts that grow with the sequence equal counts made from scratch."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.history import TokenHistory

_TOKENS = st.lists(st.integers(0, 300), max_size=400)


@settings(max_examples=60, deadline=None)
@given(_TOKENS, _TOKENS, st.lists(st.integers(0, 400), max_size=6), st.booleans())
def test_counts_equal_those_from_scratch(prompt, generated, stops, with_prompt) -> None:
    history = TokenHistory(tuple(prompt) if with_prompt else (), len(prompt))
    for stop in [*sorted(stops), len(generated)]:
        known = generated[:stop]
        history.catch_up(prompt + known)
        expected = dict.fromkeys(prompt if with_prompt else (), 0) | Counter(known)
        ids, counts = history.ids.tolist(), history.counts.tolist()
        assert len(ids) == len(expected)
        assert dict(zip(ids, counts, strict=True)) == expected
