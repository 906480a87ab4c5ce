"""The history that a row begins with holds every id of its sequence, counted."""

import time
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from oarlock.engine.input_batch.sampling_metadata import build_sampling_metadata, history_sections
from oarlock.engine.scheduler.sequence import Sequence
from oarlock.engine.types import Request, SamplingParams

_TOKENS = st.lists(st.integers(0, 300), max_size=400)


def sequence(number: int, prompt: tuple[int, ...], params: SamplingParams) -> Sequence:
    seq = Sequence(Request(number, prompt, params), key=(0.0, number), max_len=50_000, arrival_s=0.0)
    seq.row = number
    return seq


def sections_of(seqs: list[Sequence]) -> dict:
    sections, _ = build_sampling_metadata(
        [(row, seq, seq.num_generated_tokens, ()) for row, seq in enumerate(seqs)], 50_000
    )
    return sections | history_sections(seqs)


@settings(max_examples=60, deadline=None)
@given(_TOKENS, _TOKENS, st.booleans())
def test_counts_match_all_tokens(prompt, generated, with_prompt) -> None:
    params = SamplingParams(repetition_penalty=1.1) if with_prompt else SamplingParams(presence_penalty=1.0)
    seq = sequence(3, tuple(prompt), params)
    seq.token_ids.extend(generated)
    sections = sections_of([seq])
    expected = dict.fromkeys(prompt if with_prompt else (), 0) | Counter(generated)
    assert sections["history_rows"].tolist() == [3]
    assert sections["history_starts"].tolist() == [0, len(expected)]
    ids, counts = sections["history_ids"], sections["history_counts"]
    assert ids.dtype == counts.dtype == "int32"
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == expected


def test_the_choices_of_one_prompt_look_through_it_once() -> None:
    prompt = tuple(range(40_000, 0, -1))

    def cost(num_choices: int) -> float:
        of_all = (*prompt,)
        seqs = [sequence(number, of_all, SamplingParams(repetition_penalty=1.1)) for number in range(num_choices)]
        began = time.thread_time()
        sections = sections_of(seqs)
        spent = time.thread_time() - began
        assert len(sections["history_ids"]) == num_choices * len(prompt)
        return spent

    assert min(cost(32) for _ in range(3)) < 12 * min(cost(1) for _ in range(5))
