"""The index of runs gives the drafts of a search through the whole sequence, however it grows."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.engine.spec_decode import drafter
from oarlock.engine.spec_decode.drafter import NgramIndex


def searched(token_ids: list[int], shortest: int, longest: int, most: int) -> list[int]:
    """The definition: the longest run at the end that stands before, at its latest place, and what follows there."""
    for size in range(longest, shortest - 1, -1):
        for start in range(len(token_ids) - size - 1, -1, -1):
            if token_ids[start : start + size] == token_ids[-size:]:
                text = list(token_ids)
                for place in range(start + size, start + size + most):
                    text.append(text[place])
                return text[len(token_ids) :]
    return []


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=60),
    st.lists(st.integers(1, 9), max_size=10),
    st.integers(1, 3),
    st.integers(0, 3),
    st.integers(1, 9),
    st.integers(1, 40),
)
@pytest.mark.slow
def test_drafts_match_the_search(tokens, growth, shortest, more, most, fold):
    """`growth`: how many tokens come between two drafts; `fold`: how many are kept in dicts."""
    index = NgramIndex(shortest, shortest + more)
    length = max(1, len(tokens) - sum(growth))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "_FOLD", fold)
        for step in [0, *growth]:
            length = min(length + step, len(tokens))
            known = tokens[:length]
            assert index.propose(known, most) == searched(known, shortest, shortest + more, most)


def test_ids_of_a_large_vocabulary_over_more_tokens_than_are_kept_in_dicts():
    draw = random.Random(5)
    words = [[draw.randrange(1 << 20) for _ in range(draw.randint(2, 6))] for _ in range(300)]
    tokens = [token for _ in range(1500) for token in draw.choice(words)]
    assert len(tokens) > 5000
    index = NgramIndex(2, 4)
    drafts = 0
    for length in (2, 900, 901, 902, 1500, 4000, len(tokens)):
        found = index.propose(tokens[:length], 5)
        assert found == searched(tokens[:length], 2, 4, 5)
        drafts += bool(found)
    assert drafts > 1 and index._num_folded == len(tokens) - 1  # sorted again when the last ones were too many
    for length in range(len(tokens), len(tokens) + 30):
        tokens.append(tokens[length - 3000])  # an edit: a passage again
        assert index.propose(tokens, 5) == searched(tokens, 2, 4, 5)
    assert sum(map(len, index._recent)) == 3 * 30


def test_a_loop_is_drafted_for_as_long_as_is_asked():
    assert NgramIndex(1, 3).propose([1, 2, 3, 2, 3], 6) == [2, 3, 2, 3, 2, 3]
    assert NgramIndex(2, 3).propose([4, 4, 4], 3) == [4, 4, 4]


def test_unseen_text_gives_no_draft():
    assert NgramIndex(1, 3).propose([5], 4) == []
    assert NgramIndex(2, 3).propose([1, 2, 3, 4], 4) == []
    assert NgramIndex(3, 3).propose([1, 2, 1, 2], 4) == []
