"""What an offline prompt became: its choices, made of the same pieces as the answers over HTTP."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from server.chat.message_parser import MessageParser
from server.llm.generation import Generation
from server.llm.output_processor import Delta
from server.llm.prompt_scores import TokenScore
from server.serving.chat_completion import ProcessedChat, read_message

_ListT = TypeVar("_ListT", bound=list[Any])


class Done(NamedTuple, Generic[_ListT]):
    """What some prompts became, and what they add to the progress."""

    outputs: _ListT  # one for each of them
    num_tokens: int


Answer = Callable[[], Awaitable[Done[_ListT]]]


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a prompt."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: str | int | None
    logprobs: tuple[TokenScore, ...]  # one per token, where `SamplingParams.logprobs` asks for them
    message: dict[str, Any] | None = None  # of a chat: as a conversation goes on with it


@dataclass(frozen=True, slots=True)
class Output:
    """What one prompt, or one conversation, became."""

    prompt: str | None  # the text, where one was given
    prompt_token_ids: tuple[int, ...]
    choices: tuple[Choice, ...]
    num_cached_tokens: int
    prompt_logprobs: tuple[TokenScore, ...]  # one per token, where `SamplingParams.prompt_logprobs` asks for them

    @property
    def text(self) -> str:
        """The first choice's."""
        return self.choices[0].text

    @property
    def finish_reason(self) -> str:
        """The first choice's: `stop`, `length`, `tool_calls` or `timeout`."""
        return self.choices[0].finish_reason

    @property
    def message(self) -> dict[str, Any] | None:
        """The first choice's, of a chat."""
        return self.choices[0].message

    @property
    def num_tokens(self) -> int:
        """Of all choices."""
        return sum(len(choice.token_ids) for choice in self.choices)


def completion(prompt: str | None, generation: Generation, pieces: Sequence[Sequence[Delta]]) -> Output:
    """The output of `/v1/completions`."""
    texts = ["".join(piece.text for piece in of_choice) for of_choice in pieces]
    choices = [_choice(index, texts[index], of_choice) for index, of_choice in enumerate(pieces)]
    return _output(prompt, generation, pieces, choices)


def chat_completion(processed: ProcessedChat, generation: Generation, pieces: Sequence[Sequence[Delta]]) -> Output:
    """The output of `/v1/chat/completions`."""
    choices = []
    for index, of_choice in enumerate(pieces):
        message, finish_reason = read_message(MessageParser(processed.shape), of_choice)
        choices.append(_choice(index, message["content"] or "", of_choice, message, finish_reason))
    return _output(None, generation, pieces, choices)


def _choice(
    index: int,
    text: str,
    pieces: Sequence[Delta],
    message: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> Choice:
    last = pieces[-1]
    return Choice(
        index=index,
        text=text,
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
        finish_reason=finish_reason or last.finish_reason or "",
        stop_reason=last.stop_reason,
        logprobs=tuple(score for piece in pieces for score in piece.scores),
        message=message,
    )


def _output(
    prompt: str | None, generation: Generation, pieces: Sequence[Sequence[Delta]], choices: Sequence[Choice]
) -> Output:
    return Output(
        prompt=prompt,
        prompt_token_ids=generation.choices[0].request.prompt_token_ids,
        choices=tuple(choices),
        num_cached_tokens=generation.cached_tokens,
        prompt_logprobs=tuple(score for piece in pieces[0] if piece.prompt_scores for score in piece.prompt_scores),
    )
