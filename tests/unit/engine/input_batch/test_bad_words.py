"""Bad words against their definition, and the cost of finding them."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.engine.input_batch import sampling_metadata
from oarlock.engine.input_batch.sampling_metadata import BadWords, Constraints
from oarlock.engine.scheduler.sequence import Sequence
from oarlock.engine.types import Request, SamplingParams

_IDS = st.integers(0, 2)
_WORDS = st.lists(st.lists(_IDS, min_size=1, max_size=5).map(tuple), max_size=12).map(tuple)


@settings(max_examples=200, deadline=None)
@given(_WORDS, st.lists(_IDS, max_size=3), st.lists(_IDS, max_size=30))
@pytest.mark.slow
def test_every_step_bans_what_would_complete_a_word(words, prompt, generated) -> None:
    made = BadWords(words)
    for count in range(len(generated) + 1):
        known = generated[:count]
        ends = [
            word[-1] for word in words if 1 < len(word) <= count + 1 and known[count + 1 - len(word) :] == [*word[:-1]]
        ]
        assert sorted(made.completed_by(prompt + known, count)) == sorted(ends)


def test_words_are_split_once_for_each_token_that_the_text_shares_with_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    split_words = []
    split = sampling_metadata._split
    monkeypatch.setattr(
        sampling_metadata, "_split", lambda words, depth: (split_words.append(len(words)), split(words, depth))[1]
    )
    made = BadWords(tuple((number, *[5] * 20, 7) for number in range(8, 1008)))
    for count in range(1, 100):
        before = sum(split_words)
        assert made.completed_by([5] * count, count) == []
        assert sum(split_words) - before == (1000 if count <= 20 else 0)
    assert made.completed_by([8] + [5] * 20, 21) == [7], "only the word that begins with it is left"
    assert split_words[-1] == 1


def test_a_step_costs_the_same_with_a_thousand_long_words_as_with_a_few() -> None:
    def cost(num_words: int) -> float:
        words = tuple((6, *[5] * (number * 251 // num_words + 1), number + 100) for number in range(num_words))
        request = Request(1, (1,), SamplingParams(max_tokens=500, bad_words=words))
        seq = Sequence(request, key=(0.0, 1), max_len=1000, arrival_s=0.0)
        seq.token_ids.extend([5] * 300)
        constraints = Constraints(seq, 2000)
        best = float("inf")
        for _ in range(20):
            began = time.thread_time()
            assert constraints.step_bans(300) == []
            best = min(best, time.thread_time() - began)
        return best

    assert cost(1024) < 8 * cost(16)
