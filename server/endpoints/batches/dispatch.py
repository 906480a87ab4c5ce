"""Dispatch of a batch's requests: each url is answered by the endpoint whose route has that name."""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

from oarlock.server.endpoints.batches.schema import BatchRequest
from oarlock.server.endpoints.chat.schema import ChatRequest
from oarlock.server.endpoints.chat.serving import OpenAIServingChatCompletion
from oarlock.server.endpoints.completions.route import OpenAIServingCompletion
from oarlock.server.endpoints.completions.schema import CompletionRequest
from oarlock.server.endpoints.pooling.embedding import OpenAIServingEmbedding
from oarlock.server.endpoints.pooling.schema import EmbeddingRequest
from oarlock.server.endpoints.responses.schema import ResponsesRequest
from oarlock.server.endpoints.responses.serving import OpenAIServingResponses
from oarlock.server.endpoints.schema import SamplingFields
from oarlock.server.http.large_body import LargeBodies, takes_long
from oarlock.server.http.request_body import parse, unknown_parameters
from oarlock.server.strict_model import StrictModel

_BodyT = TypeVar("_BodyT", bound=StrictModel)


class BatchEndpoints:
    """The endpoints behind a batch, without HTTP."""

    def __init__(
        self,
        completions: OpenAIServingCompletion,
        chat_completions: OpenAIServingChatCompletion,
        responses: OpenAIServingResponses,
        embeddings: OpenAIServingEmbedding,
        large_bodies: LargeBodies | None = None,
    ) -> None:
        """`large_bodies`: what reads them; None: the server's own, for which others wait."""
        self._completions = completions
        self._chat_completions = chat_completions
        self._responses = responses
        self._embeddings = embeddings
        self._large_bodies = large_bodies or completions.state.large_bodies
        self.ignored: Counter[str] = Counter()  # unknown fields of requests

    async def answer(
        self,
        request: BatchRequest,
        request_id: str,
        *,
        owner: str | None = None,
        label: str | None = None,
        priority: int | None = None,
    ) -> str:
        """The JSON that the server would answer with. Raises what its endpoint raises.

        `owner` and `label`: of the API key that it belongs to. `priority`: of a request that asks for none.
        """
        if request.url == "/v1/completions":
            completion = _with_priority(await self._read(CompletionRequest, request.body), priority)
            return await self._completions.complete(completion, request_id, owner=owner, label=label)
        if request.url == "/v1/responses":
            response = _with_priority(await self._read(ResponsesRequest, request.body), priority)
            return await self._responses.complete_one(response, request_id, owner=owner, label=label)
        if request.url == "/v1/embeddings":
            embedding = _with_priority(await self._read(EmbeddingRequest, request.body), priority)
            return await self._embeddings.complete(embedding, request_id, owner=owner, label=label)
        chat = _with_priority(await self._read(ChatRequest, request.body), priority)
        return await self._chat_completions.complete(chat, request_id, owner=owner, label=label)

    async def _read(self, schema: type[_BodyT], content: bytes) -> _BodyT:
        is_strict = self._completions.settings.strict_parameters
        if takes_long(content):
            body, unknown = await self._large_bodies.read((schema,), content, is_strict)
        else:
            body = parse(schema, content)
            unknown = unknown_parameters(body, is_strict)
        self.ignored.update(unknown)
        return body


_PriorityT = TypeVar("_PriorityT", SamplingFields, CompletionRequest, ChatRequest, ResponsesRequest, EmbeddingRequest)


def _with_priority(body: _PriorityT, priority: int | None) -> _PriorityT:
    if priority is not None and "priority" not in body.model_fields_set:
        body.priority = priority
    return body
