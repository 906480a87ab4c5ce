"""`/v1/embeddings` and `/pooling`: one vector for each text, or one for each of its tokens."""

import base64
import time
from functools import partial
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from oarlock.engine.errors import RequestError
from oarlock.engine.types import PoolingParams
from oarlock.server.endpoints.pooling.schema import EmbeddingRequest, InputFields, PoolingRequest
from oarlock.server.endpoints.pooling.serving import OpenAIServingPooling, Prompts, usage
from oarlock.server.http.request_record import request_id_of
from oarlock.server.http.server_sent_events import whole_response
from oarlock.server.json_text import InPieces, pieces_of
from oarlock.server.llm.generation import PooledOutput
from oarlock.server.llm.pooler_config import Task

MAX_NUMBERS = 1 << 24  # of tokens' vectors in one answer, kept until it is complete: 64 MiB


class OpenAIServingEmbedding(OpenAIServingPooling):
    """Both endpoints."""

    state_name = "serving_embedding"
    tasks = frozenset({Task.EMBED})

    async def embed(self, request: Request, body: EmbeddingRequest, headers: dict[str, str]) -> Response:
        """`/v1/embeddings`. Raises `RequestError`."""
        outputs, answer = await self._run(request, body, PoolingParams(self.pooler.kind), "embd")
        answer["data"] = self._items(body, outputs, "embedding", "embedding")
        return await whole_response(pieces_of(answer), headers)

    async def complete(
        self, body: EmbeddingRequest, request_id: str, *, owner: str | None = None, label: str | None = None
    ) -> str:
        """The JSON of an answer to a body that did not come over HTTP. `owner`, `label`: as of `run`."""
        model, prompts = self._checked(body)
        outputs = await self.run(body, prompts, PoolingParams(self.pooler.kind), owner, label)
        answer = _answer(f"embd-{request_id}", model, outputs)
        answer["data"] = self._items(body, outputs, "embedding", "embedding")
        return "".join(pieces_of(answer))

    async def vectors(self, body: EmbeddingRequest) -> tuple[list[np.ndarray], list[PooledOutput]]:
        """For the offline interface, of each input: float32 [dimensions], and what it was made of."""
        _, prompts = self._checked(body)
        outputs = await self.run(body, prompts, PoolingParams(self.pooler.kind))
        return [self._finished(body, output)[0] for output in outputs], outputs

    async def pool_tokens(self, request: Request, body: PoolingRequest, headers: dict[str, str]) -> Response:
        """`/pooling`. Raises `RequestError`."""
        by_token = _is_by_token(body)
        outputs, answer = await self._run(
            request, body, PoolingParams("token" if by_token else self.pooler.kind), "pool"
        )
        if by_token:
            answer["data"] = [
                {"index": index, "object": "pooling", "data": self._rows(body, output)}
                for index, output in enumerate(outputs)
            ]
        else:
            answer["data"] = self._items(body, outputs, "pooling", "data")
        return await whole_response(pieces_of(answer), headers)

    async def _run(
        self, request: Request, body: InputFields, pooling: PoolingParams, prefix: str
    ) -> tuple[list[PooledOutput], dict[str, Any]]:
        model, prompts = self._checked(body)
        response_id = f"{prefix}-{request_id_of(request.scope)}"
        outputs = await self.pool(request, body, prompts, pooling, response_id)
        return outputs, _answer(response_id, model, outputs)

    def _checked(self, body: InputFields) -> tuple[str, Prompts]:
        """The model's name, and what makes the prompts. Raises `RequestError`."""
        model = self.check_model(body.model)
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
                ids = await self.text_ids.of_text(before + given, "input", truncate=truncate, marks=marks)
            else:
                ids = await self.text_ids.of_ids(given, "input", truncate=truncate)
            prompts.append(ids)
            num_tokens += len(ids)
            if by_token and num_tokens * self.info.hidden_size > MAX_NUMBERS:
                most = MAX_NUMBERS // self.info.hidden_size
                message = (
                    f"'input' has more than {most} tokens: an answer has at most so many vectors of "
                    f"{self.info.hidden_size} numbers. Send less, or ask for one vector of each text with task: embed."
                )
                raise RequestError(message, "input")
        return prompts

    def _check_dimensions(self, body: InputFields) -> None:
        wanted, allowed = body.dimensions, self.pooler.dimensions
        whole = self.info.hidden_size if _is_by_token(body) else self.pooler.size(self.info.hidden_size)
        if wanted is None or wanted == whole or (allowed is not None and wanted in (allowed or range(1, whole + 1))):
            return
        if allowed is None:
            reason = f"this model's vectors have {whole} numbers and were not trained to be cut. Leave it out"
        else:
            reason = f"it must be {' or '.join(map(str, allowed))}" if allowed else f"it must be at most {whole}"
        raise RequestError(f"'dimensions' is {wanted}, but {reason}.", "dimensions")

    def _items(self, body: InputFields, outputs: list[PooledOutput], kind: str, member: str) -> InPieces:
        """One object for each output, made while it is written."""

        def item(numbered: tuple[int, PooledOutput]) -> dict[str, Any]:
            index, output = numbered
            vector = self._finished(body, output)[0]
            return {"object": kind, "index": index, member: encoded(vector, body.encoding_format or "float")}

        return InPieces(item, list(enumerate(outputs)), lambda numbered: numbered[1].vectors.size)

    def _rows(self, body: InputFields, output: PooledOutput) -> InPieces:
        vectors = self._finished(body, output)
        return InPieces(lambda row: encoded(row, body.encoding_format or "float"), vectors, lambda row: row.size)

    def _finished(self, body: InputFields, output: PooledOutput) -> np.ndarray:
        """Floats [n, size] -> float32 [n, dimensions]."""
        normalize = self.pooler.normalize if body.normalize is None else body.normalize
        cut = output.vectors if body.dimensions is None else output.vectors[:, : body.dimensions]
        return (unit(cut) if normalize else cut).astype(np.float32)


def _is_by_token(body: InputFields) -> bool:
    return isinstance(body, PoolingRequest) and body.task == "token_embed"


def _answer(response_id: str, model: str, outputs: list[PooledOutput]) -> dict[str, Any]:
    """All of it but `data`."""
    head = {"id": response_id, "object": "list", "created": int(time.time()), "model": model}
    return {**head, "usage": usage(outputs)}


_LEAST_NORM = 1e-12  # torch.nn.functional.normalize divides by no less


def encoded(vector: np.ndarray, encoding_format: str) -> Any:
    """A vector, float32 [n], as the member of an answer. Its numbers are those of the float32 exactly."""
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()


def unit(vectors: np.ndarray) -> np.ndarray:
    """[n, k] to float64 [n, k] of length 1, in one order of sums whatever the batch; zeros stay zeros."""
    wide = np.ascontiguousarray(vectors, np.float64)
    norms = np.sqrt(np.sum(wide * wide, axis=-1, keepdims=True))
    return wide / np.maximum(norms, _LEAST_NORM)
