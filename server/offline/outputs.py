"""Outputs of the Python interface, with vLLM's names, made from the same pieces as the HTTP responses.

A prompt becomes a `RequestOutput` with a `CompletionOutput` for each completion, or a vector; a pair of texts, a score.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypedDict, TypeVar

from oarlock.server.chat.message_parser import MessageParser
from oarlock.server.endpoints.chat.serving import ProcessedChat, read_message
from oarlock.server.endpoints.pooling.scoring import OpenAIServingScoring
from oarlock.server.endpoints.pooling.serving import OpenAIServingEmbedding
from oarlock.server.http.request_body import parse
from oarlock.server.json_text import dumps
from oarlock.server.llm.generation import Generation
from oarlock.server.llm.output_processor import Delta, TokenScore
from oarlock.server.llm.tokenizer import Tokenizer
from oarlock.server.offline.inputs import LoRARequest, Prompt
from oarlock.server.schemas.pooling import EmbeddingRequest, ScoreRequest

if TYPE_CHECKING:
    import numpy as np


_ListT = TypeVar("_ListT", bound=list[Any])
_PAIRS = 32  # pairs per group; a text that is in all of them is embedded once for each group


class OutputGroup(NamedTuple, Generic[_ListT]):
    """Outputs of some prompts, and their contribution to the progress."""

    outputs: _ListT  # an output for each prompt
    num_tokens: int


OutputGroupCall = Callable[[], Awaitable[OutputGroup[_ListT]]]


class Logprob(NamedTuple):
    """Natural logarithm of a token's probability."""

    logprob: float
    rank: int | None  # 1: the most likely
    decoded_token: str


Logprobs = dict[int, Logprob]  # entries of one position: the token that is there, and the requested alternatives


@dataclass(frozen=True, slots=True)
class RequestStateStats:
    """Times of one request, as its program saw them; `_ts` are seconds of `time.monotonic`."""

    num_generation_tokens: int
    arrival_time: float  # seconds since the epoch
    first_token_ts: float
    last_token_ts: float
    first_token_latency: float  # seconds from the arrival


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str  # the completion; in a chat, the content of its message
    token_ids: list[int]
    cumulative_logprob: float | None  # set with `SamplingParams.logprobs`
    logprobs: list[Logprobs] | None  # one per token, if `SamplingParams.logprobs` asks for them
    finish_reason: str | None  # `stop`, `length`, `tool_calls` or `timeout`
    stop_reason: int | str | None  # the request's stop string or token id that ended it, if any
    message: dict[str, Any] | None = None  # set in a chat: with reasoning and tool calls, to continue the conversation

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """One prompt, or one conversation, and its completions."""

    request_id: str  # index of the prompt among all prompts of one `LLM`
    prompt: str | None  # the text; None if token ids were given
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None  # one per token, if `SamplingParams.prompt_logprobs` asks for them
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    metrics: RequestStateStats
    lora_request: LoRARequest | None = None  # the adapter that computed it
    finished: bool = True

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.outputs[0].text

    @property
    def finish_reason(self) -> str | None:
        """Finish reason of the first completion."""
        return self.outputs[0].finish_reason

    @property
    def message(self) -> dict[str, Any] | None:
        """Message of the first completion of a chat."""
        return self.outputs[0].message

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all completions."""
        return sum(len(output.token_ids) for output in self.outputs)


@dataclass(frozen=True, slots=True)
class PromptInfo:
    """Data about a prompt that is needed for its output."""

    request_id: str
    prompt: str | None
    wants_logprobs: bool
    wants_prompt_logprobs: bool
    adapter: LoRARequest | None


def completion(
    asked: PromptInfo, tokenizer: Tokenizer, generation: Generation, pieces: Sequence[Sequence[Delta]]
) -> RequestOutput:
    """Make the output of `/v1/completions`."""
    outputs = [
        _output(asked, tokenizer, index, "".join(piece.text for piece in of_choice), of_choice)
        for index, of_choice in enumerate(pieces)
    ]
    return _whole(asked, tokenizer, generation, pieces, outputs)


def chat_completion(
    asked: PromptInfo,
    tokenizer: Tokenizer,
    processed: ProcessedChat,
    generation: Generation,
    pieces: Sequence[Sequence[Delta]],
) -> RequestOutput:
    """Make the output of `/v1/chat/completions`."""
    outputs = []
    for index, of_choice in enumerate(pieces):
        message, finish_reason = read_message(MessageParser(processed.shape), of_choice)
        outputs.append(_output(asked, tokenizer, index, message["content"] or "", of_choice, message, finish_reason))
    return _whole(asked, tokenizer, generation, pieces, outputs)


def _output(
    asked: PromptInfo,
    tokenizer: Tokenizer,
    index: int,
    text: str,
    pieces: Sequence[Delta],
    message: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> CompletionOutput:
    last = pieces[-1]
    scores = [score for piece in pieces for score in piece.scores] if asked.wants_logprobs else None
    return CompletionOutput(
        index=index,
        text=text,
        token_ids=[token_id for piece in pieces for token_id in piece.token_ids],
        cumulative_logprob=None if scores is None else sum(score.logprob or 0.0 for score in scores),
        logprobs=None if scores is None else [_of_token(score, tokenizer) for score in scores],
        finish_reason=finish_reason or last.finish_reason,
        stop_reason=last.stop_reason,
        message=message,
    )


def _whole(
    asked: PromptInfo,
    tokenizer: Tokenizer,
    generation: Generation,
    pieces: Sequence[Sequence[Delta]],
    outputs: list[CompletionOutput],
) -> RequestOutput:
    scores = (score for piece in pieces[0] if piece.prompt_scores for score in piece.prompt_scores)
    return RequestOutput(
        request_id=asked.request_id,
        prompt=asked.prompt,
        prompt_token_ids=list(generation.choices[0].request.prompt_token_ids),
        prompt_logprobs=_of_prompt(scores, tokenizer) if asked.wants_prompt_logprobs else None,
        outputs=outputs,
        num_cached_tokens=generation.cached_tokens,
        metrics=_metrics(generation),
        lora_request=asked.adapter,
    )


def _metrics(generation: Generation) -> RequestStateStats:
    now, arrival = time.monotonic(), generation.arrival
    first = generation.first_token_at or now
    return RequestStateStats(generation.completion_tokens, time.time() - (now - arrival), first, now, first - arrival)


def _of_prompt(scores: Iterable[TokenScore], tokenizer: Tokenizer) -> list[Logprobs | None]:
    return [None if score.logprob is None else _of_token(score, tokenizer) for score in scores]


def _of_token(score: TokenScore, tokenizer: Tokenizer) -> Logprobs:
    """Return the token's own entry first, then the alternatives, the most likely first."""
    assert score.logprob is not None
    found = {score.token_id: Logprob(score.logprob, score.rank or None, tokenizer.token_text(score.token_id))}
    for rank, (token_id, logprob) in enumerate(score.top, 1):
        found.setdefault(token_id, Logprob(logprob, rank, tokenizer.token_text(token_id)))
    return found


class EmbedFields(TypedDict, total=False):
    """Fields of a request for vectors other than its input. `docs/embeddings.md` describes each field."""

    dimensions: int
    normalize: bool
    prompt_name: str
    input_type: str
    add_special_tokens: bool
    truncate_prompt_tokens: int
    priority: int
    cache_salt: str


class ScoreFields(TypedDict, total=False):
    """Fields of a request for scores other than its texts."""

    instruction: str
    truncate_prompt_tokens: int
    priority: int
    cache_salt: str


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """One vector. `array` is the same for numpy: float32 [dimensions]."""

    array: np.ndarray

    @property
    def embedding(self) -> list[float]:
        return self.array.tolist()

    @property
    def hidden_size(self) -> int:
        return len(self.array)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """One prompt and its vector."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int  # prompt tokens taken from the prefix cache
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """One score."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """One pair of texts and its score. `prompt_token_ids`: of its prompt, or of one text and then the other."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool = True


def embeddings(
    endpoint: OpenAIServingEmbedding,
    prompts: Sequence[Prompt],
    models: Sequence[str | None],
    fields: EmbedFields,
    request_ids: Iterator[str],
) -> list[OutputGroupCall[list[EmbeddingRequestOutput]]]:
    """Make one group for each prompt. `models`: the name of each prompt's adapter; None: no adapter."""

    def answer(prompt: Prompt, model: str | None, request_id: str) -> OutputGroupCall[list[EmbeddingRequestOutput]]:
        async def embed() -> OutputGroup[list[EmbeddingRequestOutput]]:
            body = {**fields, "model": model, "input": prompt}
            vectors, outputs = await endpoint.vectors(parse(EmbeddingRequest, dumps(body).encode()))
            (vector,), (output,) = vectors, outputs
            ids = list(output.prompt_token_ids)
            found = EmbeddingRequestOutput(request_id, EmbeddingOutput(vector), ids, output.cached_tokens)
            return OutputGroup([found], output.prompt_tokens)

        return embed

    return [answer(prompt, model, next(request_ids)) for prompt, model in zip(prompts, models, strict=True)]


def scores(
    endpoint: OpenAIServingScoring,
    first: str | Sequence[str],
    second: str | Sequence[str],
    model: str | None,
    fields: ScoreFields,
    request_ids: Iterator[str],
) -> list[OutputGroupCall[list[ScoringRequestOutput]]]:
    """Make groups of pairs. `model`: the name of the adapter; None: no adapter.

    Raises `ValueError` if `first` is neither a single text nor as long as `second`.
    """
    others = [second] if isinstance(second, str) else list(second)
    ones = [first] if isinstance(first, str) else list(first)
    if len(ones) not in (1, len(others)):
        raise ValueError(
            f"there are {len(ones)} texts and {len(others)} to compare them with: give one text, or the same number"
        )
    names = [next(request_ids) for _ in others]

    def answer(start: int) -> OutputGroupCall[list[ScoringRequestOutput]]:
        async def score() -> OutputGroup[list[ScoringRequestOutput]]:
            texts = ones if len(ones) == 1 else ones[start : start + _PAIRS]
            body = {**fields, "model": model, "text_1": texts, "text_2": others[start : start + _PAIRS]}
            found, made_of = await endpoint.scores(parse(ScoreRequest, dumps(body).encode()))
            outputs = [
                ScoringRequestOutput(
                    names[start + number],
                    ScoringOutput(one),
                    [token_id for part in parts for token_id in part.prompt_token_ids],
                    sum(part.cached_tokens for part in parts),
                )
                for number, (one, parts) in enumerate(zip(found, made_of, strict=True))
            ]
            return OutputGroup(outputs, sum(len(output.prompt_token_ids) for output in outputs))

        return score

    return list(map(answer, range(0, len(others), _PAIRS)))
