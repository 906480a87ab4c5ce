"""JSON schemas of the responses, for the OpenAPI document. A test validates real responses against them."""

from __future__ import annotations

from typing import Any

from oarlock.server.api.openapi.shapes import COUNT as _COUNT
from oarlock.server.api.openapi.shapes import IDS as _IDS
from oarlock.server.api.openapi.shapes import NUMBER as _NUMBER
from oarlock.server.api.openapi.shapes import STRING as _STRING
from oarlock.server.api.openapi.shapes import list_of as _list
from oarlock.server.api.openapi.shapes import nullable as _nullable
from oarlock.server.api.openapi.shapes import object_of as _object
from oarlock.server.api.openapi.shapes import ref as _ref

_HEAD = {"id": _STRING, "object": _STRING, "created": _COUNT, "model": _STRING, "system_fingerprint": _STRING}
_FINISH = {"type": "string", "enum": ["stop", "length", "tool_calls", "timeout", "abort"]}
_STOP = {"anyOf": [_STRING, {"type": "integer"}, {"type": "null"}]}
_PROMPT_SCORE = _nullable(
    {
        "type": "object",
        "additionalProperties": _object({"logprob": _NUMBER, "rank": _COUNT, "decoded_token": _STRING}),
    }
)
_PROMPT_EXTRAS = {"prompt_token_ids": _IDS, "prompt_logprobs": _list(_PROMPT_SCORE)}
_IDS_OF_CHOICE = {"token_ids": _IDS}
_LOGPROBS = _object(
    {
        "tokens": _list(_STRING),
        "token_logprobs": _list(_nullable(_NUMBER)),
        "top_logprobs": _list(_nullable({"type": "object", "additionalProperties": _NUMBER})),
        "text_offset": _IDS,
    }
)
_CHAT_TOKEN = {"token": _STRING, "logprob": _NUMBER, "bytes": _IDS}
_CHAT_LOGPROBS = _object(
    {
        "content": _list(_object({**_CHAT_TOKEN, "top_logprobs": _list(_object(_CHAT_TOKEN))})),
        "refusal": {"type": "null"},
    }
)
_CALL = _object(
    {
        "id": _STRING,
        "type": {"const": "function"},
        "function": _object({"name": _STRING, "arguments": {**_STRING, "description": "JSON"}}),
    }
)
_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": _nullable(_STRING), "refusal": {"type": "null"}},
    {"tool_calls": {**_list(_CALL), "minItems": 1}, "reasoning_content": _STRING, "reasoning": _STRING},
)
_OUTPUT_ITEM = _object(
    {"id": _STRING, "type": {"enum": ["message", "reasoning", "function_call"]}, "status": _STRING},
    {
        "role": {"const": "assistant"},
        "content": _list(_object({"type": {"enum": ["output_text", "reasoning_text"]}, "text": _STRING})),
        "call_id": _STRING,
        "name": _STRING,
        "arguments": {**_STRING, "description": "JSON"},
    },
)

_CONTENT_BLOCK = _object(
    {"type": {"enum": ["text", "thinking", "tool_use"]}},
    {
        "text": _STRING,
        "thinking": _STRING,
        "signature": _STRING,
        "id": _STRING,
        "name": _STRING,
        "input": {"type": "object"},
    },
)
_WINDOW_FULL = "model_context_window_exceeded"
_POOLED_USAGE = _object(
    {"prompt_tokens": _COUNT, "total_tokens": _COUNT, "prompt_tokens_details": _object({"cached_tokens": _COUNT})}
)
_POOLED_HEAD = {"id": _STRING, "object": {"const": "list"}, "created": _COUNT, "model": _STRING, "usage": _POOLED_USAGE}
_VECTOR = {"anyOf": [_list(_NUMBER), {**_STRING, "description": "base64 of little-endian float32"}]}

_ENGINE = _object(
    {
        "engine": _COUNT,
        "status": {"enum": ["ready", "down"]},
        "running": _COUNT,
        "waiting": _COUNT,
        "kv": _object(
            {
                "block_size": _COUNT,
                "total": _COUNT,
                "held": _COUNT,
                "cached": _COUNT,
                "free": _COUNT,
                "cells_of": {**_COUNT, "description": "blocks for each cell of the map, which shows the first of them"},
                "map": {**_STRING, "pattern": "^([hcf][0-9]+)*$", "description": "runs: held, cached, free"},
            }
        ),
        "step": _object(
            {
                "count": _COUNT,
                "last_ms": _NUMBER,
                "median_ms": _NUMBER,
                "p99_ms": _NUMBER,
                "ranks": _list(_object({"rank": _COUNT, "last_ms": _NUMBER, "median_ms": _NUMBER})),
            }
        ),
        "slowest": _list(
            _object(
                {
                    "id": _STRING,
                    "state": {"enum": ["running", "waiting"]},
                    "age_s": _NUMBER,
                    "prompt_tokens": _COUNT,
                    "cached_tokens": _COUNT,
                    "output_tokens": _COUNT,
                }
            )
        ),
    }
)

SCHEMAS: dict[str, Any] = {
    "Error": _object(
        {
            "error": _object(
                {"message": _STRING, "type": _STRING, "param": _nullable(_STRING), "code": _nullable(_STRING)}
            )
        }
    ),
    "Usage": _object(
        {"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT},
        {
            "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
            "completion_tokens_details": _object({"reasoning_tokens": _COUNT}),
        },
    ),
    "Aborted": _object({"aborted": _COUNT}),
    "CacheReset": _object({"reset": {"type": "boolean"}, "blocks": _COUNT}),
    "Draining": _object({"status": _STRING, "open": _COUNT}),
    "Completion": _object(
        {
            **_HEAD,
            "choices": _list(
                _object(
                    {
                        "index": _COUNT,
                        "text": _STRING,
                        "logprobs": _nullable(_LOGPROBS),
                        "finish_reason": _FINISH,
                        "stop_reason": _STOP,
                    },
                    _PROMPT_EXTRAS | _IDS_OF_CHOICE,
                )
            ),
            "usage": _ref("Usage"),
        }
    ),
    "ChatCompletion": _object(
        {
            **_HEAD,
            "choices": _list(
                _object(
                    {
                        "index": _COUNT,
                        "message": _MESSAGE,
                        "logprobs": _nullable(_CHAT_LOGPROBS),
                        "finish_reason": _FINISH,
                        "stop_reason": _STOP,
                    },
                    _IDS_OF_CHOICE,
                )
            ),
            "usage": _ref("Usage"),
        },
        _PROMPT_EXTRAS,
    ),
    "Response": _object(
        {
            "id": _STRING,
            "object": {"const": "response"},
            "created_at": _COUNT,
            "model": _STRING,
            "status": {"enum": ["in_progress", "completed", "incomplete", "cancelled", "failed"]},
            "error": _nullable(_object({"code": _STRING, "message": _STRING})),
            "incomplete_details": _nullable(_object({"reason": {"enum": ["max_output_tokens", "timeout"]}})),
            "output": _list(_OUTPUT_ITEM),
            "store": {"type": "boolean"},
            "usage": _nullable(
                _object(
                    {
                        "input_tokens": _COUNT,
                        "input_tokens_details": _object({"cached_tokens": _COUNT, "cache_write_tokens": _COUNT}),
                        "output_tokens": _COUNT,
                        "output_tokens_details": _object({"reasoning_tokens": _COUNT}),
                        "total_tokens": _COUNT,
                    }
                )
            ),
        }
    ),
    "Message": _object(
        {
            "id": _STRING,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": _STRING,
            "content": _list(_CONTENT_BLOCK),
            "stop_reason": {
                "enum": ["end_turn", "max_tokens", "stop_sequence", "tool_use", "pause_turn", _WINDOW_FULL],
            },
            "stop_sequence": _nullable(_STRING),
            "usage": _object(
                {
                    "input_tokens": _COUNT,
                    "cache_creation_input_tokens": {"const": 0},
                    "cache_read_input_tokens": _COUNT,
                    "output_tokens": _COUNT,
                    "output_tokens_details": _object({"thinking_tokens": _COUNT}),
                    "service_tier": {"const": "standard"},
                }
            ),
        }
    ),
    "MessageTokensCount": _object({"input_tokens": _COUNT}),
    "MessageError": _object(
        {
            "type": {"const": "error"},
            "error": _object({"type": _STRING, "message": _STRING}),
            "request_id": _STRING,
        }
    ),
    "InputTokens": _object({"object": {"const": "response.input_tokens"}, "input_tokens": _COUNT}),
    "DeletedResponse": _object({"id": _STRING, "object": _STRING, "deleted": {"const": True}}),
    "InputItems": _object(
        {"object": {"const": "list"}, "data": _list({"type": "object"}), "has_more": {"type": "boolean"}}
    ),
    "Rendered": _object(
        {
            "object": _STRING,
            "request_id": _STRING,
            "model": _STRING,
            "text": _STRING,
            "token_ids": _IDS,
            "num_tokens": _COUNT,
            "choices_per_prompt": _COUNT,
            "max_model_len": _COUNT,
            "parameters": {"type": "object"},
            "features": {"type": "null"},
        }
    ),
    "RenderedPrompts": _list(_ref("Rendered")),
    "Tokens": _object(
        {"count": _COUNT, "max_model_len": _COUNT, "tokens": _IDS, "token_strs": _nullable(_list(_STRING))}
    ),
    "Text": _object({"prompt": _STRING}),
    "Model": _object(
        {"id": _STRING, "object": _STRING, "created": _COUNT, "owned_by": _STRING, "max_model_len": _COUNT},
    ),
    "Embeddings": _object(
        {
            **_POOLED_HEAD,
            "data": _list(_object({"object": {"const": "embedding"}, "index": _COUNT, "embedding": _VECTOR})),
        }
    ),
    "PooledVectors": _object(
        {
            **_POOLED_HEAD,
            "data": _list(
                _object(
                    {
                        "object": {"const": "pooling"},
                        "index": _COUNT,
                        "data": {"anyOf": [{**_list(_VECTOR), "description": "one for each token"}, _VECTOR]},
                    }
                )
            ),
        }
    ),
    "Reranking": _object(
        {
            "id": _STRING,
            "model": _STRING,
            "usage": _POOLED_USAGE,
            "results": _list(
                _object({"index": _COUNT, "relevance_score": _NUMBER}, {"document": _object({"text": _STRING})})
            ),
        }
    ),
    "Scores": _object(
        {
            **_POOLED_HEAD,
            "data": _list(_object({"index": _COUNT, "object": {"const": "score"}, "score": _NUMBER})),
        }
    ),
    "ModelList": _object({"object": _STRING, "data": _list(_ref("Model"))}),
    "Load": _object(
        {
            "server_load": _COUNT,
            "requests_running": _COUNT,
            "requests_waiting": _COUNT,
            "tokens_waiting": _COUNT,
            "kv_cache_usage": _NUMBER,
        }
    ),
    "State": _object(
        {
            "model": _STRING,
            "version": _STRING,
            "time": _NUMBER,
            "uptime_s": _NUMBER,
            "status": {"enum": ["starting", "loading", "ok", "degraded", "stalled", "draining", "dead"]},
            "requests": _object(dict.fromkeys(("running", "waiting", "finished", "refused", "invalid"), _COUNT)),
            "tokens_per_second": _object({"prompt": _NUMBER, "generation": _NUMBER}),
            "engines": _list(_ENGINE),
        },
        {"loading": _object({"step": _STRING, "progress": _NUMBER, "detail": _STRING})},
    ),
    "ExplainedRequest": _object(
        {
            "id": _STRING,
            "request_id": _STRING,
            "route": _STRING,
            "key": _nullable(_STRING),
            "received": _NUMBER,
            "state": {"enum": ["processing", "waiting", "running", "ended"]},
            "status": _nullable(_COUNT),
            "error": _nullable(_object({"status": _COUNT, "code": _nullable(_STRING), "param": _nullable(_STRING)})),
            "choices": _COUNT,
            "finish_reasons": _list(_nullable(_STRING)),
            "prompt_tokens": _COUNT,
            "cached_tokens": _COUNT,
            "completion_tokens": _COUNT,
            "diagnosis": _STRING,
            "flag": _nullable(_STRING),
            "seconds": {"type": "object", "additionalProperties": _NUMBER},
            "timeline": _list(_object({"at_s": _NUMBER, "event": _STRING})),
            "engine": _list({"type": "object", "description": "what the engine knows of each of the first choices"}),
        }
    ),
    "Health": _object(
        {"status": _STRING, "state": _STRING},
        {"reason": _STRING, "step": _STRING, "progress": _NUMBER, "replicas": _list(_STRING)},
    ),
    "Version": _object({"version": _STRING}),
    "Capabilities": _object(
        {
            "object": _STRING,
            "version": _STRING,
            "models": _list(_STRING),
            "limits": {"type": "object"},
            "features": {"type": "object"},
            "endpoints": {"type": "object"},
        }
    ),
}

__all__ = ["SCHEMAS"]
