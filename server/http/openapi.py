"""The OpenAPI document: request bodies, response schemas, and an example of each.

Request schemas are made from the wire types that check requests. A test validates real responses against the response
schemas.
"""

import copy
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from oarlock.server.http.api_route import ANY_QUERY, QUERY_PARAMETERS
from oarlock.server.http.request_body import REQUEST_BODIES

STRING = {"type": "string"}
NUMBER = {"type": "number"}
COUNT = {"type": "integer", "minimum": 0}
IDS = {"type": "array", "items": COUNT}


def nullable(shape: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [shape, {"type": "null"}]}


def list_of(shape: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": shape}


def object_of(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


_HEAD = {"id": STRING, "object": STRING, "created": COUNT, "model": STRING, "system_fingerprint": STRING}
_FINISH = {"type": "string", "enum": ["stop", "length", "tool_calls", "timeout", "abort"]}
_STOP = {"anyOf": [STRING, {"type": "integer"}, {"type": "null"}]}
_PROMPT_SCORE = nullable(
    {
        "type": "object",
        "additionalProperties": object_of({"logprob": NUMBER, "rank": COUNT, "decoded_token": STRING}),
    }
)
_PROMPT_EXTRAS = {"prompt_token_ids": IDS, "prompt_logprobs": list_of(_PROMPT_SCORE)}
_IDS_OF_CHOICE = {"token_ids": IDS}
_LOGPROBS = object_of(
    {
        "tokens": list_of(STRING),
        "token_logprobs": list_of(nullable(NUMBER)),
        "top_logprobs": list_of(nullable({"type": "object", "additionalProperties": NUMBER})),
        "text_offset": IDS,
    }
)
_CHAT_TOKEN = {"token": STRING, "logprob": NUMBER, "bytes": IDS}
_CHAT_LOGPROBS = object_of(
    {
        "content": list_of(object_of({**_CHAT_TOKEN, "top_logprobs": list_of(object_of(_CHAT_TOKEN))})),
        "refusal": {"type": "null"},
    }
)
_CALL = object_of(
    {
        "id": STRING,
        "type": {"const": "function"},
        "function": object_of({"name": STRING, "arguments": {**STRING, "description": "JSON"}}),
    }
)
_MESSAGE = object_of(
    {"role": {"const": "assistant"}, "content": nullable(STRING), "refusal": {"type": "null"}},
    {"tool_calls": {**list_of(_CALL), "minItems": 1}, "reasoning_content": STRING, "reasoning": STRING},
)
_OUTPUT_ITEM = object_of(
    {"id": STRING, "type": {"enum": ["message", "reasoning", "function_call"]}, "status": STRING},
    {
        "role": {"const": "assistant"},
        "content": list_of(object_of({"type": {"enum": ["output_text", "reasoning_text"]}, "text": STRING})),
        "call_id": STRING,
        "name": STRING,
        "arguments": {**STRING, "description": "JSON"},
    },
)
_RESPONSE_USAGE = object_of(
    {
        "input_tokens": COUNT,
        "input_tokens_details": object_of({"cached_tokens": COUNT, "cache_write_tokens": COUNT}),
        "output_tokens": COUNT,
        "output_tokens_details": object_of({"reasoning_tokens": COUNT}),
        "total_tokens": COUNT,
    }
)
_COMPACTED_ITEM = object_of(
    {"id": STRING, "type": {"enum": ["message", "compaction"]}},
    {
        "status": STRING,
        "role": {"enum": ["user", "system", "developer"]},
        "content": list_of(object_of({"type": {"const": "input_text"}, "text": STRING})),
        "encrypted_content": {**STRING, "description": "the summary in base64, for this server"},
    },
)

_CONTENT_BLOCK = object_of(
    {"type": {"enum": ["text", "thinking", "tool_use"]}},
    {
        "text": STRING,
        "thinking": STRING,
        "signature": STRING,
        "id": STRING,
        "name": STRING,
        "input": {"type": "object"},
    },
)
_WINDOW_FULL = "model_context_window_exceeded"
_POOLED_USAGE = object_of(
    {"prompt_tokens": COUNT, "total_tokens": COUNT, "prompt_tokens_details": object_of({"cached_tokens": COUNT})}
)
_POOLED_HEAD = {"id": STRING, "object": {"const": "list"}, "created": COUNT, "model": STRING, "usage": _POOLED_USAGE}
_VECTOR = {"anyOf": [list_of(NUMBER), {**STRING, "description": "base64 of little-endian float32"}]}

_ENGINE = object_of(
    {
        "engine": COUNT,
        "status": {"enum": ["ready", "down"]},
        "running": COUNT,
        "waiting": COUNT,
        "kv": object_of(
            {
                "block_size": COUNT,
                "total": COUNT,
                "held": COUNT,
                "cached": COUNT,
                "free": COUNT,
                "cells_of": {**COUNT, "description": "blocks for each cell of the map, which shows the first of them"},
                "map": {**STRING, "pattern": "^([hcf][0-9]+)*$", "description": "runs: held, cached, free"},
            }
        ),
        "step": object_of(
            {
                "count": COUNT,
                "last_ms": NUMBER,
                "median_ms": NUMBER,
                "p99_ms": NUMBER,
                "ranks": list_of(object_of({"rank": COUNT, "last_ms": NUMBER, "median_ms": NUMBER})),
            }
        ),
        "adapters": nullable(
            object_of(
                {
                    **dict.fromkeys(("slots", "in_slots", "host_limit", "in_host_memory", "names", "waiting"), COUNT),
                    "shown": list_of(
                        object_of(
                            {
                                "name": STRING,
                                "state": {"enum": ["on_disk", "loading", "ready"]},
                                "slot": {**COUNT, "description": "0: in no slot"},
                                "running": COUNT,
                                "waiting": COUNT,
                            }
                        )
                    ),
                }
            )
        ),
        "slowest": list_of(
            object_of(
                {
                    "id": STRING,
                    "state": {"enum": ["running", "waiting"]},
                    "adapter": nullable(STRING),
                    "age_s": NUMBER,
                    "prompt_tokens": COUNT,
                    "cached_tokens": COUNT,
                    "output_tokens": COUNT,
                }
            )
        ),
    }
)

SCHEMAS: dict[str, Any] = {
    "Error": object_of(
        {"error": object_of({"message": STRING, "type": STRING, "param": nullable(STRING), "code": nullable(STRING)})}
    ),
    "Usage": object_of(
        {"prompt_tokens": COUNT, "completion_tokens": COUNT, "total_tokens": COUNT},
        {
            "prompt_tokens_details": object_of({"cached_tokens": COUNT}),
            "completion_tokens_details": object_of({"reasoning_tokens": COUNT}),
        },
    ),
    "Aborted": object_of({"aborted": COUNT}),
    "CacheReset": object_of({"reset": {"type": "boolean"}, "blocks": COUNT}),
    "Draining": object_of({"status": STRING, "open": COUNT}),
    "Completion": object_of(
        {
            **_HEAD,
            "choices": list_of(
                object_of(
                    {
                        "index": COUNT,
                        "text": STRING,
                        "logprobs": nullable(_LOGPROBS),
                        "finish_reason": _FINISH,
                        "stop_reason": _STOP,
                    },
                    _PROMPT_EXTRAS | _IDS_OF_CHOICE,
                )
            ),
            "usage": ref("Usage"),
        }
    ),
    "ChatCompletion": object_of(
        {
            **_HEAD,
            "choices": list_of(
                object_of(
                    {
                        "index": COUNT,
                        "message": _MESSAGE,
                        "logprobs": nullable(_CHAT_LOGPROBS),
                        "finish_reason": _FINISH,
                        "stop_reason": _STOP,
                    },
                    _IDS_OF_CHOICE,
                )
            ),
            "usage": ref("Usage"),
        },
        _PROMPT_EXTRAS,
    ),
    "Response": object_of(
        {
            "id": STRING,
            "object": {"const": "response"},
            "created_at": COUNT,
            "model": STRING,
            "status": {"enum": ["in_progress", "completed", "incomplete", "cancelled", "failed"]},
            "error": nullable(object_of({"code": STRING, "message": STRING})),
            "incomplete_details": nullable(object_of({"reason": {"enum": ["max_output_tokens", "timeout"]}})),
            "output": list_of(_OUTPUT_ITEM),
            "store": {"type": "boolean"},
            "usage": nullable(_RESPONSE_USAGE),
        }
    ),
    "CompactedResponse": object_of(
        {
            "id": STRING,
            "object": {"const": "response.compaction"},
            "created_at": COUNT,
            "output": list_of(_COMPACTED_ITEM),
            "usage": _RESPONSE_USAGE,
        },
        {"incomplete_details": object_of({"reason": {"const": "max_output_tokens"}})},
    ),
    "Message": object_of(
        {
            "id": STRING,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": STRING,
            "content": list_of(_CONTENT_BLOCK),
            "stop_reason": {
                "enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", _WINDOW_FULL],
            },
            "stop_sequence": nullable(STRING),
            "usage": object_of(
                {
                    "input_tokens": COUNT,
                    "cache_creation_input_tokens": {"const": 0},
                    "cache_read_input_tokens": COUNT,
                    "output_tokens": COUNT,
                    "output_tokens_details": object_of({"thinking_tokens": COUNT}),
                    "service_tier": {"const": "standard"},
                }
            ),
        }
    ),
    "MessageTokensCount": object_of({"input_tokens": COUNT}),
    "MessageError": object_of(
        {
            "type": {"const": "error"},
            "error": object_of({"type": STRING, "message": STRING}),
            "request_id": STRING,
        }
    ),
    "InputTokens": object_of({"object": {"const": "response.input_tokens"}, "input_tokens": COUNT}),
    "DeletedResponse": object_of({"id": STRING, "object": STRING, "deleted": {"const": True}}),
    "InputItems": object_of(
        {"object": {"const": "list"}, "data": list_of({"type": "object"}), "has_more": {"type": "boolean"}}
    ),
    "Rendered": object_of(
        {
            "object": STRING,
            "request_id": STRING,
            "model": STRING,
            "text": STRING,
            "token_ids": IDS,
            "num_tokens": COUNT,
            "choices_per_prompt": COUNT,
            "max_model_len": COUNT,
            "parameters": {"type": "object"},
            "features": {"type": "null"},
        }
    ),
    "RenderedPrompts": list_of(ref("Rendered")),
    "Tokens": object_of(
        {"count": COUNT, "max_model_len": COUNT, "tokens": IDS, "token_strs": nullable(list_of(STRING))}
    ),
    "Text": object_of({"prompt": STRING}),
    "Model": object_of(
        {"id": STRING, "object": STRING, "created": COUNT, "owned_by": STRING, "max_model_len": COUNT},
        {"root": STRING, "parent": nullable(STRING), "adapter_digest": nullable(STRING)},
    ),
    "Embeddings": object_of(
        {
            **_POOLED_HEAD,
            "data": list_of(object_of({"object": {"const": "embedding"}, "index": COUNT, "embedding": _VECTOR})),
        }
    ),
    "PooledVectors": object_of(
        {
            **_POOLED_HEAD,
            "data": list_of(
                object_of(
                    {
                        "object": {"const": "pooling"},
                        "index": COUNT,
                        "data": {"anyOf": [{**list_of(_VECTOR), "description": "one for each token"}, _VECTOR]},
                    }
                )
            ),
        }
    ),
    "Reranking": object_of(
        {
            "id": STRING,
            "model": STRING,
            "usage": _POOLED_USAGE,
            "results": list_of(
                object_of({"index": COUNT, "relevance_score": NUMBER}, {"document": object_of({"text": STRING})})
            ),
        }
    ),
    "Scores": object_of(
        {
            **_POOLED_HEAD,
            "data": list_of(object_of({"index": COUNT, "object": {"const": "score"}, "score": NUMBER})),
        }
    ),
    "DeletedModel": object_of({"id": STRING, "object": {"const": "model"}, "deleted": {"const": True}}),
    "ModelList": object_of({"object": STRING, "data": list_of(ref("Model"))}),
    "Load": object_of(
        {
            "server_load": COUNT,
            "requests_running": COUNT,
            "requests_waiting": COUNT,
            "tokens_waiting": COUNT,
            "kv_cache_usage": NUMBER,
        }
    ),
    "State": object_of(
        {
            "model": STRING,
            "version": STRING,
            "time": NUMBER,
            "uptime_s": NUMBER,
            "status": {"enum": ["starting", "loading", "ok", "degraded", "stalled", "draining", "dead"]},
            "requests": object_of(dict.fromkeys(("running", "waiting", "finished", "refused", "invalid"), COUNT)),
            "tokens_per_second": object_of({"prompt": NUMBER, "generation": NUMBER}),
            "engines": list_of(_ENGINE),
        },
        {"loading": object_of({"step": STRING, "progress": NUMBER, "detail": STRING})},
    ),
    "ExplainedRequest": object_of(
        {
            "id": STRING,
            "request_id": STRING,
            "route": STRING,
            "key": nullable(STRING),
            "adapter": nullable(STRING),
            "received": NUMBER,
            "state": {"enum": ["processing", "waiting", "running", "ended"]},
            "status": nullable(COUNT),
            "error": nullable(object_of({"status": COUNT, "code": nullable(STRING), "param": nullable(STRING)})),
            "choices": COUNT,
            "finish_reasons": list_of(nullable(STRING)),
            "prompt_tokens": COUNT,
            "cached_tokens": COUNT,
            "completion_tokens": COUNT,
            "diagnosis": STRING,
            "flag": nullable(STRING),
            "seconds": {"type": "object", "additionalProperties": NUMBER},
            "timeline": list_of(object_of({"at_s": NUMBER, "event": STRING})),
            "engine": list_of({"type": "object", "description": "the engine's history of each of the first choices"}),
        }
    ),
    "Health": object_of(
        {"status": STRING, "state": STRING},
        {"reason": STRING, "step": STRING, "progress": NUMBER, "replicas": list_of(STRING)},
    ),
    "Version": object_of({"version": STRING}),
    "Capabilities": object_of(
        {
            "object": STRING,
            "version": STRING,
            "models": list_of(STRING),
            "limits": {"type": "object"},
            "features": {"type": "object"},
            "adapters": nullable(
                object_of({"max_loras": COUNT, "max_lora_rank": COUNT, "bytes_per_slot_per_rank": COUNT})
            ),
            "endpoints": {"type": "object"},
        }
    ),
}

# Schemas that exist only with --batch-dir.
_FILE = object_of(
    {
        "id": STRING,
        "object": {"const": "file"},
        "bytes": COUNT,
        "created_at": COUNT,
        "expires_at": nullable(COUNT),
        "filename": STRING,
        "purpose": {"enum": ["batch", "batch_output"]},
        "status": {"const": "processed"},
    }
)
_BATCH_STATES = ["validating", "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled"]
_BATCH = object_of(
    {
        "id": STRING,
        "object": {"const": "batch"},
        "endpoint": STRING,
        "input_file_id": STRING,
        "completion_window": STRING,
        "status": {"enum": _BATCH_STATES},
        "created_at": COUNT,
        "expires_at": COUNT,
        "request_counts": object_of({"total": COUNT, "completed": COUNT, "failed": COUNT}),
        "output_file_id": nullable(STRING),
        "error_file_id": nullable(STRING),
        "errors": nullable(
            object_of(
                {
                    "object": {"const": "list"},
                    "data": list_of(object_of({"code": STRING, "message": STRING, "line": nullable(COUNT)})),
                }
            )
        ),
        "usage": nullable(object_of({"input_tokens": COUNT, "output_tokens": COUNT, "total_tokens": COUNT})),
    }
)


def _page(shape: dict[str, Any]) -> dict[str, Any]:
    ends = {"first_id": nullable(STRING), "last_id": nullable(STRING)}
    return object_of({"object": {"const": "list"}, "data": list_of(shape), **ends, "has_more": {"type": "boolean"}})


BATCH_SCHEMAS: dict[str, Any] = {
    "File": _FILE,
    "FileList": _page(_FILE),
    "DeletedFile": object_of({"id": STRING, "object": {"const": "file"}, "deleted": {"const": True}}),
    "Batch": _BATCH,
    "BatchList": _page(_BATCH),
}


_REF = "#/components/schemas/"
_ABOUT = (
    "OpenAI's API on a tensor-parallel engine. Errors have the form `Error`; on the routes of messages "
    "`MessageError`, as Anthropic's clients expect."
)
# Errors that any route may return.
_ERRORS = {
    "400": "The request is invalid; `param` names the field.",
    "401": "The API key is missing or wrong.",
    "403": "The Host header is not a name of this server, a web page of another origin sent the request, "
    "or the admin key is missing on a route that requires it.",
    "404": "The route or model does not exist.",
    "408": "The time limit passed before anything was generated, or the body arrived too slowly.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "The queue is full; see Retry-After.",
    "500": "An internal error of the server.",
    "503": "The server is loading, draining, stopped, or out of connections; see Retry-After.",
}


def describe(
    summary: str,
    response_schema: str,
    *,
    bodies: tuple[str, ...] = (),
    examples: dict[str, Any] | None = None,
    media: str = "application/json",
    example_response: Any = None,
    streams: bool = False,
    status: int = 200,
    query: tuple[str, ...] = (),
    any_query: bool = False,
) -> dict[str, Any]:
    """Return the OpenAPI fields of a route, for `openapi_extra`.

    `response_schema` and `bodies` are names of schemas, `query` names of parameters.

    `any_query`: the route accepts and ignores any query parameter, such as those added by links, caches and load
    balancers.
    """
    content: dict[str, Any] = {
        media: {"schema": {"$ref": _REF + response_schema} if response_schema else {"type": "string"}}
    }
    if example_response is not None:
        content[media]["example"] = example_response
    if streams:
        content["text/event-stream"] = {"schema": {"description": "One chunk per event, then `[DONE]`."}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {str(status): {"description": "The response.", "content": content}},
    }
    if query:
        operation["parameters"] = [{"name": name, "in": "query", **QUERY_PARAMETERS[name]} for name in query]
    if any_query:
        operation[ANY_QUERY] = True
    if bodies:
        refs = [{"$ref": _REF + name} for name in bodies]
        schema = refs[0] if len(refs) == 1 else {"anyOf": refs}
        named = {name: {"value": value} for name, value in (examples or {}).items()}
        operation["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schema, "examples": named}},
        }
    return operation


# (ids of the routers) -> document. Routers are constants, so a second application in the process finds its document.
_DOCUMENTS: dict[tuple[int, ...], dict[str, Any]] = {}


def build(app: FastAPI, routers: tuple[APIRouter, ...]) -> dict[str, Any]:
    """Return the whole OpenAPI 3.1 document of an application with these routers."""
    if app.openapi_schema is None:
        key = tuple(map(id, routers))
        if key not in _DOCUMENTS:
            _DOCUMENTS[key] = _document(app)
        app.openapi_schema = copy.deepcopy(_DOCUMENTS[key])
    return app.openapi_schema


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=_ABOUT, routes=app.routes)
    has_batches = "/v1/batches" in document["paths"]
    bodies = [body for name, body in REQUEST_BODIES.items() if has_batches or name != "CreateBatchRequest"]
    schemas = SCHEMAS | (BATCH_SCHEMAS if has_batches else {})
    wanted: list[tuple[type[BaseModel], JsonSchemaMode]] = [(body, "validation") for body in bodies]
    _, definitions = models_json_schema(wanted, ref_template=_REF + "{model}")
    components = document.setdefault("components", {})
    components["schemas"] = definitions["$defs"] | schemas
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"key": []}]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _finish(path, method, operation)
    return document


def with_defaults(document: dict[str, Any], defaults: Mapping[str, float]) -> dict[str, Any]:
    """Write these defaults into the document's schemas of generating requests, and return the document."""
    for schema in ("CompletionRequest", "ChatRequest", "ResponsesRequest", "MessagesRequest", "CountTokensRequest"):
        described = document["components"]["schemas"][schema]["properties"]
        for name, value in defaults.items():
            described[name]["default"] = value
    return document


def _finish(path: str, method: str, operation: dict[str, Any]) -> None:
    """Add the errors that every route has, and remove the framework's own error schema."""
    operation["operationId"] = "_".join([method, *path.replace("{", "").replace("}", "").strip("/").split("/")])
    responses = operation["responses"]
    responses.pop("422", None)
    content = next(response["content"] for status, response in responses.items() if status.startswith("2"))
    if content.get("application/json") == {"schema": {}}:  # the framework's guess for a response that is not JSON
        del content["application/json"]
    for status, meaning in _ERRORS.items():
        if method == "get" and status in ("408", "413", "415", "429"):
            continue
        name = "MessageError" if path.startswith("/v1/messages") else "Error"
        error = {"application/json": {"schema": {"$ref": _REF + name}}}
        responses.setdefault(status, {"description": meaning, "content": error})
