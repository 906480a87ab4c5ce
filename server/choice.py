"""One choice of an answer: token events in, pieces of text out. Exactly one piece, the last, says why it ended.

Streams and plain answers are made of the same pieces, so they cannot differ. Knows text, stop strings and logprobs;
knows nothing of HTTP or of the engine's inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.types import FinishReason, Request, TokenEvent, TokenLogprobs
from server.stops import StopFinder, StopSet
from server.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenScore:
    """One token as logprobs show it. `logprob` is None for the first token of a prompt: nothing precedes it."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int  # characters of text before it


@dataclass(slots=True)
class Delta:
    """What one event added to one choice."""

    index: int
    text: str = ""
    num_tokens: int = 0
    scores: list[TokenScore] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None


class Choice:
    """The text of one engine request as it grows."""

    def __init__(
        self, index: int, request: Request, tokenizer: Tokenizer, stops: StopSet, echo_text: str | None = None
    ) -> None:
        self.index = index
        self.request = request
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(request.prompt_token_ids)
        self._finder = StopFinder(stops)
        self._echo_text = echo_text
        self.started = False
        self._num_characters = 0  # decoded so far: where the next token's text begins

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def push(self, event: TokenEvent) -> Delta | None:
        """Take in one event; None when there is nothing to show yet."""
        delta = Delta(self.index)
        if not self.started:
            self._start(event, delta)
        self._take_tokens(event, delta)
        if not self.finished and event.finish_reason is not None:
            self._finish(event, delta)
        return delta if delta.num_tokens or delta.text or self.finished else None

    def echo_only(self) -> Delta:
        """The answer when nothing is to be generated or scored."""
        self.started = True
        self.finish_reason = FinishReason.LENGTH.value
        return Delta(self.index, self._echo_text or "", finish_reason=self.finish_reason)

    def _start(self, event: TokenEvent, delta: Delta) -> None:
        self.started = True
        self.num_cached_tokens = event.num_cached_tokens
        if self._echo_text is None:
            return
        delta.text = self._echo_text
        self._num_characters = len(self._echo_text)
        if self.request.params.prompt_logprobs is not None:
            delta.scores = prompt_scores(self._tokenizer, self.request.prompt_token_ids, event.prompt_logprobs)

    def _take_tokens(self, event: TokenEvent, delta: Delta) -> None:
        """Decode token by token: a stop string may end the choice in the middle of an event."""
        min_tokens = self.request.params.min_tokens
        last = len(event.token_ids) - 1
        for position, token_id in enumerate(event.token_ids):
            self.num_tokens += 1
            delta.num_tokens += 1
            if event.logprobs:
                delta.scores.append(_score(event.logprobs[position], self._num_characters))
            if event.stop_token_id is not None and position == last:
                return  # a stop token is counted, never shown
            text = self._detokenizer.push((token_id,))
            self._num_characters += len(text)
            if self.num_tokens <= min_tokens:
                delta.text += text
                continue
            shown, found = self._finder.push(text)
            delta.text += shown
            if found is not None:
                self._end(delta, FinishReason.STOP, found)
                return

    def _finish(self, event: TokenEvent, delta: Delta) -> None:
        """The engine has ended the request: show what was held back."""
        shown, found = self._finder.push(self._detokenizer.flush())
        delta.text += shown
        if found is not None:
            self._end(delta, FinishReason.STOP, found)
            return
        delta.text += self._finder.flush()
        reason = event.finish_reason or FinishReason.ERROR
        if reason in (FinishReason.ERROR, FinishReason.ABORT):
            delta.error = event.error or "The engine gave this request up."
            self._end(delta, FinishReason.ERROR, None)
            return
        asked_for = event.stop_token_id in self.request.params.stop_token_ids
        self._end(delta, reason, event.stop_token_id if asked_for else None)

    def _end(self, delta: Delta, reason: FinishReason, stop_reason: str | int | None) -> None:
        self.finish_reason = delta.finish_reason = reason.value
        delta.stop_reason = stop_reason


def prompt_scores(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> list[TokenScore]:
    """The echoed prompt's tokens: the first has no probability, the others come from the engine."""
    detokenizer = tokenizer.detokenizer()
    scores, offset = [], 0
    for position, token_id in enumerate(prompt_ids):
        if position == 0:
            scores.append(TokenScore(token_id, None, (), 0))
        else:
            scores.append(_score(logprobs[position - 1], offset))
        offset += len(detokenizer.push((token_id,)))
    return scores


def _score(logprobs: TokenLogprobs, offset: int) -> TokenScore:
    return TokenScore(logprobs.token_id, logprobs.logprob, logprobs.top, offset)
