"""`GET /v1/capabilities`: every endpoint, parameter, range, default and limit that this server honours.

Read from the OpenAPI document, which is made from the request schemas.
"""

from typing import Any

from oarlock.server.endpoints.pooling.schema import MAX_INPUTS
from oarlock.server.endpoints.serving import OpenAIServing
from oarlock.server.http.docs_page import body_schemas, parameters
from oarlock.server.http.request_body import NEUTRAL_VALUES
from oarlock.server.strict_model import MAX_CHOICES, MAX_PROMPTS, MAX_SEQUENCES
from oarlock.server.version import VERSION


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
