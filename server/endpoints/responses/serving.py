"""Serving of `/v1/responses`: requests become chat turns, results become response objects, which may be stored."""

import time
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from oarlock.engine.errors import RequestError
from oarlock.server.chat.visible_tokens import VisibleTokens
from oarlock.server.endpoints.chat.serving import OpenAIServingChatCompletion, ProcessedChat, token_logprobs
from oarlock.server.endpoints.responses.compact import CompactionWriter, SummaryTurn, bounded, summary_turn
from oarlock.server.endpoints.responses.store import ResponseStore, StoredResponse
from oarlock.server.endpoints.responses.translate import Item, ResponsesTurn, ResponsesWriter, renamed, turn_of
from oarlock.server.endpoints.text_permits import TextPermits
from oarlock.server.errors import HttpError
from oarlock.server.http.api_route import ErrorHandlingRoute, ListQuery
from oarlock.server.http.openapi import describe
from oarlock.server.http.request_record import salt_of, salted
from oarlock.server.http.server_sent_events import GenerationWriter
from oarlock.server.json_text import dumps
from oarlock.server.llm.generation import Generation
from oarlock.server.schemas.chat import ChatRequest, HostedTool, num_parts
from oarlock.server.schemas.response_items import (
    HostedCallItem,
    ItemReference,
    MessageItem,
    OtherCallItem,
    OtherCallOutputItem,
    UnreadItem,
)
from oarlock.server.schemas.responses import CompactRequest, FunctionTool, NamespaceTool, ResponsesRequest

_PREFIX = "resp_"
_SHOWN_OF_TOOL = {"type", "name", "description", "parameters", "strict"}


class OpenAIServingResponses(OpenAIServingChatCompletion):
    """The responses endpoint."""

    state_name = "serving_responses"
    _prompt_field = "input"
    _in_items = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._store = ResponseStore(self.settings.response_store)
        self._running: WeakValueDictionary[tuple[str, str], ResponsesWriter] = WeakValueDictionary()

    async def respond(self, request: Request, body: ResponsesRequest, headers: dict[str, str]) -> Response:
        """Return the response to a request. Raises `RequestError`."""
        turn = await self._turn(_owner(request), body)
        try:
            return await self.create(request, turn, headers)
        except RequestError as error:
            raise renamed(error) from None

    async def compact(self, request: Request, body: CompactRequest, headers: dict[str, str]) -> Response:
        """Respond with the conversation as the user's messages and a summary. Raises `RequestError`, `HttpError`."""
        owner = _owner(request)
        items = self._conversation(body, owner)
        turn = await self.parse_in_turn(partial(summary_turn, body, items, owner), num_parts(items))
        try:
            return await self.create(request, turn, headers)
        except RequestError as error:
            raise renamed(error) from None

    async def process(self, body: ChatRequest) -> ProcessedChat:
        processed = await super().process(body)
        return bounded(processed, self.max_len) if isinstance(body, SummaryTurn) else processed

    async def complete_one(
        self, body: ResponsesRequest, request_id: str, *, owner: str | None = None, label: str | None = None
    ) -> str:
        """Return the JSON of the whole response to a body that did not come over HTTP. Raises `RequestError`."""
        try:
            turn = await self._turn(salted(owner, None) or "", body)
            return await self.complete(turn, request_id, owner=owner, label=label)
        except RequestError as error:
            raise renamed(error) from None

    async def count(self, request: Request, body: ResponsesRequest, headers: dict[str, str]) -> Response:
        """Return the number of tokens in a request's prompt. Raises `RequestError`."""
        await self.check_model(body.model)
        try:
            processed = await TextPermits.of(request).run(request, partial(self._processed, _owner(request), body))
            headers = self.reported(request, processed.ignored, headers)
        except RequestError as error:
            raise renamed(error) from None
        count = len(processed.choices[0].request.prompt_token_ids)
        return _json({"object": "response.input_tokens", "input_tokens": count}, headers)

    async def _processed(self, owner: str, body: ResponsesRequest) -> ProcessedChat:
        return await self.process(await self._turn(owner, body))

    def read_stored(self, request: Request, response_id: str) -> Response:
        """Return a stored response. Raises `HttpError` (404), also for a response of another key."""
        return Response(self._stored(request, response_id).response, media_type="application/json")

    def input_items(self, request: Request, response_id: str) -> Response:
        """Return the input items of a stored response, newest first or as requested. Raises `RequestError`."""
        query = ListQuery.of(request.query_params, limit=20, max_limit=100)
        stored = self._stored(request, response_id)
        items = [_shown(item, position) for position, item in enumerate(stored.input)]
        if query.order == "desc":
            items.reverse()
        ids = [item["id"] for item in items]
        if query.after is not None:
            if query.after not in ids:
                raise RequestError(f"'after' is '{query.after[:64]}', which is not an item of this response.", "after")
            items = items[ids.index(query.after) + 1 :]
        shown = items[: query.limit]
        ends = (
            {"first_id": shown[0]["id"], "last_id": shown[-1]["id"]} if shown else {"first_id": None, "last_id": None}
        )
        return _json({"object": "list", "data": shown, **ends, "has_more": len(shown) < len(items)})

    def delete(self, request: Request, response_id: str) -> Response:
        """Delete a stored response. Raises `HttpError` (404)."""
        if not self._store.delete(_owner(request), response_id):
            raise _not_found(response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})

    def cancel(self, request: Request, response_id: str) -> Response:
        """End a running response with the text that it has. A stream of it ends, too. Raises `HttpError`."""
        owner = _owner(request)
        writer = self._running.get((owner, response_id))
        if writer is not None and writer.abort():
            return _json(writer.response("cancelled"))
        if self._store.get(owner, response_id) is not None:
            raise HttpError(400, f"The response '{response_id[:64]}' is complete and cannot be cancelled.")
        raise _not_found(response_id)

    async def _turn(self, owner: str, body: ResponsesRequest) -> ResponsesTurn:
        """Return the chat turn of a request. A long conversation is made in a thread. Raises `RequestError`."""
        if body.store and not self._store.is_on:
            message = "'store' is true, but this server stores no responses. Leave it out, or raise --response-store."
            raise RequestError(message, "store", "unsupported_parameter")
        items = self._conversation(body, owner)
        return await self.parse_in_turn(partial(turn_of, body, items, owner, ResponsesTurn), num_parts(items))

    def _conversation(self, body: ResponsesRequest | CompactRequest, owner: str) -> list[Item]:
        """Return the conversation: the previous response's, then the new items. Raises `RequestError`."""
        found: list[Item] = []
        if body.previous_response_id is not None:
            previous = self._store.get(owner, body.previous_response_id)
            if previous is None:
                shown = body.previous_response_id[:64]
                message = f"The previous response '{shown}' is not stored, or was deleted. Send its items as 'input'."
                raise RequestError(message, "previous_response_id", "previous_response_not_found")
            found += previous.conversation
        if isinstance(body.input, str):
            return [*found, MessageItem(role="user", content=body.input)]
        for position, item in enumerate(body.input or ()):
            if isinstance(item, ItemReference):
                found.append(self._referred(item, position, owner))
            elif isinstance(item, OtherCallItem | OtherCallOutputItem):
                found += item.as_functions
            elif not isinstance(item, HostedCallItem | UnreadItem):  # validation refuses every UnreadItem
                found.append(item)
        return found

    def _referred(self, reference: ItemReference, position: int, owner: str) -> Item:
        item = self._store.item(owner, reference.id)
        if item is None:
            message = (
                f"'input[{position}]' refers to the item '{reference.id[:64]}', which is not stored. Send "
                "the item itself."
            )
            raise RequestError(message, f"input[{position}]", "item_not_found")
        return item

    def _stored(self, request: Request, response_id: str) -> StoredResponse:
        found = self._store.get(_owner(request), response_id)
        if found is None:
            raise _not_found(response_id)
        return found

    def _writer(
        self, body: ChatRequest, processed: ProcessedChat, generation: Generation, model: str, request_id: str
    ) -> GenerationWriter:
        if isinstance(body, SummaryTurn):
            return CompactionWriter(_PREFIX + request_id, generation, processed.shape, body.conversation)
        assert isinstance(body, ResponsesTurn)
        source, owner, items = body.source, body.owner, body.items
        keeps = self._store.is_on and source.store is not False
        response_id = _PREFIX + request_id
        fields = {"id": response_id, **_echo(source, processed, model), "store": keeps}
        entry, visible = None, None
        if body.logprobs:
            entry = partial(token_logprobs, self.tokenizer, num_top=body.top_logprobs or 0)
            if not processed.shape.is_plain:
                choice = processed.choices[0]
                detokenizer = self.tokenizer.detokenizer(choice.request.prompt_token_ids, choice.output_options.shown)
                visible = VisibleTokens(processed.shape, detokenizer)

        def ended(response: dict[str, Any]) -> None:
            if keeps:
                self._store.put(owner, response, items)

        writer = ResponsesWriter(
            fields,
            generation,
            processed.shape,
            entry,
            ended,
            source.functions,
            visible=visible,
            with_encrypted=source.with_encrypted,
        )
        self._running[owner, response_id] = writer
        return writer


def _echo(source: ResponsesRequest, processed: ProcessedChat, model: str) -> dict[str, Any]:
    """Return the members of a response that the request decides."""
    params = processed.choices[0].request.params
    form = source.text.format if source.text else None
    written = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    choice = source.tool_choice or "auto"
    reasoning = source.reasoning
    return {
        "object": "response",
        "created_at": int(time.time()),
        "background": False,
        "instructions": source.instructions,
        "max_output_tokens": source.max_output_tokens,
        "max_tool_calls": source.max_tool_calls,
        "metadata": source.metadata or {},
        "model": model,
        "parallel_tool_calls": source.parallel_tool_calls,
        "previous_response_id": source.previous_response_id,
        "prompt_cache_key": source.prompt_cache_key,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "safety_identifier": source.safety_identifier,
        "service_tier": "default",
        "temperature": params.temperature,
        "text": {"format": written, "verbosity": "medium"},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [_shown_tool(tool) for tool in source.tools or () if not isinstance(tool, HostedTool)],
        "top_logprobs": source.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": source.user,
    }


def _shown_tool(tool: FunctionTool | NamespaceTool) -> dict[str, Any]:
    """Return a tool that the model was offered, in wire format."""
    if isinstance(tool, FunctionTool):
        return tool.model_dump(include=_SHOWN_OF_TOOL)
    group = {"type": tool.type, "name": tool.name, "description": tool.description or ""}
    return {**group, "tools": [_shown_tool(one) for one in tool.functions]}


def _shown(item: Item, position: int) -> dict[str, Any]:
    """Return an input item in wire format, with the id that it was sent with or a generated id."""
    written = item.model_dump(exclude_none=True)
    if isinstance(item, MessageItem) and isinstance(item.content, str):
        kind = "output_text" if item.role == "assistant" else "input_text"
        written["content"] = [{"type": kind, "text": item.content}]
    return {"type": "message", **written, "id": item.id or f"item_{position}"}


def _owner(request: Request) -> str:
    return salt_of(request.scope, None) or ""


def _not_found(response_id: str) -> HttpError:
    message = f"The response '{response_id[:64]}' is not stored, or was deleted."
    return HttpError(404, message, param="response_id", code="response_not_found")


def _json(value: Any, headers: dict[str, str] | None = None) -> Response:
    return Response(dumps(value), 200, headers, "application/json")


router = APIRouter(route_class=ErrorHandlingRoute)
_CREATE = describe(
    "Create response",
    "Response",
    bodies=("ResponsesRequest",),
    examples={
        "plain": {"input": "Hi", "max_output_tokens": 20},
        "stream": {"input": [{"role": "user", "content": "Hi"}], "stream": True},
    },
    streams=True,
)
_COUNT = describe(
    "Count the tokens of a response's prompt",
    "InputTokens",
    bodies=("ResponsesRequest",),
    examples={"hi": {"input": "Hi"}},
)
_COMPACT = describe(
    "Compact conversation",
    "CompactedResponse",
    bodies=("CompactRequest",),
    examples={"hi": {"input": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]}},
)


@router.post("/v1/responses", openapi_extra=_CREATE)
async def create_response(request: Request) -> Response:
    serving = OpenAIServingResponses.of(request)
    body, headers = await serving.read(request, ResponsesRequest)
    return await serving.respond(request, body, headers)


@router.post("/v1/responses/input_tokens", openapi_extra=_COUNT)
async def count_input_tokens(request: Request) -> Response:
    serving = OpenAIServingResponses.of(request)
    body, headers = await serving.read(request, ResponsesRequest)
    return await serving.count(request, body, headers)


@router.post("/v1/responses/compact", openapi_extra=_COMPACT)
async def compact_conversation(request: Request) -> Response:
    serving = OpenAIServingResponses.of(request)
    body, headers = await serving.read(request, CompactRequest)
    return await serving.compact(request, body, headers)


@router.get("/v1/responses/{response_id}", openapi_extra=describe("Get response", "Response"))
async def get_response(request: Request, response_id: str) -> Response:
    return OpenAIServingResponses.of(request).read_stored(request, response_id)


@router.post("/v1/responses/{response_id}/cancel", openapi_extra=describe("Cancel response", "Response"))
async def cancel_response(request: Request, response_id: str) -> Response:
    """End a running response. The text so far is kept, and a stream of it ends."""
    return OpenAIServingResponses.of(request).cancel(request, response_id)


@router.get(
    "/v1/responses/{response_id}/input_items",
    openapi_extra=describe("List input items", "InputItems", query=("after", "limit", "order")),
)
async def list_input_items(request: Request, response_id: str) -> Response:
    return OpenAIServingResponses.of(request).input_items(request, response_id)


@router.delete("/v1/responses/{response_id}", openapi_extra=describe("Delete response", "DeletedResponse"))
async def delete_response(request: Request, response_id: str) -> Response:
    return OpenAIServingResponses.of(request).delete(request, response_id)
