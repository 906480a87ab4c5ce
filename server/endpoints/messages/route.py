"""`/v1/messages`: Anthropic's messages, served as chat turns, and the number of tokens of their prompts."""

from functools import partial

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from oarlock.engine.errors import RequestError
from oarlock.server.endpoints.chat.serving import OpenAIServingChatCompletion, ProcessedChat
from oarlock.server.endpoints.messages.translate import MessagesTurn, MessagesWriter, Source, renamed, turn_of
from oarlock.server.endpoints.text_permits import TextPermits
from oarlock.server.http.api_route import ErrorHandlingRoute
from oarlock.server.http.openapi import describe
from oarlock.server.http.server_sent_events import GenerationWriter
from oarlock.server.json_text import dumps
from oarlock.server.llm.generation import Generation
from oarlock.server.schemas.chat import ChatRequest, num_parts
from oarlock.server.schemas.messages import CountTokensRequest, MessagesRequest


class AnthropicServingMessages(OpenAIServingChatCompletion):
    """The messages endpoint."""

    state_name = "serving_messages"
    _in_items = True

    async def respond(self, request: Request, body: MessagesRequest, headers: dict[str, str]) -> Response:
        """Return the response to a request. Raises `RequestError`."""
        try:
            return await self.create(request, await self._turn(body), headers)
        except RequestError as error:
            raise renamed(error) from None

    async def count(self, request: Request, body: CountTokensRequest, headers: dict[str, str]) -> Response:
        """Return the number of tokens in a request's prompt. Raises `RequestError`."""
        await self.check_model(body.model)
        try:
            processed = await TextPermits.of(request).run(request, partial(self._processed, body))
            headers = self.reported(request, processed.ignored, headers)
        except RequestError as error:
            raise renamed(error) from None
        count = len(processed.choices[0].request.prompt_token_ids)
        return Response(dumps({"input_tokens": count}), 200, headers, "application/json")

    async def _processed(self, body: Source) -> ProcessedChat:
        return await self.process(await self._turn(body))

    async def _turn(self, body: Source) -> MessagesTurn:
        """Return the chat turn of a request. A long conversation is made in a thread. Raises `RequestError`."""
        return await self.parse_in_turn(partial(turn_of, body), num_parts(body.messages))

    def _writer(
        self, body: ChatRequest, processed: ProcessedChat, generation: Generation, model: str, request_id: str
    ) -> GenerationWriter:
        assert isinstance(body, MessagesTurn)
        thinking = body.source.thinking
        shows_reasoning = thinking is None or thinking.display != "omitted"
        return MessagesWriter(
            request_id, model, generation, processed.shape, context=self.max_len, shows_reasoning=shows_reasoning
        )


router = APIRouter(route_class=ErrorHandlingRoute)
_HI = [{"role": "user", "content": "Hi"}]
_CREATE = describe(
    "Create message",
    "Message",
    bodies=("MessagesRequest",),
    examples={
        "plain": {"messages": _HI, "max_tokens": 20},
        "stream": {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}], "max_tokens": 20,
                   "stream": True},
    },
    streams=True,
)  # fmt: skip
_COUNT = describe(
    "Count the tokens of a message's prompt",
    "MessageTokensCount",
    bodies=("CountTokensRequest",),
    examples={"hi": {"messages": _HI}},
)


@router.post("/v1/messages", openapi_extra=_CREATE)
async def create_message(request: Request) -> Response:
    serving = AnthropicServingMessages.of(request)
    body, headers = await serving.read(request, MessagesRequest)
    return await serving.respond(request, body, headers)


@router.post("/v1/messages/count_tokens", openapi_extra=_COUNT)
async def count_tokens(request: Request) -> Response:
    serving = AnthropicServingMessages.of(request)
    body, headers = await serving.read(request, CountTokensRequest)
    return await serving.count(request, body, headers)
