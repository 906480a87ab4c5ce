"""The common base of the generating endpoints: time limits, then a stream, one whole body, or the rendered prompt."""

import asyncio
import time
from abc import ABC, abstractmethod
from array import array
from dataclasses import asdict, fields, replace
from functools import partial
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from oarlock.engine.errors import RequestError
from oarlock.server.endpoints.response_writer import ResponseHead, ResponseOptions
from oarlock.server.endpoints.serving import OpenAIServing
from oarlock.server.endpoints.text_permits import TextPermits
from oarlock.server.errors import DeadlineError
from oarlock.server.http.body_memory import HeldMemory
from oarlock.server.http.request_record import (
    RequestRecord,
    client_of,
    label_of,
    record_of,
    request_id_of,
    salt_of,
    salted,
)
from oarlock.server.http.server_sent_events import EventStream, GenerationWriter, until_disconnect, whole_response
from oarlock.server.json_text import dumps, numbers, pieces_of
from oarlock.server.llm.generation import Generation, collect
from oarlock.server.llm.input_processor import ProcessedRequest, expected_bytes, waiting_bytes
from oarlock.server.llm.output_processor import Delta
from oarlock.server.llm.pooler_config import Task
from oarlock.server.schemas.generation import SamplingFields

MOST_RENDERED = 16 << 20  # characters of the response to a request that renders prompts
_CHARACTERS_PER_ID = 8  # upper bound, for ids below ten million
_BodyT = TypeVar("_BodyT", bound=SamplingFields)
_ProcessedT = TypeVar("_ProcessedT", bound=ProcessedRequest)


class OpenAIServingGenerate(OpenAIServing, ABC, Generic[_BodyT, _ProcessedT]):
    """Base of the generating endpoints: request body -> processed request -> generation -> JSON."""

    @abstractmethod
    async def process(self, body: _BodyT) -> _ProcessedT:
        """Return the body's choices, ready to run. All refusals happen here. Raises `RequestError`."""

    @abstractmethod
    def _writer(
        self, body: _BodyT, processed: _ProcessedT, generation: Generation, model: str, request_id: str
    ) -> GenerationWriter:
        """Return the writer of the generation in this endpoint's JSON format."""

    async def check_model(self, name: str | None) -> str:
        """Return the model name. Raises `ModelNotFoundError`, or `RequestError` if the model does not generate text."""
        found = await super().check_model(name)
        task = self.async_llm.pooler.task
        if task is not Task.GENERATE:
            instead = "/v1/embeddings, /v1/rerank and /v1/score" if task is Task.EMBED else "/v1/rerank and /v1/score"
            message = f"This model does not support text generation. Use {instead}."
            raise RequestError(message, "model", "unsupported_by_model")
        return found

    async def create(self, request: Request, body: _BodyT, headers: dict[str, str]) -> Response:
        """Start the generation, then stream or collect it. Every refusal comes before the first byte."""
        record = record_of(request.scope)
        assert record is not None, "the middleware creates a record for every generating request"
        record.parsed_s = time.monotonic()
        model = await self.check_model(body.model)
        body.timeout = self._time_limit(request.headers.get("x-request-timeout"), body.timeout)
        body.cache_salt = salt_of(request.scope, body.cache_salt)
        rank = self._chosen_replica(request)
        held = self.held_by(request)
        held.add(expected_bytes(body))  # many requests can be processed at the same time
        processed, adapter = await until_disconnect(request, self._process_in_time(body, model, record))
        held.resize(waiting_bytes(processed) + body.kept_bytes(held.num_bytes - expected_bytes(body)))
        headers = self.reported(request, processed.ignored, headers)
        generation = self.async_llm.start(processed, label_of(request.scope), data_parallel_rank=rank, adapter=adapter)
        try:
            generation.request_id = request_id = request_id_of(request.scope)
            generation.client = client_of(request.scope, body.user)
            writer = self._writer(body, processed, generation, model, request_id)
            generation.response_id = writer.response_id
            body.forget_inputs()
            record.started(generation, streamed=bool(body.stream))
            if body.return_progress:
                generation.report_progress()
            if body.stream:
                await until_disconnect(request, generation.wait_first_event())
                return EventStream(generation, writer, headers, record)
            pieces = await until_disconnect(request, collect(generation))
            headers = headers | _server_timing(record, generation)
            return await whole_response(writer.whole(pieces, generation), headers)
        except BaseException:
            generation.close()
            raise

    async def run(self, body: _BodyT, label: str | None = None) -> tuple[_ProcessedT, Generation, list[list[Delta]]]:
        """Run a body that did not come over HTTP. Return it processed, its generation, and the pieces of every choice.

        `label`: label of the API key whose share of the engine the request uses. A full queue does not refuse the
        request, so the caller limits how many run at a time. Raises the same errors as `create`.
        """
        body.timeout = self._time_limit(None, body.timeout)
        adapter = await self.use_adapter(await self.check_model(body.model))
        async with self.async_llm.one_prompt:
            processed, _ = await self._process_in_time(body)
        self.report(processed.ignored, label)
        generation = self.async_llm.start(processed, label, is_background=True, adapter=adapter)
        try:
            return processed, generation, await collect(generation)
        finally:
            generation.close()

    async def complete(
        self, body: _BodyT, request_id: str, *, owner: str | None = None, label: str | None = None
    ) -> str:
        """Run a body that did not come over HTTP, and return the JSON of the whole response.

        `owner`: the salt of the API key that the request belongs to.
        """
        model = await self.check_model(body.model)
        if body.stream:
            raise RequestError("'stream' is true, but this route does not stream. Leave it out.", "stream")
        body.cache_salt = salted(owner, body.cache_salt)
        processed, generation, pieces = await self.run(body, label)
        writer = self._writer(body, processed, generation, model, request_id)
        return "".join(writer.whole(pieces, generation))

    async def render(self, request: Request, body: _BodyT, headers: dict[str, str], *, each: bool) -> Response:
        """Return the prompts and parameters that the engine would get, as JSON. Routers read its `token_ids`.

        `each`: return a list with one object per prompt, else only the object of the only prompt. Nothing is generated.
        Raises `RequestError`, also if the response would be too long.
        """
        model = await self.check_model(body.model)
        held = self.held_by(request)
        render = partial(self._rendered, body, model, request_id_of(request.scope), held)
        renderings, ignored = await TextPermits.of(request).run(request, render)
        headers = self.reported(request, ignored, headers)
        return await whole_response(pieces_of(renderings if each else renderings[0]), headers)

    async def _rendered(
        self, body: _BodyT, model: str, request_id: str, held: HeldMemory
    ) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
        """Return one object for each prompt, and the fields that have no effect.

        Raises `RequestError` if the whole response would be too long, `HttpError` (503) if `held` has no room for it.
        """
        held.add(expected_bytes(body))
        processed = await self.process(body)
        held.add(waiting_bytes(processed) - expected_bytes(body))
        per_prompt = len(processed.choices) // processed.num_prompts
        first = processed.choices[0].request
        # `asdict` would copy the ids of a long list one by one.
        parameters: dict[str, Any] = {one.name: getattr(first.params, one.name) for one in fields(first.params)}
        parameters["grammar"] = None if first.params.grammar is None else asdict(first.params.grammar)
        if first.params.allowed_token_ids is not None:
            parameters["allowed_token_ids"] = list(first.params.allowed_token_ids)
        parameters["seeds"] = [choice.request.params.seed for choice in processed.choices[:per_prompt]]
        del parameters["seed"]
        shared = {
            "object": "render",
            "request_id": request_id,
            "model": model,
            "choices_per_prompt": per_prompt,
            "max_model_len": self.max_len,
            "parameters": parameters | {"stop": body.stops, "priority": first.priority, "timeout": processed.timeout_s},
            "features": None,
        }
        # Until the response has been read, arrays take a tenth of the memory of tuples.
        prompts = [array("i", choice.request.prompt_token_ids) for choice in processed.choices[::per_prompt]]
        shared_size = len(dumps(shared))
        size = len(prompts) * shared_size + sum(map(len, prompts)) * _CHARACTERS_PER_ID
        renderings: list[dict[str, Any]] = []
        while size <= MOST_RENDERED and len(renderings) < len(prompts):
            ids = prompts[len(renderings)]
            text = await self.tokenizer.atext(ids, self.tokenizer.special_ids, "prompt")
            size += len(text)
            renderings.append(shared | {"text": text, "token_ids": numbers(ids), "num_tokens": len(ids)})
        if size > MOST_RENDERED:
            message = (
                f"The rendered output of {len(prompts)} prompts would exceed {MOST_RENDERED} characters: "
                f"each prompt repeats {shared_size} characters of parameters. Render fewer prompts at a "
                "time."
            )
            raise RequestError(message, "prompt")
        return renderings, processed.ignored

    async def _process_in_time(
        self, body: _BodyT, model: str | None = None, record: RequestRecord | None = None
    ) -> tuple[_ProcessedT, str | None]:
        """Call `process` within the time limit, and record the time that it took. Raises `DeadlineError`.

        `model`: may be the name of an adapter, which is loaded within the same time; its name is returned, else None.
        `record`: gets the times of waiting for the adapter.
        """
        begun = time.monotonic()
        try:
            async with asyncio.timeout(body.timeout):
                processed = await self.process(body)
                adapter = None if model is None else await self.use_adapter(model, record)
        except TimeoutError:
            raise DeadlineError(body.timeout or 0.0) from None
        return replace(processed, spent_s=time.monotonic() - begun), adapter

    def _with_usage(self, body: _BodyT) -> bool:
        """Return whether a stream ends with the usage."""
        return body.include_usage or self.settings.always_stream_usage

    def _head(self, response_id: str, kind: str, model: str) -> ResponseHead:
        """Return the common members of a response. `kind`: its member `object`."""
        return ResponseHead(response_id, kind, int(time.time()), model, self.fingerprint(model))

    def _options(self, body: _BodyT, logprobs: int | None) -> ResponseOptions:
        """Return the response's options. `logprobs`: number of alternatives for every token; None: no logprobs."""
        return ResponseOptions(
            logprobs=logprobs,
            prompt_logprobs=body.prompt_logprobs,
            token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
            usage=bool(body.stream and self._with_usage(body)),
            continuous_usage=body.continuous_usage,
            keep=body.n if body.num_generated > (body.n or 1) else None,
        )


def _server_timing(record: RequestRecord, generation: Generation) -> dict[str, str]:
    """Return the Server-Timing header of a whole response, in milliseconds.

    Its spans end when the prompt is ready, at the first token, and at the end; a fourth is the total.
    """
    marks = (record.received_s, generation.arrival, generation.first_token_at or generation.arrival, time.monotonic())
    spans = {name: marks[index + 1] - marks[index] for index, name in enumerate(("prompt", "first-token", "rest"))}
    spans["total"] = marks[-1] - marks[0]
    return {"Server-Timing": ", ".join(f"{name};dur={1000 * seconds:.1f}" for name, seconds in spans.items())}
