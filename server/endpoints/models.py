"""`/v1/models`, and the routes of the admin key that load and unload LoRA adapters. Ids may contain slashes."""

from typing import Any

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oarlock.engine.errors import RequestError
from oarlock.server.endpoints.serving import OpenAIServing, served_by
from oarlock.server.http.api_route import ErrorHandlingRoute
from oarlock.server.http.openapi import describe
from oarlock.server.http.server_sent_events import until_disconnect
from oarlock.server.llm.adapters import ServedAdapter, ServedAdapters
from oarlock.server.schemas.adapters import LoadAdapterRequest, UnloadAdapterRequest

router = APIRouter(route_class=ErrorHandlingRoute)


@router.get("/v1/models", openapi_extra=describe("List models", "ModelList"))
async def list_models(request: Request) -> Response:
    """List the served names: the model's, then the adapters'. A request without `model` gets the first name."""
    serving = OpenAIServing.of(request)
    cards = [_card(serving, name) for name in serving.model_names]
    adapters = serving.async_llm.adapters
    if adapters is not None:
        cards += [_card(serving, adapter.name, adapter) for adapter in await adapters.available()]
    return JSONResponse({"object": "list", "data": cards})


@router.get("/v1/models/{model:path}", openapi_extra=describe("Retrieve model", "Model"))
async def retrieve_model(request: Request, model: str) -> Response:
    """Return the description of a served name, which may contain slashes."""
    if not model:  # the path ends with a slash
        raise HTTPException(404)
    serving = OpenAIServing.of(request)
    name = await serving.check_model(model)
    return JSONResponse(_card(serving, name, await serving.adapter(name)))


_LOAD = describe(
    "Load LoRA adapter",
    "Model",
    bodies=("LoadAdapterRequest",),
    examples={"sql": {"lora_name": "sql", "lora_path": "sql"}},
)
_UNLOAD = describe(
    "Unload LoRA adapter",
    "DeletedModel",
    bodies=("UnloadAdapterRequest",),
    examples={"sql": {"lora_name": "sql"}},
    example_response={"id": "sql", "object": "model", "deleted": True},
)


@router.post("/v1/load_lora_adapter", openapi_extra=_LOAD)
async def load_adapter(request: Request) -> Response:
    """Load an adapter on all ranks while other requests continue, and return its description.

    Requires the admin key. If the client leaves, the load continues.
    """
    serving = OpenAIServing.of(request)
    body, headers = await serving.read(request, LoadAdapterRequest)
    loading = _adapters(serving).load(
        body.lora_name, body.lora_path, in_place=bool(body.load_inplace), is_trusted=False
    )
    adapter = await until_disconnect(request, loading)
    return JSONResponse(_card(serving, adapter.name, adapter), 200, headers)


@router.post("/v1/unload_lora_adapter", openapi_extra=_UNLOAD)
async def unload_adapter(request: Request) -> Response:
    """Unload an adapter, or cancel its load. Its open requests end with an error that names it.

    Requires the admin key.
    """
    serving = OpenAIServing.of(request)
    body, headers = await serving.read(request, UnloadAdapterRequest)
    await _adapters(serving).unload(body.lora_name)
    return JSONResponse({"id": body.lora_name, "object": "model", "deleted": True}, 200, headers)


def _adapters(serving: OpenAIServing) -> ServedAdapters:
    adapters = serving.async_llm.adapters
    if adapters is None:
        raise RequestError("This server serves no LoRA adapters. Start it with --enable-lora.", None, "lora_disabled")
    return adapters


def _card(serving: OpenAIServing, name: str, adapter: ServedAdapter | None = None) -> dict[str, Any]:
    """Return the description of a name: of the model, or of an adapter."""
    info, pooler = serving.info, serving.async_llm.pooler
    started_at = int(serving.state.started_at)
    own: dict[str, Any] = {"created": started_at, "root": serving.model_names[0], "parent": None}
    if adapter is not None:
        own = {"created": adapter.created or started_at, "root": adapter.root, "parent": adapter.parent}
        own |= {"adapter_digest": adapter.digest or None}  # None: it is loaded when a request first names it
    return {
        "id": name,
        "object": "model",
        **own,
        "owned_by": "oarlock",
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
