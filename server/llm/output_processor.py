"""Conversion of a choice's token events to pieces of text. Only the last piece has the finish reason.

Streams and complete responses consist of the same pieces, so they cannot differ. Knows text, stop strings and logprobs;
knows nothing of HTTP. The scores of a prompt arrive in the parts in which the engine sends them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple, Protocol

from oarlock.engine.types import FinishReason, Request, ScoredTokens, TokenEvent, TokenLogprobs
from oarlock.server.json_text import PIECE_NUMBERS
from oarlock.server.llm.detokenizer import Detokenizer, StopStringMatcher, StopStrings
from oarlock.server.llm.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """Progress of a prompt, as counted by its engine, and its position in the queue."""

    total: int  # prompt tokens
    cache: int  # prompt tokens that were already in the KV cache
    processed: int  # prompt tokens that are cached or computed
    time_ms: int  # time since the request was sent to the engine
    queue_position: int | None  # requests ahead of it; None: it runs, or the engine does not report it


@dataclass(frozen=True, slots=True)
class ReadText:
    """Events parsed from a piece of text, before stop strings were searched in its visible part."""

    events: Sequence[Any]
    reasoning_tokens: int  # total so far


class StopFinder(Protocol):
    """Finds stop strings in incremental text: a `StopStringMatcher`, or a parser that knows which part is visible.

    The methods return (the text that may be shown now, the stop string that ended it).
    """

    def push(self, text: str, may_end: bool = True) -> tuple[str, str | None]: ...

    def finish(self, text: str, is_ended: bool) -> tuple[str, str | None]: ...

    def take(self) -> ReadText | None:
        """Return the events since the last call, if it is a parser; its `push` and `finish` return no text."""
        ...


# (stop strings, whether the match is shown) -> a finder for one choice
StopFinders = Callable[[StopStrings, bool], StopFinder]


@dataclass(slots=True)
class Delta:
    """Piece of a choice that one event added: its text, tokens and scores, and the finish reason."""

    index: int
    text: str = ""
    num_tokens: int = 0
    scores: Scores = ()  # scores of the echoed prompt, then one for each token
    token_ids: tuple[int, ...] = ()
    prompt_scores: PromptScores | None = None  # sent with a choice's first pieces, on request
    is_first: bool = False
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_param: str | None = None  # the field of the request that is at fault
    error_code: str | None = None  # code of the error, if it has one
    progress: PromptProgress | None = None  # progress of the prompt; all other fields are then empty
    read: ReadText | None = None  # replaces `text` if stop strings are searched only in its visible part


@dataclass(frozen=True, slots=True)
class OutputOptions:
    """Options of a request for the output of a choice: echo, scores, special tokens, stop strings."""

    echo_text: str | None = None  # the text begins with it
    echo_scores: bool = False  # the scores begin with the prompt's scores
    prompt_scores: bool = False
    shown: frozenset[int] = frozenset()  # special ids that count as text
    include_stop: bool = False  # the stop string or stop token is part of the text


_PLAIN = OutputOptions()
# Finish reasons of the server: the time limit has passed, or the operator has aborted the request.
TIMEOUT = "timeout"
ABORT = FinishReason.ABORT.value


class ChoiceOutput:
    """Incremental text of one engine request."""

    def __init__(
        self,
        index: int,
        request: Request,
        tokenizer: Tokenizer,
        stops: StopStrings,
        output_options: OutputOptions = _PLAIN,
        stop_finders: StopFinders = StopStringMatcher,
    ) -> None:
        self.index = index
        self.request = request
        self.output_options = output_options
        self.num_tokens = 0
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self.started = False  # its prompt is done
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(request.prompt_token_ids, output_options.shown)
        # None: there are no stop strings.
        self._finder = stop_finders(stops, output_options.include_stop) if stops else None
        self._num_characters = 0  # characters decoded so far, the offset of the next token's text
        self._opened = False  # its first piece has been made
        wants_scores = output_options.echo_scores or output_options.prompt_scores
        whole_prompt = tokenizer.detokenizer() if output_options.echo_scores else None
        self._prompt = PromptReader(request.prompt_token_ids, whole_prompt) if wants_scores else None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def push(self, event: TokenEvent) -> Delta | None:
        """Return the piece that one event adds; None if there is nothing to show yet."""
        delta = Delta(self.index)
        if not self._opened:
            self._open(event, delta)
        if not self.started:
            self._take_prompt(event, delta)
        self._take_tokens(event, delta)
        if self.finish_reason is None and event.finish_reason is not None:
            self._finish(event, delta)
        if self._finder is not None:
            delta.read = self._finder.take()
        if delta.num_tokens or delta.text or delta.prompt_scores or delta.scores or self.finish_reason is not None:
            return delta
        return None

    @property
    def only_echoes(self) -> bool:
        """Whether there is nothing to generate or score."""
        return self.request.params.max_tokens == 0 and self.request.params.prompt_logprobs is None

    def echo_only(self) -> Delta:
        """Return the only piece if there is nothing to generate or score."""
        self.started = self._opened = True
        self.finish_reason = FinishReason.LENGTH.value
        return Delta(self.index, self.output_options.echo_text or "", is_first=True, finish_reason=self.finish_reason)

    def cut(self, reason: str) -> Delta:
        """Return the last piece of a choice that the server ends, with the text that was held back."""
        delta = Delta(self.index, is_first=not self._opened)
        if not self._opened and self.output_options.echo_text:
            delta.text = self.output_options.echo_text
        rest = self._detokenizer.flush()
        if self._finder is None:
            delta.text += rest
        else:
            delta.text += self._finder.finish(rest, False)[0]
            delta.read = self._finder.take()
        self.finish_reason = delta.finish_reason = reason
        return delta

    def _open(self, event: TokenEvent, delta: Delta) -> None:
        self._opened = delta.is_first = True
        self.num_cached_tokens = event.num_cached_tokens
        if self.output_options.echo_text is not None:
            delta.text = self.output_options.echo_text
            self._num_characters = len(self.output_options.echo_text)

    def _take_prompt(self, event: TokenEvent, delta: Delta) -> None:
        """Add the scores of a part of the prompt; the last part arrives with the first token or with the end."""
        self.started = bool(event.token_ids) or event.finish_reason is not None
        if self._prompt is not None:
            scores = self._prompt.read(event.prompt_logprobs)
            if self.output_options.echo_scores:
                delta.scores = scores
            if self.output_options.prompt_scores:
                delta.prompt_scores = scores

    def _take_tokens(self, event: TokenEvent, delta: Delta) -> None:
        """Decode token by token: a stop string may end the choice in the middle of an event."""
        min_tokens = self.request.params.min_tokens
        last = len(event.token_ids) - 1
        delta.token_ids = event.token_ids
        scores = [*delta.scores] if event.logprobs else []
        if event.logprobs:
            delta.scores = scores
        for position, token_id in enumerate(event.token_ids):
            self.num_tokens += 1
            delta.num_tokens += 1
            if event.logprobs:
                scores.append(TokenScore.of(event.logprobs[position], self._num_characters))
            if event.stop_token_id is not None and position == last and not self.output_options.include_stop:
                return  # a stop token is counted, not shown
            text = self._detokenizer.push((token_id,))
            self._num_characters += len(text)
            if self._finder is None:
                delta.text += text
                continue
            shown, found = self._finder.push(text, self.num_tokens > min_tokens)
            delta.text += shown
            if found is not None:
                delta.token_ids = event.token_ids[: position + 1]
                self._end(delta, FinishReason.STOP, found)
                return

    def _finish(self, event: TokenEvent, delta: Delta) -> None:
        """Finish the piece when the engine has ended the request, with the text that was held back."""
        rest = self._detokenizer.flush()
        reason = event.finish_reason or FinishReason.ERROR
        is_requested = event.stop_token_id in self.request.params.stop_token_ids
        if self._finder is not None:
            rest, found = self._finder.finish(rest, reason is FinishReason.STOP and not is_requested)
            if found is not None:
                delta.text += rest
                self._end(delta, FinishReason.STOP, found)
                return
        delta.text += rest
        if reason in (FinishReason.ERROR, FinishReason.ABORT):
            delta.error, delta.error_param = event.error or "The engine aborted this request.", event.error_param
            delta.error_code = event.error_code
            self._end(delta, FinishReason.ERROR, None)
            return
        self._end(delta, reason, event.stop_token_id if is_requested else None)

    def _end(self, delta: Delta, reason: FinishReason, stop_reason: str | int | None) -> None:
        self.finish_reason = delta.finish_reason = reason.value
        delta.stop_reason = stop_reason


class TokenScore(NamedTuple):
    """Score of one token in logprobs. `logprob` is None for the first token of a prompt, which has no context."""

    token_id: int
    logprob: float | None
    top: tuple[tuple[int, float], ...]
    offset: int  # characters of text before it
    rank: int = 0  # 1 = most likely; 0: not scored

    @staticmethod
    def of(logprobs: TokenLogprobs, offset: int) -> TokenScore:
        return TokenScore(logprobs.token_id, logprobs.logprob, logprobs.top, offset, logprobs.rank)


class PromptScores:
    """Scores of consecutive prompt tokens. They are created on iteration, since stored scores take much memory."""

    def __init__(self, first_id: int | None, logprobs: Sequence[TokenLogprobs], offsets: array) -> None:
        """`first_id`: the first token of the prompt, which has no logprobs. `offsets`: of all tokens, or empty."""
        self._first_id = first_id
        self._logprobs = logprobs
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._logprobs) + (self._first_id is not None)

    def __iter__(self) -> Iterator[TokenScore]:
        return self.scores()

    def scores(self, *, with_top: bool = True) -> Iterator[TokenScore]:
        """Yield the scores, faster without alternatives."""
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
    """Reader of one prompt's scores, part by part."""

    def __init__(self, prompt_ids: Sequence[int], detokenizer: Detokenizer | None) -> None:
        """`detokenizer`: None leaves offsets out."""
        self._prompt_ids = prompt_ids
        self._detokenizer = detokenizer
        self._num_read = 0
        self._num_characters = 0

    def read(self, logprobs: Sequence[TokenLogprobs]) -> PromptScores:
        """Return the scores of the next tokens; the first part also has the first token, which has no logprob."""
        is_first = self._num_read == 0
        begin, self._num_read = self._num_read, self._num_read + len(logprobs) + is_first
        offsets = array("i")
        if self._detokenizer is not None:
            for token_id in self._prompt_ids[begin : self._num_read]:
                offsets.append(self._num_characters)
                self._num_characters += len(self._detokenizer.push((token_id,)))
        return PromptScores(self._prompt_ids[0] if is_first else None, logprobs, offsets)


def parts_of(event: TokenEvent) -> Iterator[TokenEvent]:
    """Yield `event` split by its prompt scores, in parts of limited work; the last part has all other fields."""
    scored = event.prompt_logprobs
    size = max(1, PIECE_NUMBERS // (1 + len(scored[0].top))) if scored else 1
    last = max(0, len(scored) - 1) // size * size
    for start in range(0, last, size):
        part = scored[start : start + size]
        yield TokenEvent(event.request_id, prompt_logprobs=part, num_cached_tokens=event.num_cached_tokens)
    yield replace(event, prompt_logprobs=scored[last:]) if last else event
