"""Operations of a server: capabilities, load, documents, health probes, metrics, live state, explained requests, admin.

`/health/live` checks that this process responds. `/health/ready` and `/health` check that the model is loaded and every
rank made progress recently. The probes and `/version` never need a key; `/metrics` and `/v1/state` need none on
loopback. The middleware checks the admin key of `/admin/`. It also checks the admin key of `/v1/requests/` if the
server has keys or other machines can reach it.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from oarlock.engine.types import EngineInfo
from oarlock.server.endpoints.operations.explain import OpenAIServingExplain
from oarlock.server.endpoints.operations.live_state import OpenAIServingLiveState
from oarlock.server.endpoints.serving import OpenAIServing, served_by
from oarlock.server.errors import HttpError, retry_after
from oarlock.server.http.api_route import ErrorHandlingRoute
from oarlock.server.http.docs_page import STYLE_SOURCE, body_schemas, page, parameters
from oarlock.server.http.openapi import describe
from oarlock.server.http.pages import CachedDocuments, ConstantDocument, page_headers
from oarlock.server.http.request_body import NEUTRAL_VALUES
from oarlock.server.http.server_state import Phase
from oarlock.server.observability.logs import event, logger
from oarlock.server.observability.metrics import CONTENT_TYPE
from oarlock.server.schemas.generation import AbortRequest
from oarlock.server.schemas.pooling import MAX_INPUTS
from oarlock.server.schemas.strict_model import MAX_CHOICES, MAX_PROMPTS, MAX_SEQUENCES
from oarlock.server.version import VERSION


def capabilities(document: dict[str, Any], serving: OpenAIServing) -> dict[str, Any]:
    """Return the response of `GET /v1/capabilities`."""
    settings, processor, info = serving.settings, serving.async_llm.input_processor, serving.info
    config, pooler = processor.generation_config, serving.async_llm.pooler
    return {
        "object": "capabilities",
        "version": VERSION,
        "models": list(serving.model_names),
        "introduction": asdict(serving.state.introduction),
        "limits": {
            "max_model_len": processor.max_len,
            "vocab_size": info.vocab_size,
            "max_body_bytes": settings.max_body_size,
            "max_prompts": MAX_PROMPTS,
            "max_choices": MAX_CHOICES,
            "max_sequences_per_request": MAX_SEQUENCES,
            "max_running_sequences": info.max_num_seqs,
            "max_tokens_per_step": info.max_num_batched_tokens,
            "step_timeout_s": info.step_timeout_s,
            "max_waiting_sequences": info.max_waiting_requests,
            "max_waiting_prompt_tokens": info.max_waiting_tokens,
            "request_timeout_s": settings.request_timeout,
        },
        "features": {
            "task": str(pooler.task),
            "chat": pooler.generates and processor.tokenizer.template.exists,
            "fill_in_the_middle": processor.tokenizer.fim_token_ids is not None,
            "prefix_caching": info.enable_prefix_caching,
            "strict_parameters": settings.strict_parameters,
            "unknown_parameters": "refused" if settings.strict_parameters else "reported in X-Ignored-Parameters",
            "strict_max_tokens": settings.strict_max_tokens,
            "always_stream_usage": settings.always_stream_usage,
            "logprobs": "natural logarithms of the raw distribution",
            "api_keys": settings.has_api_keys,
            "admin": settings.admin_api_key is not None,
            "tensor_parallel_size": info.tensor_parallel_size,
            "data_parallel_size": info.data_parallel_size,
            **served_by(info),
            "dtype": info.dtype,
            "quantization": info.quantization,
            "product_inputs": f"rounded to {info.input_rounding}" if info.input_rounding else info.dtype,
            "kv_cache_dtype": info.kv_cache_dtype,
        },
        "adapters": _adapters(info),
        "pooling": None
        if pooler.generates
        else {
            "source": pooler.source,
            "kind": pooler.kind,
            "normalize": pooler.normalize,
            "hidden_size": info.hidden_size,
            "size": pooler.size(info.hidden_size),
            "dimensions": None if pooler.dimensions is None else list(pooler.dimensions) or "any",
            "max_len": min(processor.max_len, pooler.max_len or processor.max_len),
            "max_inputs": MAX_INPUTS,
            "prompts": dict(pooler.prompts),
            "default_prompt_name": pooler.default_prompt,
        },
        "generation_config": {
            "source": config.source,
            "sampling": dict(config.sampling),
            "max_new_tokens": config.max_new_tokens,
            "eos_token_ids": list(processor.eos_token_ids),
        },
        "endpoints": endpoints(document),
    }


def _adapters(info: EngineInfo) -> dict[str, int] | None:
    """Return the limits of LoRA adapters; None if none are served. `/v1/models` has their names."""
    if not info.max_loras:
        return None
    return {
        "max_loras": info.max_loras,
        "max_lora_rank": info.max_lora_rank,
        "bytes_per_slot_per_rank": info.adapter_slot_bytes,
    }


def endpoints(document: dict[str, Any]) -> dict[str, Any]:
    """Return path -> methods. If a route has a body, also its parameters and the parameters refused by name."""
    found: dict[str, Any] = {}
    for path, operations in document["paths"].items():
        entry: dict[str, Any] = {"methods": [method.upper() for method in operations]}
        names = body_schemas(operations.get("post", {}))
        if names:
            schemas = document["components"]["schemas"]
            each = [parameters(schemas, name) for name in names]
            known = entry["parameters"] = {}
            for body in each:
                known |= body
            for name, parameter in known.items():  # a parameter is not required if another form of the body lacks it
                if parameter["required"] and not all(name in other for other in each):
                    known[name] = parameter | {"required": False, "default": None}
            entry["refused"] = {name: list(values) for name, values in NEUTRAL_VALUES.items() if name not in known}
        found[path] = entry
    return found


router = APIRouter(route_class=ErrorHandlingRoute)
_PAGE_HEADERS = page_headers({"style-src": STYLE_SOURCE, "img-src": "data:"})


@router.get("/v1/capabilities", openapi_extra=describe("Show capabilities", "Capabilities"))
async def show_capabilities(request: Request) -> Response:
    """Show the parameters with their ranges, and the limits and features of this server."""
    return _once(
        request,
        "capabilities",
        lambda: _json(capabilities(request.app.openapi(), OpenAIServing.of(request))),
    )


@router.get(
    "/load",
    openapi_extra=describe(
        "Show load",
        "Load",
        example_response={
            "server_load": 3,
            "requests_running": 3,
            "requests_waiting": 0,
            "tokens_waiting": 0,
            "kv_cache_usage": 0.12,
        },
    ),
)
async def load(request: Request) -> Response:
    """Show the number of open, running and waiting requests, and the share of the KV cache in use."""
    serving = OpenAIServing.of(request)
    replicas, _ = await serving.engine_numbers()
    return JSONResponse(
        {
            "server_load": serving.state.num_in_flight - 1,  # this request does not count
            "requests_running": sum(stats.num_requests_running for stats in replicas),
            "requests_waiting": sum(stats.num_requests_waiting for stats in replicas),
            "tokens_waiting": sum(stats.num_waiting_tokens for stats in replicas),
            "kv_cache_usage": sum(stats.kv_cache_usage for stats in replicas) / len(replicas),
        }
    )


@router.get("/docs", openapi_extra=describe("Show documentation", "", media="text/html", any_query=True))
async def docs(request: Request) -> Response:
    return _once(
        request,
        "docs",
        lambda: ConstantDocument.of(page(request.app.openapi()).encode(), "text/html; charset=utf-8", _PAGE_HEADERS),
    )


@router.get("/openapi.json", include_in_schema=False)
async def openapi_document(request: Request) -> Response:
    """Return every route, parameter and response, as OpenAPI 3.1."""
    return _once(request, "openapi", lambda: _json(request.app.openapi()))


def _once(request: Request, name: str, make: Callable[[], ConstantDocument]) -> Response:
    made: CachedDocuments = request.app.state.documents
    return made.get(name, OpenAIServing.of(request).state.async_llm, make).answer(request)


def _json(value: Any) -> ConstantDocument:
    return ConstantDocument.of(bytes(JSONResponse(value).body), "application/json")


_READY = describe(
    "Check readiness",
    "Health",
    example_response={"status": "ok", "state": "ready"},
    any_query=True,
)


@router.get("/health/live", openapi_extra=describe("Check liveness", "Health", any_query=True))
async def live(request: Request) -> Response:
    """Respond with 200 as long as the process runs."""
    return JSONResponse({"status": "live", "state": OpenAIServing.of(request).state.phase.value})


@router.get("/health", openapi_extra=_READY)
@router.get("/health/ready", openapi_extra=_READY)
async def ready(request: Request) -> Response:
    """Respond with 200 if the model is loaded and every rank made progress recently, else with 503 and the reason.

    If there are several replicas, one is enough. While others are down, the status is `degraded`.
    """
    state = OpenAIServing.of(request).state
    reason = state.why_not_ready()
    body: dict[str, Any] = {"status": "ok" if reason is None else "unavailable", "state": state.phase.value}
    if state.phase in (Phase.STARTING, Phase.LOADING):
        body |= {"step": state.loading_step, "progress": round(state.loading_fraction, 4)}
        body["elapsed_s"] = round(time.time() - state.started_at, 1)
        if state.loading_detail:
            body["detail"] = state.loading_detail
    replicas = state.replica_states()
    if replicas:
        body["replicas"] = replicas
    if reason is None:
        return JSONResponse(body | ({"status": "degraded"} if "down" in replicas else {}))
    return JSONResponse(body | {"reason": reason}, 503, retry_after(5))


@router.get(
    "/version", openapi_extra=describe("Show version", "Version", example_response={"version": VERSION}, any_query=True)
)
async def version(request: Request) -> Response:
    return JSONResponse({"version": VERSION})


@router.get("/metrics", openapi_extra=describe("Show metrics", "", media="text/plain", any_query=True))
async def metrics(request: Request) -> Response:
    return Response(await OpenAIServing.of(request).metrics_page(), media_type=CONTENT_TYPE)


_STATE_EXAMPLE = {
    "model": "oarlock-demo",
    "version": "1.0.0",
    "time": 1767225600.0,
    "uptime_s": 61.5,
    "status": "ok",
    "requests": {"running": 1, "waiting": 0, "finished": 12, "refused": 0, "invalid": 0},
    "tokens_per_second": {"prompt": 0.0, "generation": 38.5},
    "engines": [
        {
            "engine": 0,
            "status": "ready",
            "running": 1,
            "waiting": 0,
            "kv": {
                "block_size": 16,
                "total": 64,
                "held": 3,
                "cached": 12,
                "free": 49,
                "cells_of": 1,
                "map": "h3c12f49",
            },
            "step": {
                "count": 3402,
                "last_ms": 25.1,
                "median_ms": 25.8,
                "p99_ms": 61.2,
                "ranks": [
                    {"rank": 0, "last_ms": 24.6, "median_ms": 25.2},
                    {"rank": 1, "last_ms": 24.7, "median_ms": 25.2},
                ],
            },
            "adapters": {
                "slots": 2,
                "in_slots": 1,
                "host_limit": 4,
                "in_host_memory": 1,
                "names": 1,
                "waiting": 0,
                "shown": [{"name": "sql", "state": "ready", "slot": 1, "running": 1, "waiting": 0}],
            },
            "slowest": [
                {
                    "id": "cmpl-0f3c1d",
                    "state": "running",
                    "adapter": "sql",
                    "age_s": 1.204,
                    "prompt_tokens": 35,
                    "cached_tokens": 32,
                    "output_tokens": 11,
                }
            ],
        }
    ],
}


@router.get("/v1/state", openapi_extra=describe("Show live state", "State", example_response=_STATE_EXAMPLE))
async def show_state(request: Request) -> Response:
    """Show requests, KV blocks and step times of each engine at this moment, also while the model loads."""
    return JSONResponse(await OpenAIServingLiveState.of(request).show(), headers={"Cache-Control": "no-store"})


@router.get("/v1/requests/{id}", openapi_extra=describe("Explain request", "ExplainedRequest"))
async def explain_request(request: Request, id: str) -> Response:
    """Show the timeline of a request, where its time went, and one sentence on an option that would help."""
    return JSONResponse(await OpenAIServingExplain.of(request).explain(id), headers={"Cache-Control": "no-store"})


_log = logger("admin")
_ABORT = describe(
    "Abort requests",
    "Aborted",
    bodies=("AbortRequest",),
    examples={"all": {"all": True}},
    example_response={"aborted": 3},
)
_RESET = describe(
    "Reset prefix cache",
    "CacheReset",
    example_response={"reset": True, "blocks": 512},
)
_DRAIN = describe(
    "Drain and stop the server",
    "Draining",
    example_response={"status": "draining", "open": 3},
    status=202,
)


@router.post("/admin/abort", openapi_extra=_ABORT)
async def abort(request: Request) -> Response:
    """End open requests with the text that they have so far: one by its id, or all."""
    serving = OpenAIServing.of(request)
    body, headers = await serving.read(request, AbortRequest)
    async_llm = serving.async_llm
    if body.request_id is None:
        num_aborted = async_llm.abort_all()
    else:
        num_aborted = async_llm.abort(body.request_id)
        if not num_aborted:
            message = "No open request has this id. It may have just ended."
            raise HttpError(404, message, param="request_id", code="request_not_found")
    _log.info(event("admin_abort", requests=num_aborted))
    return JSONResponse({"aborted": num_aborted}, 200, headers)


@router.post("/admin/reset_prefix_cache", openapi_extra=_RESET)
async def reset_prefix_cache(request: Request) -> Response:
    """Drop the cached prefixes of prompts. Running requests keep theirs."""
    num_blocks = await OpenAIServing.of(request).async_llm.engine.reset_prefix_cache()
    _log.info(event("admin_reset_prefix_cache", blocks=num_blocks))
    return JSONResponse({"reset": True, "blocks": num_blocks})


@router.post("/admin/drain", openapi_extra=_DRAIN, status_code=202)
async def drain(request: Request) -> Response:
    """Refuse new requests, finish open requests, then exit, as after SIGTERM."""
    state = OpenAIServing.of(request).state
    state.drain()
    num_open = state.num_in_flight - 1  # this request does not count
    _log.info(event("admin_drain", open=num_open))
    return JSONResponse({"status": "draining", "open": num_open}, 202)
