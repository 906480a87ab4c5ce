"""Counts that grow with the sequence equal counts made from scratch."""

import time
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.input_batch.sampling_metadata import build_sampling_metadata
from engine.input_batch.token_history import TokenHistory
from engine.sampling_params import SamplingParams
from engine.scheduler.sequence import Sequence
from engine.types import Request

PENALISED = SamplingParams(repetition_penalty=1.1)
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


def test_the_choices_of_one_prompt_look_through_it_once() -> None:
    prompt = tuple(range(40_000, 0, -1))

    def cost(num_choices: int) -> float:
        seqs = []
        for number in range(num_choices):
            request = Request(number, (*prompt,) if number == 0 else seqs[0].request.prompt_token_ids, PENALISED)
            seqs.append(Sequence(request, key=(0.0, number), max_len=50_000, arrival_s=0.0))
        began = time.thread_time()
        sections, _ = build_sampling_metadata([(row, seq, 0) for row, seq in enumerate(seqs)], 50_000)
        spent = time.thread_time() - began
        assert len(sections["history_ids"]) == num_choices * len(prompt)
        return spent

    assert min(cost(32) for _ in range(3)) < 12 * min(cost(1) for _ in range(5))
