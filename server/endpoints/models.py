"""`GET /v1/models` and `/v1/models/{id}`. Ids may contain slashes."""

from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oarlock.server.endpoints.serving import OpenAIServing, served_by
from oarlock.server.http.api_route import ErrorHandlingRoute
from oarlock.server.http.openapi import describe

router = APIRouter(route_class=ErrorHandlingRoute)


@router.get("/v1/models", openapi_extra=describe("List models", "ModelList"))
async def list_models(request: Request) -> Response:
    """List the served names. A request without `model` gets the first name."""
    serving = OpenAIServing.of(request)
    return JSONResponse({"object": "list", "data": [_card(serving, name) for name in serving.model_names]})


@router.get("/v1/models/{model:path}", openapi_extra=describe("Retrieve model", "Model"))
async def retrieve_model(request: Request, model: str) -> Response:
    """Return the description of a served name, which may contain slashes."""
    if not model:  # the path ends with a slash
        raise HTTPException(404)
    serving = OpenAIServing.of(request)
    return JSONResponse(_card(serving, serving.check_model(model)))


def _card(serving: OpenAIServing, name: str) -> dict[str, Any]:
    info, pooler = serving.info, serving.async_llm.pooler
    return {
        "id": name,
        "object": "model",
        "created": int(serving.state.started_at),
        "owned_by": "oarlock",
        "root": serving.model_names[0],
        "parent": None,
        "max_model_len": serving.max_len,
        "architecture": info.architecture,
        "text_part_of": info.text_part_of,  # class of the multimodal model; None: a text model
        **served_by(info),
        "num_parameters": info.num_parameters,
        "vocab_size": info.vocab_size,
        "dtype": info.dtype,
        "kv_cache_dtype": info.kv_cache_dtype,
        "device": info.device,
        "tensor_parallel_size": info.tensor_parallel_size,
        "data_parallel_size": info.data_parallel_size,
        "batch_invariant": info.batch_invariant,
        "batch_invariant_reason": info.batch_invariant_reason,
        "rank_invariant": info.rank_invariant,
        "rank_invariant_reason": info.rank_invariant_reason,
        # Digest of weights, settings and software, which decide the computed values.
        "numbers_digest": info.numbers_digest,
        "tokenizer_digest": serving.tokenizer.digest,  # digest of tokenizer and chat template
        "task": str(pooler.task),  # generate, embed or score
        "chat": pooler.generates and serving.tokenizer.template.exists,
    }
