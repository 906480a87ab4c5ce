"""The tokens of a prompt as logprobs show them, in the parts in which the engine sends them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat
from typing import NamedTuple

from oarlock.engine.types import ScoredTokens, TokenEvent, TokenLogprobs
from oarlock.server.json_text import PIECE_NUMBERS
from oarlock.server.llm.detokenizer import Detokenizer


class TokenScore(NamedTuple):
    """One token as logprobs show it. `logprob` is None for the first token of a prompt: nothing precedes it."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int  # characters of text before it
    rank: int = 0  # 1 = most likely; 0: not scored

    @staticmethod
    def of(logprobs: TokenLogprobs, offset: int) -> TokenScore:
        return TokenScore(logprobs.token_id, logprobs.logprob, logprobs.top, offset, logprobs.rank)


class PromptScores:
    """Consecutive tokens of a prompt. Each score is made when it is written: kept, it would take kilobytes."""

    def __init__(self, first_id: int | None, logprobs: Sequence[TokenLogprobs], offsets: array) -> None:
        """`first_id`: the first token of the prompt, before those of `logprobs`. `offsets` of all, or empty."""
        self._first_id = first_id
        self._logprobs = logprobs
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._logprobs) + (self._first_id is not None)

    def __iter__(self) -> Iterator[TokenScore]:
        return self.scores()

    def scores(self, *, with_top: bool = True) -> Iterator[TokenScore]:
        """Quicker without alternatives, where they are not shown."""
        offsets = iter(self._offsets or repeat(0, len(self)))
        if self._first_id is not None:
            yield TokenScore(self._first_id, None, (), next(offsets))
        entries = self._logprobs
        if isinstance(entries, ScoredTokens):
            for (token_id, logprob, rank, top), offset in zip(entries.rows(with_top=with_top), offsets, strict=True):
                yield TokenScore(token_id, logprob, top, offset, rank)
        else:
            for logprobs, offset in zip(entries, offsets, strict=True):
                yield TokenScore.of(logprobs, offset)


Scores = Sequence[TokenScore] | PromptScores


class PromptReader:
    """Follows the scores of one prompt from part to part."""

    def __init__(self, prompt_ids: Sequence[int], detokenizer: Detokenizer | None) -> None:
        """`detokenizer`: None leaves offsets out."""
        self._prompt_ids = prompt_ids
        self._detokenizer = detokenizer
        self._num_read = 0
        self._num_characters = 0

    def read(self, logprobs: Sequence[TokenLogprobs]) -> PromptScores:
        """The next tokens; the first part begins with the one that nothing precedes."""
        is_first = self._num_read == 0
        begin, self._num_read = self._num_read, self._num_read + len(logprobs) + is_first
        offsets = array("i")
        if self._detokenizer is not None:
            for token_id in self._prompt_ids[begin : self._num_read]:
                offsets.append(self._num_characters)
                self._num_characters += len(self._detokenizer.push((token_id,)))
        return PromptScores(self._prompt_ids[0] if is_first else None, logprobs, offsets)


def parts_of(event: TokenEvent) -> Iterator[TokenEvent]:
    """Split `event` by the scores of its prompt, in parts of about a millisecond's work; the last has all the rest."""
    scored = event.prompt_logprobs
    size = max(1, PIECE_NUMBERS // (1 + len(scored[0].top))) if scored else 1
    last = max(0, len(scored) - 1) // size * size
    for start in range(0, last, size):
        part = scored[start : start + size]
        yield TokenEvent(event.request_id, prompt_logprobs=part, num_cached_tokens=event.num_cached_tokens)
    yield replace(event, prompt_logprobs=scored[last:]) if last else event
