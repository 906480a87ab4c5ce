"""Serving of `/v1/chat/completions`: processing of requests, and writing of responses with tool calls and reasoning."""

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from oarlock.server.chat.detection import hides_tools, tool_format_of
from oarlock.server.chat.message_parser import MessageParser, MessageShape
from oarlock.server.chat.prompt import render_prompt, response_grammar
from oarlock.server.chat.tool_parsers.call_parser import (
    ArgumentsDelta,
    ContentDelta,
    MessageEvent,
    ReasoningDelta,
    ToolCallStart,
    merged,
)
from oarlock.server.chat.visible_stops import VisibleStops
from oarlock.server.endpoints.generate import OpenAIServingGenerate
from oarlock.server.endpoints.response_writer import ResponseHead, ResponseOptions, ResponseWriter, finite, usage
from oarlock.server.http.api_route import ErrorHandlingRoute
from oarlock.server.http.openapi import describe
from oarlock.server.http.server_sent_events import GenerationWriter
from oarlock.server.json_text import dumps, json_text
from oarlock.server.llm.chat_template import ChatTemplate
from oarlock.server.llm.detokenizer import StopStringMatcher
from oarlock.server.llm.generation import Generation
from oarlock.server.llm.input_processor import ProcessedRequest, constraint_of
from oarlock.server.llm.output_processor import Delta, Scores, StopFinders, TokenScore
from oarlock.server.llm.tokenizer import Tokenizer
from oarlock.server.observability import logs
from oarlock.server.schemas.chat import ChatRequest

_PARTS_AT_ONCE = 128  # most messages and parts that the event loop itself converts to a chat turn
_TurnT = TypeVar("_TurnT", bound=ChatRequest)
_log = logs.logger("chat")


@dataclass(frozen=True, slots=True)
class ProcessedChat(ProcessedRequest):
    """The choices of one chat turn, ready to run, and the format of their text."""

    shape: MessageShape = field(default_factory=MessageShape)
    prompt: str = ""  # the text that the chat template wrote


class OpenAIServingChatCompletion(OpenAIServingGenerate[ChatRequest, ProcessedChat]):
    """The chat completions endpoint."""

    state_name = "serving_chat_completion"
    _prompt_field = "messages"
    _in_items: ClassVar[bool] = False  # True: reasoning, texts and calls are shown in the order in which they came

    async def process(self, body: ChatRequest) -> ProcessedChat:
        prompt = await render_prompt(self.tokenizer, body)
        marks = _special_ids(self.tokenizer, prompt.delimiters)
        grammar = response_grammar(constraint_of(body), prompt, marks)
        processed = await self.async_llm.input_processor.process_text(
            body,
            prompt.text,
            body.token_limit,
            logprobs=_num_alternatives(body),
            grammar=grammar,
            shown=frozenset(marks.values()),
            param=self._prompt_field,
            stop_finders=self._stop_finders(prompt.shape),
        )
        return ProcessedChat(
            processed.choices,
            processed.num_prompts,
            processed.timeout_s,
            ignored=tuple(map(body.name_of, prompt.ignored)),
            shape=prompt.shape,
            prompt=prompt.text,
        )

    async def parse_in_turn(self, make: Callable[[], _TurnT], num_parts: int) -> _TurnT:
        """Return the chat turn that `make` makes of another API's request. A long conversation is made in a thread."""
        if num_parts <= _PARTS_AT_ONCE:
            return make()
        return await self.tokenizer.run(make, num_parts)

    def _stop_finders(self, shape: MessageShape) -> StopFinders:
        return StopStringMatcher if shape.is_plain else partial(VisibleStops, shape, self._in_items)

    def _writer(
        self, body: ChatRequest, processed: ProcessedChat, generation: Generation, model: str, request_id: str
    ) -> GenerationWriter:
        head = self._head(
            f"chatcmpl-{request_id}", "chat.completion.chunk" if body.stream else "chat.completion", model
        )
        options = self._options(body, _num_alternatives(body))
        return ChatCompletionWriter(head, self.tokenizer, generation, options, processed.shape)


async def try_tool_format(template: ChatTemplate) -> None:
    """Find out the model's format of tool calls before the first request, and log if tools cannot be used.

    Raises `EngineError` if the process that renders templates is lost.
    """
    if not (await tool_format_of(template)).is_parsed:
        _log.warning(
            logs.event(
                "tool_calls_unknown",
                cause="the format of the tool calls that the chat template describes is not known: only "
                "forced calls can be read",
                fix="name the format with --tool-call-parser, or give a --chat-template that uses a known format",
            )
        )
    elif await hides_tools(template):
        _log.warning(
            logs.event(
                "tools_not_shown",
                cause="the chat template leaves the tools of a request out of the prompt: the model does not know them",
                fix="leave --tool-call-parser out, or give a --chat-template that shows the tools",
            )
        )


def _num_alternatives(body: ChatRequest) -> int | None:
    """Return the number of alternatives for each token, or None for no logprobs."""
    return (body.top_logprobs or 0) if body.logprobs else None


def _special_ids(tokenizer: Tokenizer, marks: tuple[str, ...]) -> dict[str, int]:
    """Return the ids of the delimiters in `marks` that are special tokens, which a text does not show by default."""
    ids = {mark: tokenizer.backend.token_to_id(mark) for mark in marks}
    return {mark: token for mark, token in ids.items() if token is not None and token in tokenizer.special_ids}


class ChatCompletionWriter(ResponseWriter):
    """Writer of `chat.completion` and its chunks."""

    _has_one_prompt = True

    def __init__(
        self,
        head: ResponseHead,
        tokenizer: Tokenizer,
        generation: Generation,
        options: ResponseOptions,
        shape: MessageShape,
    ) -> None:
        super().__init__(head, tokenizer, generation, options)
        self._is_plain = shape.is_plain
        self._parsers = [MessageParser(shape) for _ in generation.choices]
        self._num_calls = [0] * len(generation.choices)

    def opening(self, num_choices: int) -> Iterable[bytes]:
        role = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return [f"{self._start}{index},{role}{self._ending()}".encode() for index in range(num_choices)]

    def chunk(self, delta: Delta) -> bytes | None:
        """Return the events of a piece, which are several if the piece has several parts, or None."""
        if self._is_plain or delta.progress is not None:
            return super().chunk(delta)
        self._counted += delta.num_tokens
        parser = self._parsers[delta.index]
        pieces = [self._event_piece(delta.index, event) for event in parser.push(delta)]
        if not (pieces or delta.scores or delta.finish_reason or self._has_extras):
            return None
        finish = {"finish_reason": parser.finish_reason(delta), "stop_reason": delta.stop_reason}
        if not pieces:
            pieces = ['"delta":{"content":""}' if delta.scores else '"delta":{}']
        if len(pieces) == 1:
            return self._event(replace(delta, **finish), pieces[0])
        # Logprobs and other data of the tokens are sent with the first event, the end with the last.
        parts = [Delta(delta.index) for _ in pieces]
        parts[0] = replace(delta, finish_reason=None, stop_reason=None)
        parts[-1] = replace(parts[-1], **finish)
        return b"".join(map(self._event, parts, pieces))

    def _event_piece(self, index: int, event: MessageEvent) -> str:
        """Return the member `delta` of one event."""
        if isinstance(event, ContentDelta):
            return f'"delta":{{"content":{json_text(event.text)}}}'
        if isinstance(event, ReasoningDelta):
            text = json_text(event.text)
            return f'"delta":{{"reasoning_content":{text},"reasoning":{text}}}'
        if isinstance(event, ToolCallStart):
            self._num_calls[index] += 1
            call = {"index": self._num_calls[index] - 1, **_call(event)}
        else:
            call = {"index": self._num_calls[index] - 1, "function": {"arguments": event.text}}
        return f'"delta":{{"tool_calls":[{dumps(call)}]}}'

    def _piece(self, delta: Delta) -> str:
        if not delta.text and not delta.scores:
            return '"delta":{}'
        return f'"delta":{{"content":{json_text(delta.text)}}}'

    def _choice(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _whole_choice(self, index: int, pieces: Sequence[Delta]) -> dict[str, Any]:
        whole = super()._whole_choice(index, pieces)
        if not self._is_plain:
            whole["message"], whole["finish_reason"] = read_message(self._parsers[index], pieces)
        return whole

    def _usage(self, generation: Generation) -> dict[str, Any]:
        reasoning = sum(parser.reasoning_tokens for parser in self._parsers)
        return {**usage(generation), "completion_tokens_details": {"reasoning_tokens": reasoning}}

    def _make_columns(self) -> dict[str, Callable[[TokenScore], Any]]:
        return {"content": self._content}

    def _content(self, score: TokenScore) -> dict[str, Any]:
        return token_logprobs(self._tokenizer, score, self._options.logprobs or 0, self._options.tokens_as_ids)

    def _logprobs(self, scores: Scores) -> dict[str, Any]:
        return {**super()._logprobs(scores), "refusal": None}

    def _whole_logprobs(self, pieces: Sequence[Delta]) -> dict[str, Any]:
        return {**super()._whole_logprobs(pieces), "refusal": None}


def token_logprobs(tokenizer: Tokenizer, score: TokenScore, num_top: int, as_ids: bool = False) -> dict[str, Any]:
    """Return a token of a response's text with its best alternatives. `as_ids`: tokens are named by their ids."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        name = f"token_id:{token_id}" if as_ids else data.decode("utf-8", "replace")
        return {"token": name, "logprob": finite(logprob), "bytes": list(data)}

    top = [entry(token_id, logprob) for token_id, logprob in score.top[:num_top]]
    return {**entry(score.token_id, score.logprob or 0.0), "top_logprobs": top}


def _call(start: ToolCallStart) -> dict[str, Any]:
    """Return a call without arguments, with a new id if the model gave none."""
    function = {"name": start.name, "arguments": ""}
    return {"id": start.id or f"call_{secrets.token_hex(12)}", "type": "function", "function": function}


def read_message(parser: MessageParser, pieces: Sequence[Delta]) -> tuple[dict[str, Any], str | None]:
    """Return a choice's whole message, and its finish reason."""
    events = merged([event for piece in pieces for event in parser.push(piece)])
    return _message(events), parser.finish_reason(pieces[-1])


def _message(events: Sequence[MessageEvent]) -> dict[str, Any]:
    """Return a whole message. `content` is null only if there are calls instead."""
    content = "".join(event.text for event in events if isinstance(event, ContentDelta))
    reasoning = "".join(event.text for event in events if isinstance(event, ReasoningDelta))
    calls: list[dict[str, Any]] = []
    for event in events:
        if isinstance(event, ToolCallStart):
            calls.append(_call(event))
        elif isinstance(event, ArgumentsDelta):
            calls[-1]["function"]["arguments"] += event.text
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        message |= {"reasoning_content": reasoning, "reasoning": reasoning}
    return message | ({"tool_calls": calls} if calls else {})


router = APIRouter(route_class=ErrorHandlingRoute)
rendering = APIRouter(route_class=ErrorHandlingRoute)
_OPENAPI = describe(
    "Create chat completion",
    "ChatCompletion",
    bodies=("ChatRequest",),
    examples={
        "plain": {"messages": [{"role": "user", "content": "Hi"}], "max_completion_tokens": 20},
        "stream": {"messages": [{"role": "user", "content": "Hi"}], "stream": True},
    },
    streams=True,
)
_RENDER = describe(
    "Render chat prompt",
    "Rendered",
    bodies=("ChatRequest",),
    examples={"plain": {"messages": [{"role": "user", "content": "Hi"}]}},
)


@router.post("/v1/chat/completions", openapi_extra=_OPENAPI)
async def create_chat_completion(request: Request) -> Response:
    serving = OpenAIServingChatCompletion.of(request)
    body, headers = await serving.read(request, ChatRequest)
    return await serving.create(request, body, headers)


@rendering.post("/v1/chat/completions/render", openapi_extra=_RENDER)
async def render_chat(request: Request) -> Response:
    """Return the prompt and the resolved parameters of a chat completion, without generating."""
    serving = OpenAIServingChatCompletion.of(request)
    body, headers = await serving.read(request, ChatRequest)
    return await serving.render(request, body, headers, each=False)
