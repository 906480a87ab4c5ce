"""JSON schemas of the responses, for the OpenAPI document. A test validates real responses against them."""

from __future__ import annotations

from typing import Any

_STRING = {"type": "string"}
_NUMBER = {"type": "number"}
_COUNT = {"type": "integer", "minimum": 0}
_IDS = {"type": "array", "items": _COUNT}


def _nullable(shape: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [shape, {"type": "null"}]}


def _list(shape: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": shape}


def _object(required: dict[str, Any], optional: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"type": "object", "properties": {**required, **(optional or {})}, "required": list(required)}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}"}


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
_RENDERED = _object({"text": _STRING, "token_ids": _IDS, "num_tokens": _COUNT})

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
    "Rendered": _object(
        {
            "object": _STRING,
            "model": _STRING,
            "prompts": _list(_RENDERED),
            "choices_per_prompt": _COUNT,
            "max_model_len": _COUNT,
            "parameters": {"type": "object"},
        }
    ),
    "Tokens": _object(
        {"count": _COUNT, "max_model_len": _COUNT, "tokens": _IDS, "token_strs": _nullable(_list(_STRING))}
    ),
    "Text": _object({"prompt": _STRING}),
    "Model": _object(
        {"id": _STRING, "object": _STRING, "created": _COUNT, "owned_by": _STRING, "max_model_len": _COUNT},
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
    "Health": _object({"status": _STRING, "state": _STRING}, {"reason": _STRING, "step": _STRING, "progress": _NUMBER}),
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
