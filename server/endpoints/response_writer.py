"""Writer of completions and chat completions: streams and bodies whose objects have `choices`.

The JSON is built by hand for speed, because every token passes through here.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from oarlock.server.errors import HttpError, error_bytes
from oarlock.server.http.server_sent_events import GenerationWriter
from oarlock.server.json_text import LONG_TEXT, StreamedList, dumps, pieces_of
from oarlock.server.llm.generation import Generation
from oarlock.server.llm.output_processor import Delta, PromptProgress, PromptScores, Scores, TokenScore
from oarlock.server.llm.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
_WITH_ALTERNATIVES = frozenset({"top_logprobs", "content"})  # the lists of `logprobs` that include alternatives
_MIN_LOGPROB = -9999.0  # JSON has no -Infinity; OpenAI's convention for "impossible"


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """The members that all chunks of one response have in common."""

    id: str
    object: str
    created: int
    model: str
    fingerprint: str

    def fields(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def usage(generation: Generation) -> dict[str, Any]:
    prompt, completion = generation.prompt_tokens, generation.completion_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
    }


@dataclass(frozen=True, slots=True)
class ResponseOptions:
    """Options for the members of a response other than the text."""

    logprobs: int | None = None  # number of alternatives for every token; None: no logprobs
    prompt_logprobs: int | None = None
    token_ids: bool = False
    tokens_as_ids: bool = False  # names of tokens in logprobs are `token_id:N`
    usage: bool = False  # streams: all chunks but the last have `"usage": null`
    continuous_usage: bool = False
    keep: int | None = None  # number of best choices to keep for each prompt; None: all


class ResponseWriter(GenerationWriter):
    """Writer of the format of completions and chat completions: objects with `choices`."""

    end = DONE
    # True: the prompt's ids and scores are written once, next to the choices. False: with each choice.
    _has_one_prompt = False

    def __init__(
        self, head: ResponseHead, tokenizer: Tokenizer, generation: Generation, options: ResponseOptions
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._generation = generation
        self._options = options
        self._has_extras = options.token_ids or options.prompt_logprobs is not None
        self._with_logprobs = options.logprobs is not None
        self._columns = self._make_columns()
        self._is_counting = options.continuous_usage
        self._counted = 0  # tokens of the pieces written so far
        self._start = f"data: {dumps(head.fields())[:-1]}" + ',"choices":[{"index":'
        self._end = '}],"usage":null}\n\n' if options.usage else "}]}\n\n"

    @property
    def response_id(self) -> str:
        return self._head.id

    @abstractmethod
    def _piece(self, delta: Delta) -> str:
        """Return the member of a chunk's choice that carries the text."""

    @abstractmethod
    def _choice(self, text: str) -> dict[str, Any]:
        """Return the member of a whole choice that carries the text."""

    @abstractmethod
    def _make_columns(self) -> dict[str, Callable[[TokenScore], Any]]:
        """Return the members of `logprobs` that are lists, each with the function that makes a token's entry."""

    def _logprobs(self, scores: Scores) -> dict[str, Any]:
        return {name: [entry(score) for score in scores] for name, entry in self._columns.items()}

    def chunk(self, delta: Delta) -> bytes | None:
        """Return one event, or None if the piece has nothing to show."""
        if delta.progress is not None:
            return self._progress(delta.progress)
        self._counted += delta.num_tokens
        if not (delta.text or delta.scores or delta.finish_reason or self._has_extras):
            return None
        return self._event(delta, self._piece(delta))

    def _progress(self, progress: PromptProgress) -> bytes:
        """Return a chunk without choices, like the chunk with the usage."""
        fields = {**self._head.fields(), "choices": [], "prompt_progress": asdict(progress)}
        return f"data: {dumps(fields | ({'usage': None} if self._options.usage else {}))}\n\n".encode()

    def _event(self, delta: Delta, piece: str) -> bytes:
        """Return one chunk around the member that carries the text."""
        logprobs = dumps(self._logprobs(delta.scores)) if self._with_logprobs else "null"
        ending = '"finish_reason":null'
        if delta.finish_reason is not None:
            ending = f'"finish_reason":"{delta.finish_reason}","stop_reason":{dumps(delta.stop_reason)}'
        end = self._ending() if self._is_counting else self._end
        if self._has_extras:
            ending += _members(self._extras((delta,)))
            end = f"}}]{_members(self._beside_choices((delta,)))}{end[2:]}"
        return f'{self._start}{delta.index},{piece},"logprobs":{logprobs},{ending}{end}'.encode()

    def _usage(self, generation: Generation) -> dict[str, Any]:
        return usage(generation)

    def closing(self, generation: Generation) -> Iterable[bytes]:
        """Yield the usage, on request."""
        if self._options.usage:
            last = {**self._head.fields(), "choices": [], "usage": self._usage(generation)}
            yield f"data: {dumps(last)}\n\n".encode()

    def failure(self, error: HttpError) -> bytes:
        return b"data: " + error_bytes(error) + b"\n\n"

    def whole(self, deltas: Sequence[Sequence[Delta]], generation: Generation) -> Iterator[str]:
        """Yield the whole response. It comes in many parts if it has logprobs or long texts."""
        kept = list(deltas) if self._options.keep is None else best(deltas, generation.per_prompt, self._options.keep)
        choices = [self._whole_choice(index, pieces) for index, pieces in enumerate(kept)]
        beside = self._beside_choices(kept[0])
        response = {**self._head.fields(), "choices": choices, **beside, "usage": self._usage(generation)}
        num_characters = sum(len(piece.text) for pieces in kept for piece in pieces)
        if self._with_logprobs or self._options.prompt_logprobs is not None or num_characters > LONG_TEXT:
            return pieces_of(response)
        return iter((dumps(response),))

    def _whole_choice(self, index: int, pieces: Sequence[Delta]) -> dict[str, Any]:
        return {
            "index": index,
            **self._choice("".join(piece.text for piece in pieces)),
            "logprobs": self._whole_logprobs(pieces) if self._with_logprobs else None,
            "finish_reason": pieces[-1].finish_reason,
            "stop_reason": pieces[-1].stop_reason,
            **(self._extras(pieces) if self._has_extras else {}),
        }

    def _whole_logprobs(self, pieces: Sequence[Delta]) -> dict[str, Any]:
        return {
            name: StreamedList(entry, _scores_of(pieces, name in _WITH_ALTERNATIVES), _num_logprobs)
            for name, entry in self._columns.items()
        }

    def _extras(self, pieces: Sequence[Delta]) -> dict[str, Any]:
        """Return the members of a choice that are only there on request."""
        found = {} if self._has_one_prompt else self._of_prompt(pieces)
        if self._options.token_ids:
            found["token_ids"] = [token_id for piece in pieces for token_id in piece.token_ids]
        return found

    def _beside_choices(self, pieces: Sequence[Delta]) -> dict[str, Any]:
        """Return the members next to the choices, in a response or a chunk, if all choices have the same prompt."""
        return self._of_prompt(pieces) if self._has_one_prompt and pieces[0].index == 0 else {}

    def _of_prompt(self, pieces: Sequence[Delta]) -> dict[str, Any]:
        """Return the prompt's ids and scores, which come with the first pieces of a choice."""
        found: dict[str, Any] = {}
        first = pieces[0]
        if self._options.token_ids and first.is_first:
            found["prompt_token_ids"] = list(self._generation.choices[first.index].request.prompt_token_ids)
        parts = [piece.prompt_scores for piece in pieces if piece.prompt_scores]
        if parts and self._options.prompt_logprobs is not None:
            found["prompt_logprobs"] = StreamedList(self._prompt_entry, chain.from_iterable(parts), _num_logprobs)
        return found

    def _prompt_entry(self, score: TokenScore) -> dict[str, Any] | None:
        """Return one prompt token and its best alternatives, by id."""
        if score.logprob is None:
            return None
        top = [(i, logprob, rank) for rank, (i, logprob) in enumerate(score.top[: self._options.prompt_logprobs], 1)]
        return {
            str(token_id): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": self._tokenizer.token_text(token_id),
            }
            for token_id, logprob, rank in ((score.token_id, score.logprob, score.rank), *top)
        }

    def _ending(self) -> str:
        """Return the end of a chunk, after its one choice."""
        if not self._is_counting:
            return self._end
        prompt = self._generation.prompt_tokens
        so_far = {
            "prompt_tokens": prompt,
            "completion_tokens": self._counted,
            "total_tokens": prompt + self._counted,
        }
        return f'}}],"usage":{dumps(so_far)}}}\n\n'

    def _name(self, token_id: int) -> str:
        """Return the name of a token in logprobs."""
        return f"token_id:{token_id}" if self._options.tokens_as_ids else self._tokenizer.token_text(token_id)


def _members(fields: dict[str, Any]) -> str:
    """Return more members for a JSON object that already has some."""
    return "".join(f',"{name}":{"".join(pieces_of(value))}' for name, value in fields.items())


def _scores_of(pieces: Sequence[Delta], with_top: bool) -> Iterator[TokenScore]:
    for piece in pieces:
        scores = piece.scores
        yield from scores.scores(with_top=with_top) if isinstance(scores, PromptScores) else scores


def _num_logprobs(score: TokenScore) -> int:
    return 1 + len(score.top)


def best(deltas: Sequence[Sequence[Delta]], per_prompt: int, keep: int) -> list[Sequence[Delta]]:
    """Return the `keep` choices of each prompt with the best mean log-probability, best first, ties in order."""
    found: list[Sequence[Delta]] = []
    for start in range(0, len(deltas), per_prompt):
        found += sorted(deltas[start : start + per_prompt], key=_mean_logprob, reverse=True)[:keep]
    return found


def _mean_logprob(pieces: Sequence[Delta]) -> float:
    generated = sum(piece.num_tokens for piece in pieces)
    scores = [
        score.logprob
        for piece in pieces
        if piece.num_tokens
        for score in [*piece.scores][len(piece.scores) - piece.num_tokens :]
    ]
    return sum(finite(logprob) for logprob in scores if logprob is not None) / max(1, generated)


def finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else _MIN_LOGPROB
