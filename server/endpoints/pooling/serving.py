"""Serving of `/v1/embeddings` and `/pooling`, and the base of all endpoints that respond with vectors or scores.

The base tokenizes texts and runs prompts. A response holds a vector for each text, or for each of its tokens.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from oarlock.engine.errors import ContextLengthError, RequestError
from oarlock.engine.types import PoolingParams
from oarlock.server.endpoints.serving import OpenAIServing
from oarlock.server.errors import DeadlineError
from oarlock.server.http.request_record import client_of, label_of, record_of, request_id_of, salt_of, salted
from oarlock.server.http.server_sent_events import until_disconnect, whole_response
from oarlock.server.json_text import StreamedList, pieces_of
from oarlock.server.llm.generation import PooledOutput
from oarlock.server.llm.input_processor import BYTES_PER_ID, InputProcessor
from oarlock.server.llm.pooler_config import PoolerConfig, Task
from oarlock.server.llm.tokenizer import TooManyTokensError
from oarlock.server.schemas.pooling import EmbeddingRequest, InputFields, PoolingFields, PoolingRequest

if TYPE_CHECKING:
    from oarlock.server.llm.generation import PooledOutput, Pooling


_BYTES_PER_PROMPT = 1500  # bytes of a prompt without its ids
_AS_MANY_AS_FIT = -1  # a value of truncate_prompt_tokens
QUERY, DOCUMENT = "query", "document"
# The prompts that sentence-transformers tries for each kind, in this order. A model that has none of them takes the
# bare text.
_PROMPTS_OF = {QUERY: ("query",), DOCUMENT: ("document", "passage", "corpus")}
# Other names of these kinds, from Cohere and NVIDIA NIM.
_ALIASES = {"search_query": QUERY, "search_document": DOCUMENT, "passage": DOCUMENT}
_T = TypeVar("_T")
Prompts = Callable[[], Coroutine[Any, Any, list[tuple[int, ...]]]]  # makes the ids of each prompt


class TextIds:
    """Maker of one model's prompts."""

    def __init__(self, processor: InputProcessor, config: PoolerConfig) -> None:
        self._processor = processor
        self._tokenizer = processor.tokenizer
        self._config = config
        self.max_len = min(processor.max_len, config.max_len or processor.max_len)

    def prompt_before(self, name: str | None) -> str:
        """Return the model's prompt of this name, which is put before a text. Raises `RequestError`."""
        prompts = self._config.prompts
        if name is None:
            return prompts[self._config.default_prompt] if self._config.default_prompt is not None else ""
        if name not in prompts:
            known = f"its prompts are {', '.join(sorted(prompts))}" if prompts else "it has none; leave it out"
            raise RequestError(f"'prompt_name' is not a prompt of this model: {known}.", "prompt_name")
        return prompts[name]

    def prompt_for(self, input_type: str | None) -> str:
        """Return the prompt for texts of this kind, or the prompt of this name. Raises `RequestError`."""
        known = self._config.prompts
        if input_type is None or input_type in known:
            return self.prompt_before(input_type)
        tried = _PROMPTS_OF.get(_ALIASES.get(input_type, input_type))
        if tried is None:
            others = sorted(known.keys() - _PROMPTS_OF.keys() - _ALIASES.keys())
            names = ", ".join([*_PROMPTS_OF, *_ALIASES, *others])
            raise RequestError(f"'input_type' is {input_type[:64]!r}, but it must be one of {names}.", "input_type")
        return next((known[name] for name in tried if name in known), "")

    async def ids_of_text(
        self, text: str, param: str, *, truncate: int | None, marks: bool = True, behind: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """Return the ids of a text. `marks`: add the model's special tokens. `behind`: ids after the text, never cut.

        Raises `RequestError`; `param` names the field that the text came from.
        """
        if self._config.lower_case:
            text = text.lower()
        keep = self._kept(truncate)
        most = (self.max_len if keep is None else keep) - len(behind)
        try:
            ids, at_least = await self._tokenizer.aencode(text, marks, most=most, param=param), 0
        except TooManyTokensError as error:
            ids, at_least = [], error.at_least
        if max(at_least, len(ids)) > most:
            if keep is None:
                number = f"at least {at_least + len(behind)}" if at_least else str(len(ids) + len(behind))
                raise self._too_long(number, param)
            ids = await self._beginning(text, most, marks, param)
        ids = [*ids, *behind]
        if not ids:
            raise RequestError(f"'{param}' contains an empty text, for which this model has no token.", param)
        return await self._checked(ids, param)

    async def ids_of_pair(
        self, first: str, second: str, params: tuple[str, str], *, truncate: int | None
    ) -> tuple[tuple[int, ...], int]:
        """Return two texts as one prompt, and the index of the second text, or 0 if the model has no token types.

        If a pair is too long, the longer text is cut, as in sentence-transformers. Raises `RequestError`; `params` name
        the fields that the texts came from.
        """
        marks = self._tokenizer.pair_marks()
        assert marks is not None, "the start has checked that there are some"
        keep = self._kept(truncate)
        most = self.max_len if keep is None else keep
        room = most - sum(map(len, marks[:3]))
        texts = []
        for text, param in zip((first, second), params, strict=True):
            text = text.lower() if self._config.lower_case else text
            texts.append(await self._within(text, param, room, cut=keep is not None))
        left, right = texts
        if len(left) + len(right) > room:
            if keep is None:
                raise self._too_long(str(most - room + len(left) + len(right)), params[1])
            # Tokens of the first text, if both must be cut.
            half = room // 2 + (room % 2 if len(left) > len(right) else 0)
            left = left[: max(half, room - len(right))]
            right = right[: room - len(left)]
        start = len(marks.opening) + len(left) + len(marks.between)
        ids = (*marks.opening, *left, *marks.between, *right, *marks.closing)
        return await self._checked(ids, params[1]), start if marks.has_types else 0

    async def _within(self, text: str, param: str, room: int, *, cut: bool) -> list[int]:
        """Return the ids of a text without special tokens; with `cut`, at most `room` ids. Raises `RequestError`."""
        if cut:
            if room < 2:
                message = "'truncate_prompt_tokens' leaves no token of the text. Raise it."
                raise RequestError(message, "truncate_prompt_tokens")
            return (await self._tokenizer.aencode(text, False, first=room, param=param))[:room]
        try:
            return await self._tokenizer.aencode(text, False, most=self.max_len, param=param)
        except TooManyTokensError as error:
            raise self._too_long(f"at least {error.at_least}", param) from None

    async def _beginning(self, text: str, most: int, marks: bool, param: str) -> list[int]:
        """Return the first tokens of a text that has more than `most`, with the special tokens around it."""
        opening, closing = (self._tokenizer.opening, self._tokenizer.closing) if marks else ([], [])
        room = most - len(opening) - len(closing)
        if room < 1:
            message = "'truncate_prompt_tokens' leaves no token of the text. Raise it."
            raise RequestError(message, "truncate_prompt_tokens")
        own = await self._tokenizer.aencode(text, False, first=room, param=param)
        return [*opening, *own[:room], *closing]

    async def of_ids(self, ids: Sequence[int], param: str, *, truncate: int | None) -> tuple[int, ...]:
        """Return ids that the caller made, checked and truncated. Raises `RequestError`."""
        keep = self._kept(truncate)
        return await self._checked(ids if keep is None else ids[:keep], param)

    async def _checked(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        if len(ids) > self.max_len:
            raise self._too_long(str(len(ids)), param)
        await self._processor.check_ids(ids, param)
        return tuple(ids)

    def _kept(self, truncate: int | None) -> int | None:
        return self.max_len if truncate == _AS_MANY_AS_FIT else truncate

    def _too_long(self, number: str, param: str) -> ContextLengthError:
        return ContextLengthError(
            f"A text of '{param}' has {number} tokens; this model accepts at most {self.max_len}. Send a "
            "shorter text, or set truncate_prompt_tokens: -1.",
            param,
        )


class Run(Protocol):
    """`OpenAIServingPooling.pool` or `run` for one body."""

    def __call__(
        self, prompts: Prompts, pooling: PoolingParams, *, second_texts: Sequence[int] = ()
    ) -> Coroutine[Any, Any, list[PooledOutput]]: ...


class OpenAIServingPooling(OpenAIServing):
    """Base of the pooling endpoints: texts of a request -> prompts -> one pooling request -> response."""

    tasks: frozenset[Task]  # tasks of models that the endpoint supports

    @property
    def pooler(self) -> PoolerConfig:
        return self.async_llm.pooler

    @property
    def text_ids(self) -> TextIds:
        return TextIds(self.async_llm.input_processor, self.pooler)

    async def check_model(self, name: str | None) -> str:
        """Return the model name. Raises `ModelNotFoundError`, or `RequestError` if the model lacks this task."""
        found = await super().check_model(name)
        if self.pooler.task in self.tasks:
            return found
        if self.pooler.task is Task.SCORE:
            message = (
                "This model scores pairs of texts and has no vector for a single text. Use /v1/rerank or /v1/score."
            )
        else:
            message = (
                "This server generates text. Use /v1/completions or /v1/chat/completions, or start a model "
                "that supports embeddings with --runner pooling."
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
        """Run the `prompts`, which are made within the time limit, and return their outputs.

        `second_texts`: as in `AsyncLLM.start_pooling`; making the prompts may fill it. A client that leaves, the time
        limit and a drain end the request as they end generations.
        """
        record = record_of(request.scope)
        assert record is not None, "the middleware creates a record for every request that the engine computes"
        record.parsed_s = begun = time.monotonic()
        limit = self._time_limit(request.headers.get("x-request-timeout"), body.timeout)
        rank = self._chosen_replica(request)

        async def ready() -> tuple[list[tuple[int, ...]], str | None]:
            return await prompts(), await self.use_adapter(await self.check_model(body.model), record)

        ids, adapter = await until_disconnect(request, _in_time(ready, limit))
        held = self.held_by(request)
        # The engine's queue counts the first prompt. The texts stay in memory, because some responses repeat them.
        held.add(sum(_BYTES_PER_PROMPT + BYTES_PER_ID * len(prompt) for prompt in ids[1:]))
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
            adapter=adapter,
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
        """Run a body that did not come over HTTP. `owner`, `label`: salt and label of the API key that it belongs to.

        A full queue does not refuse the request, so the caller limits how many run at a time.
        """
        limit = self._time_limit(None, body.timeout)
        adapter = await self.use_adapter(await self.check_model(body.model))
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
            is_background=True,
            second_texts=second_texts,
            adapter=adapter,
        )
        try:
            return await self._outputs(running, pooling)
        finally:
            running.close()

    async def _outputs(self, running: Pooling, pooling: PoolingParams) -> list[PooledOutput]:
        """Return the outputs. Vectors of texts, but not of tokens, go through the checkpoint's Dense modules."""
        outputs, layers = await running.outputs(), self.pooler.layers
        if layers is None or pooling.kind == "token":
            return outputs
        # A thread computes one vector at a time, so that other requests need not wait for the arithmetic.
        vectors = [await self.tokenizer.run(partial(layers, output.vectors), 0) for output in outputs]
        return [replace(output, vectors=each) for output, each in zip(outputs, vectors, strict=True)]


async def _in_time(make: Callable[[], Awaitable[_T]], limit: float | None) -> _T:
    """Return the result of `make`. Raises `DeadlineError`."""
    try:
        async with asyncio.timeout(limit):
            return await make()
    except TimeoutError:
        raise DeadlineError(limit or 0.0) from None


def usage(outputs: list[PooledOutput]) -> dict[str, Any]:
    """Return the usage of all prompts. No token is generated."""
    total = sum(output.prompt_tokens for output in outputs)
    cached = sum(output.cached_tokens for output in outputs)
    return {"prompt_tokens": total, "total_tokens": total, "prompt_tokens_details": {"cached_tokens": cached}}


MAX_NUMBERS = 1 << 24  # values of all token vectors in one response, kept until it is complete: 64 MiB


class OpenAIServingEmbedding(OpenAIServingPooling):
    """The endpoints `/v1/embeddings` and `/pooling`."""

    state_name = "serving_embedding"
    tasks = frozenset({Task.EMBED})

    async def embed(self, request: Request, body: EmbeddingRequest, headers: dict[str, str]) -> Response:
        """Return the response of `/v1/embeddings`. Raises `RequestError`."""
        outputs, response = await self._run(request, body, PoolingParams(self.pooler.kind), "embd")
        response["data"] = self._items(body, outputs, "embedding", "embedding")
        return await whole_response(pieces_of(response), headers)

    async def complete(
        self, body: EmbeddingRequest, request_id: str, *, owner: str | None = None, label: str | None = None
    ) -> str:
        """Return the JSON of the response to a body that did not come over HTTP. `owner`, `label`: as in `run`."""
        model, prompts = await self._checked(body)
        outputs = await self.run(body, prompts, PoolingParams(self.pooler.kind), owner, label)
        response = _response_head(f"embd-{request_id}", model, outputs)
        response["data"] = self._items(body, outputs, "embedding", "embedding")
        return "".join(pieces_of(response))

    async def vectors(self, body: EmbeddingRequest) -> tuple[list[np.ndarray], list[PooledOutput]]:
        """Return the vector of each input, float32 [dimensions], and the outputs. The offline interface uses this."""
        _, prompts = await self._checked(body)
        outputs = await self.run(body, prompts, PoolingParams(self.pooler.kind))
        return [self._finished(body, output)[0] for output in outputs], outputs

    async def pool_tokens(self, request: Request, body: PoolingRequest, headers: dict[str, str]) -> Response:
        """Return the response of `/pooling`. Raises `RequestError`."""
        by_token = _is_by_token(body)
        outputs, response = await self._run(
            request, body, PoolingParams("token" if by_token else self.pooler.kind), "pool"
        )
        if by_token:
            response["data"] = [
                {"index": index, "object": "pooling", "data": self._rows(body, output)}
                for index, output in enumerate(outputs)
            ]
        else:
            response["data"] = self._items(body, outputs, "pooling", "data")
        return await whole_response(pieces_of(response), headers)

    async def _run(
        self, request: Request, body: InputFields, pooling: PoolingParams, prefix: str
    ) -> tuple[list[PooledOutput], dict[str, Any]]:
        model, prompts = await self._checked(body)
        response_id = f"{prefix}-{request_id_of(request.scope)}"
        outputs = await self.pool(request, body, prompts, pooling, response_id)
        return outputs, _response_head(response_id, model, outputs)

    async def _checked(self, body: InputFields) -> tuple[str, Prompts]:
        """Return the model's name, and the function that makes the prompts. Raises `RequestError`."""
        model = await self.check_model(body.model)
        self._check_dimensions(body)
        ids = self.text_ids
        before = ids.prompt_before(body.prompt_name) if body.input_type is None else ids.prompt_for(body.input_type)
        return model, partial(self._prompts, body, before)

    async def _prompts(self, body: InputFields, before: str) -> list[tuple[int, ...]]:
        prompts, truncate, num_tokens = [], body.truncate_prompt_tokens, 0
        by_token = _is_by_token(body)
        marks = body.add_special_tokens is not False
        for given in body.inputs:
            if isinstance(given, str):
                ids = await self.text_ids.ids_of_text(before + given, "input", truncate=truncate, marks=marks)
            else:
                ids = await self.text_ids.of_ids(given, "input", truncate=truncate)
            prompts.append(ids)
            num_tokens += len(ids)
            if by_token and num_tokens * self.info.hidden_size > MAX_NUMBERS:
                most = MAX_NUMBERS // self.info.hidden_size
                message = (
                    f"'input' has more than {most} tokens, the limit of one response with vectors of "
                    f"{self.info.hidden_size} values. Send less, or request one vector per text with task: "
                    "embed."
                )
                raise RequestError(message, "input")
        return prompts

    def _check_dimensions(self, body: InputFields) -> None:
        wanted, allowed = body.dimensions, self.pooler.dimensions
        whole = self.info.hidden_size if _is_by_token(body) else self.pooler.size(self.info.hidden_size)
        if wanted is None or wanted == whole or (allowed is not None and wanted in (allowed or range(1, whole + 1))):
            return
        if allowed is None:
            reason = f"this model's vectors have {whole} values and were not trained to be shortened. Leave it out"
        else:
            reason = f"it must be {' or '.join(map(str, allowed))}" if allowed else f"it must be at most {whole}"
        raise RequestError(f"'dimensions' is {wanted}, but {reason}.", "dimensions")

    def _items(self, body: InputFields, outputs: list[PooledOutput], kind: str, member: str) -> StreamedList:
        """Return one object for each output, which is made while it is written."""

        def item(numbered: tuple[int, PooledOutput]) -> dict[str, Any]:
            index, output = numbered
            vector = self._finished(body, output)[0]
            return {"object": kind, "index": index, member: encoded(vector, body.encoding_format or "float")}

        return StreamedList(item, list(enumerate(outputs)), lambda numbered: numbered[1].vectors.size)

    def _rows(self, body: InputFields, output: PooledOutput) -> StreamedList:
        vectors = self._finished(body, output)
        return StreamedList(lambda row: encoded(row, body.encoding_format or "float"), vectors, lambda row: row.size)

    def _finished(self, body: InputFields, output: PooledOutput) -> np.ndarray:
        """Cut and normalise vectors: floats [n, size] -> float32 [n, dimensions]."""
        normalize = self.pooler.normalize if body.normalize is None else body.normalize
        cut = output.vectors if body.dimensions is None else output.vectors[:, : body.dimensions]
        return (unit(cut) if normalize else cut).astype(np.float32)


def _is_by_token(body: InputFields) -> bool:
    return isinstance(body, PoolingRequest) and body.task == "token_embed"


def _response_head(response_id: str, model: str, outputs: list[PooledOutput]) -> dict[str, Any]:
    """Return the response without `data`."""
    head = {"id": response_id, "object": "list", "created": int(time.time()), "model": model}
    return {**head, "usage": usage(outputs)}


_LEAST_NORM = 1e-12  # torch.nn.functional.normalize divides by at least this norm


def encoded(vector: np.ndarray, encoding_format: str) -> Any:
    """Return a vector, float32 [n], as the member of a response. Its values are exactly the float32 values."""
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()


def unit(vectors: np.ndarray) -> np.ndarray:
    """Return float64 [n, k] of length 1 from [n, k]; zeros stay zeros. The batch does not change the order of sums."""
    wide = np.ascontiguousarray(vectors, np.float64)
    norms = np.sqrt(np.sum(wide * wide, axis=-1, keepdims=True))
    return wide / np.maximum(norms, _LEAST_NORM)
