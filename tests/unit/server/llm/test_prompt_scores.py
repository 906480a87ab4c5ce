"""Scores of a prompt that come in parts equal those that come at once."""

from array import array

import pytest

from oarlock.engine.types import FinishReason, ScoredTokens, TokenEvent, TokenLogprobs
from oarlock.server.json_text import PIECE_NUMBERS
from oarlock.server.llm.output_processor import PromptReader, TokenScore, parts_of

PROMPT = list(range(7, 7 + 500))


def scored(count: int, num_top: int) -> ScoredTokens:
    """Scores of `count` tokens after the first."""
    top = array("i", range(count * num_top)), array("f", range(count * num_top))
    return ScoredTokens(
        num_top, array("i", PROMPT[1 : count + 1]), array("i", range(count)), array("f", range(count)), *top
    )


class Letters:
    """A token of an even id is one character, others are none."""

    def push(self, ids) -> str:
        return "".join("x" for token_id in ids if token_id % 2 == 0)

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize(("count", "num_top"), [(0, 0), (1, 20), (47, 20), (48, 20), (499, 20), (499, 0)])
def test_an_event_is_cut_into_parts_of_little_work(count: int, num_top: int) -> None:
    event = TokenEvent(3, (5,), prompt_logprobs=scored(count, num_top), finish_reason=FinishReason.STOP)
    parts = list(parts_of(event))
    assert all(len(part.prompt_logprobs) * (1 + num_top) <= PIECE_NUMBERS for part in parts)
    assert [entry for part in parts for entry in part.prompt_logprobs] == list(event.prompt_logprobs)
    assert [part.token_ids for part in parts] == [()] * (len(parts) - 1) + [(5,)]
    assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [FinishReason.STOP]


@pytest.mark.parametrize("cuts", [[499], [0, 499], [1, 200, 201, 499]])
def test_a_prompt_read_in_parts_is_read_whole(cuts: list[int]) -> None:
    everything = scored(499, 2)
    reader, first = PromptReader(PROMPT, Letters()), 0
    found: list[TokenScore] = []
    for cut in cuts:
        part = reader.read(everything[first:cut])
        assert len(part) == len([*part])
        found += part
        first = cut
    assert [score.token_id for score in found] == PROMPT
    assert [score.logprob for score in found] == [None, *everything.logprobs]
    assert [score.offset for score in found] == [sum(i % 2 == 0 for i in PROMPT[:n]) for n in range(500)]
    assert found[3].top == ((4, 4.0), (5, 5.0))


def test_without_a_detokenizer_there_are_no_offsets() -> None:
    entries = (TokenLogprobs(8, -1.0, 1), TokenLogprobs(9, -2.0, 4))
    assert [score.offset for score in PromptReader(PROMPT, None).read(entries)] == [0, 0, 0]
