"""Which routes take a body, one good body for each, and bodies with fragments that no encoder would write.

Routes and the names of their fields come from the server's own OpenAPI document, so a new one is fuzzed at once or
makes the run fail for want of a good body.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

MESSAGE = {"role": "user", "content": "Hello"}
_COMPLETION: dict[str, Any] = {"prompt": "import ", "max_tokens": 4}
_CHAT: dict[str, Any] = {"messages": [MESSAGE], "max_completion_tokens": 4}
_RESPONSE: dict[str, Any] = {"input": [MESSAGE], "max_output_tokens": 4}
_MESSAGES: dict[str, Any] = {"messages": [MESSAGE], "max_tokens": 4}
_RERANK: dict[str, Any] = {"query": "What is blue?", "documents": ["The sea is blue", "Grass is green"]}
_GOOD: dict[str, dict[str, Any]] = {
    "/completions": _COMPLETION,
    "/completions/render": _COMPLETION,
    "/chat/completions": _CHAT,
    "/chat/completions/render": _CHAT,
    "/responses": _RESPONSE,
    "/responses/input_tokens": _RESPONSE,
    "/responses/compact": {"input": [MESSAGE]},
    "/messages": _MESSAGES,
    "/messages/count_tokens": {"messages": [MESSAGE]},
    "/embeddings": {"input": ["import os", "def add(a, b):"]},
    "/pooling": {"input": "import os"},
    "/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/score": {"text_1": "What is blue?", "text_2": ["The sea is blue", "Grass is green"]},
    "/tokenize": {"prompt": "import os"},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/admin/abort": {"all": True},
    "/load_lora_adapter": {"lora_name": "sql", "lora_path": "sql"},
    "/unload_lora_adapter": {"lora_name": "sql"},
    "/batches": {"input_file_id": "file-0", "endpoint": "/v1/completions", "completion_window": "24h"},
}


class Raw(str):
    """JSON text that goes into a body as it is: `NaN`, a number of 5,000 digits, an unpaired surrogate."""


@dataclass(frozen=True)
class Route:
    """One POST route."""

    path: str
    good: dict[str, Any]
    fields: frozenset[str]  # that it documents
    streams: bool


def routes_of(document: dict[str, Any]) -> list[Route]:
    """Every POST route of an OpenAPI document, but for those that read no JSON."""
    found = []
    for path, operations in document["paths"].items():
        if "application/json" not in operations.get("post", {}).get("requestBody", {}).get("content", {}):
            continue
        good = _GOOD.get(path.removeprefix("/v1"))
        if good is None:
            raise LookupError(f"no good body is known for POST {path}: add one to tests/fuzz/bodies.py")
        fields = _fields(document, operations["post"])
        answers = operations["post"]["responses"]["200"]["content"]
        found.append(Route(path, good, fields, "text/event-stream" in answers))
    return found


def _fields(document: dict[str, Any], operation: dict[str, Any]) -> frozenset[str]:
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    names: set[str] = set()
    for one in schema.get("anyOf", [schema]):
        named = document["components"]["schemas"][one["$ref"].rsplit("/", 1)[1]]
        names |= set(named["properties"])
    return frozenset(names)


def encode(body: dict[str, Any]) -> bytes:
    """A JSON object; values that are `Raw` go in as they are."""
    parts = (
        f"{json.dumps(name)}: {value if isinstance(value, Raw) else json.dumps(value)}" for name, value in body.items()
    )
    return ("{" + ", ".join(parts) + "}").encode("utf-8", "surrogatepass")
