"""The common base of the endpoints that answer with vectors or scores: prompts are run, and their vectors collected."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request

from oarlock.engine.errors import RequestError
from oarlock.engine.pooling_params import PoolingParams
from oarlock.server.endpoints.pooling.schema import PoolingFields
from oarlock.server.endpoints.pooling.text_ids import TextIds
from oarlock.server.endpoints.serving import OpenAIServing
from oarlock.server.errors import DeadlineError
from oarlock.server.http.request_record import client_of, label_of, record_of, request_id_of, salt_of, salted
from oarlock.server.http.server_sent_events import until_disconnect
from oarlock.server.llm.pooler_config import PoolerConfig, Task

if TYPE_CHECKING:
    from oarlock.server.llm.pooling import PooledOutput, Pooling


Prompts = Callable[[], Coroutine[Any, Any, list[tuple[int, ...]]]]  # makes the ids of each prompt


class Run(Protocol):
    """`OpenAIServingPooling.pool` or `run` of one body."""

    def __call__(
        self, prompts: Prompts, pooling: PoolingParams, *, second_texts: Sequence[int] = ()
    ) -> Coroutine[Any, Any, list[PooledOutput]]: ...


class OpenAIServingPooling(OpenAIServing):
    """One request's texts become prompts, these one pooling request, and its vectors the answer."""

    tasks: frozenset[Task]  # that the endpoint can be asked by

    @property
    def pooler(self) -> PoolerConfig:
        return self.async_llm.pooler

    @property
    def text_ids(self) -> TextIds:
        return TextIds(self.async_llm.input_processor, self.pooler)

    def check_model(self, name: str | None) -> str:
        """Raises `ModelNotFoundError`, and `RequestError` where the model makes no vectors, or no scores."""
        found = super().check_model(name)
        if self.pooler.task in self.tasks:
            return found
        if self.pooler.task is Task.SCORE:
            message = "This model scores pairs of texts and has no vector for one: it answers /v1/rerank and /v1/score."
        else:
            message = (
                "This server writes texts with its model: it answers /v1/completions and /v1/chat/completions. For "
                "vectors of a model that has them, start it with --runner pooling."
            )
        raise RequestError(message, "model", "unsupported_by_model")

    async def pool(
        self,
        request: Request,
        body: PoolingFields,
        prompts: Prompts,
        pooling: PoolingParams,
        response_id: str,
        *,
        second_texts: Sequence[int] = (),
    ) -> list[PooledOutput]:
        """Run each of the `prompts`, which are made within the time limit, and return what came of it.

        `second_texts`: as of `AsyncLLM.start_pooling`, where making the prompts tells them.
        A client that leaves, the limit and a drain end it as they end generations.
        """
        record = record_of(request.scope)
        assert record is not None, "the middleware keeps a record of all that the engine computes"
        record.parsed_s = begun = time.monotonic()
        limit = self._time_limit(request.headers.get("x-request-timeout"), body.timeout)
        rank = self._chosen_replica(request)
        ids = await until_disconnect(request, _in_time(prompts, limit))
        running = self.async_llm.start_pooling(
            ids,
            pooling,
            label_of(request.scope),
            priority=body.priority or 0,
            cache_salt=(salt_of(request.scope, body.cache_salt) or "").encode(),
            timeout_s=limit,
            spent_s=time.monotonic() - begun,
            data_parallel_rank=rank,
            second_texts=second_texts,
        )
        try:
            running.request_id, running.response_id = request_id_of(request.scope), response_id
            running.client = client_of(request.scope, body.user)
            record.started(running, streamed=False)
            return await until_disconnect(request, self._outputs(running, pooling))
        finally:
            running.close()

    async def run(
        self,
        body: PoolingFields,
        prompts: Prompts,
        pooling: PoolingParams,
        owner: str | None = None,
        label: str | None = None,
        *,
        second_texts: Sequence[int] = (),
    ) -> list[PooledOutput]:
        """Run a body that did not come over HTTP. `owner`, `label`: of the API key that it belongs to.

        A full queue does not refuse it: the caller bounds how many there are at a time.
        """
        limit = self._time_limit(None, body.timeout)
        async with self.async_llm.one_prompt:
            begun = time.monotonic()
            ids = await _in_time(prompts, limit)
        running = self.async_llm.start_pooling(
            ids,
            pooling,
            label,
            priority=body.priority or 0,
            cache_salt=(salted(owner, body.cache_salt) or "").encode(),
            timeout_s=limit,
            spent_s=time.monotonic() - begun,
            has_place=True,
            second_texts=second_texts,
        )
        try:
            return await self._outputs(running, pooling)
        finally:
            running.close()

    async def _outputs(self, running: Pooling, pooling: PoolingParams) -> list[PooledOutput]:
        """With vectors of texts, not those of tokens, as the checkpoint's Dense modules leave them."""
        outputs, layers = await running.outputs(), self.pooler.layers
        if layers is None or pooling.kind == "token":
            return outputs
        # In a thread, one vector at a time: other requests need not wait for the arithmetic.
        vectors = [await self.tokenizer.run(partial(layers, output.vectors), 0) for output in outputs]
        return [replace(output, vectors=each) for output, each in zip(outputs, vectors, strict=True)]


async def _in_time(prompts: Prompts, limit: float | None) -> list[tuple[int, ...]]:
    """Raises `DeadlineError`."""
    try:
        async with asyncio.timeout(limit):
            return await prompts()
    except TimeoutError:
        raise DeadlineError(limit or 0.0) from None


def usage(outputs: list[PooledOutput]) -> dict[str, Any]:
    """Tokens of all prompts; none is generated."""
    total = sum(output.prompt_tokens for output in outputs)
    cached = sum(output.cached_tokens for output in outputs)
    return {"prompt_tokens": total, "total_tokens": total, "prompt_tokens_details": {"cached_tokens": cached}}
