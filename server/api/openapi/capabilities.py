"""What this server honours, machine-readable: every endpoint, parameter, range, default and limit.

Read from the OpenAPI document, which is made from the request schemas.
"""

from __future__ import annotations

from typing import Any

from oarlock.server.protocol.base import MAX_CHOICES, MAX_PROMPTS, MAX_SEQUENCES
from oarlock.server.protocol.pooling.fields import MAX_INPUTS
from oarlock.server.protocol.request_body import NEUTRAL_VALUES
from oarlock.server.serving.base import OpenAIServing
from oarlock.server.version import VERSION

# Keywords of JSON schema, and the names of the same limits here.
_LIMITS = {
    "minimum": "minimum",
    "maximum": "maximum",
    "exclusiveMinimum": "above",
    "minLength": "min_length",
    "maxLength": "max_length",
    "minItems": "min_items",
    "maxItems": "max_items",
    "maxProperties": "max_entries",
    "pattern": "pattern",
    "enum": "values",
    "const": "value",
}


def capabilities(document: dict[str, Any], serving: OpenAIServing) -> dict[str, Any]:
    """The response of `GET /v1/capabilities`."""
    settings, processor, info = serving.settings, serving.async_llm.input_processor, serving.info
    config, pooler = processor.generation_config, serving.async_llm.pooler
    return {
        "object": "capabilities",
        "version": VERSION,
        "models": list(serving.model_names),
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
            "dtype": info.dtype,
            "quantization": info.quantization,
            "product_inputs": f"rounded to {info.input_rounding}" if info.input_rounding else info.dtype,
            "kv_cache_dtype": info.kv_cache_dtype,
        },
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


def endpoints(document: dict[str, Any]) -> dict[str, Any]:
    """Path to methods, and for those with a body its parameters and what is refused by name."""
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
            for name, parameter in known.items():  # of two forms of a body, one is enough
                if parameter["required"] and not all(name in other for other in each):
                    known[name] = parameter | {"required": False, "default": None}
            entry["refused"] = {name: list(values) for name, values in NEUTRAL_VALUES.items() if name not in known}
        found[path] = entry
    return found


def body_schemas(operation: dict[str, Any]) -> list[str]:
    """The names of the schemas that an operation's body may have."""
    content = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    schema = content.get("schema", {})
    return [ref["$ref"].rsplit("/", 1)[1] for ref in schema.get("anyOf", [schema]) if "$ref" in ref]


def parameters(schemas: dict[str, Any], name: str) -> dict[str, Any]:
    """Every parameter of one request schema: type, range, default, and what it does."""
    schema = schemas[name]
    required = schema.get("required", [])
    return {
        field: _parameter(schemas, described, field in required) for field, described in schema["properties"].items()
    }


def _parameter(schemas: dict[str, Any], described: dict[str, Any], is_required: bool) -> dict[str, Any]:
    forms = [form for form in described.get("anyOf", [described]) if form.get("type") != "null"]
    found: dict[str, Any] = {"required": is_required, "nullable": len(forms) < len(described.get("anyOf", [described]))}
    if not is_required:
        found["default"] = described.get("default")
    if "description" in described:
        found["does"] = described["description"]
    if described.get("x-effect") == "none":
        found["effect"] = "none"
    shapes = [_shape(schemas, form) for form in forms]
    flat = [shape for nested in shapes for shape in nested]
    return {**found, **flat[0]} if len(flat) == 1 else {**found, "forms": flat}


def _shape(schemas: dict[str, Any], form: dict[str, Any]) -> list[dict[str, Any]]:
    """One form of a value, or several if it is a choice of forms."""
    if "oneOf" in form or "anyOf" in form:
        return [shape for inner in form.get("oneOf", form.get("anyOf")) for shape in _shape(schemas, inner)]
    if "$ref" in form:
        name = form["$ref"].rsplit("/", 1)[1]
        return [{"type": "object", "parameters": parameters(schemas, name)}]
    shape: dict[str, Any] = {"type": form.get("type", "any")}
    shape |= {name: form[keyword] for keyword, name in _LIMITS.items() if keyword in form}
    if isinstance(form.get("items"), dict):
        inner = form["items"]
        shape["items"] = {"type": "object"} if "$ref" in inner else _shape(schemas, inner)[0]
    return [shape]
