"""The OpenAPI document: request bodies, response schemas, and an example of each.

Request schemas are made from the wire types that check requests.
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
from oarlock.server.http.response_schemas import BATCH_SCHEMAS, SCHEMAS

_REF = "#/components/schemas/"
_ABOUT = (
    "OpenAI's wire format over a tensor-parallel engine. Every error has one shape: `Error`; on the routes of messages "
    "`MessageError`, as Anthropic's clients read it."
)
# Errors that any route may answer with.
_ERRORS = {
    "400": "The request is wrong; `param` names the field.",
    "401": "No API key, or a wrong one.",
    "403": "The Host header is not a name of this server, a web page of an origin that is not allowed asks, or the "
    "admin key is missing on a route that wants it.",
    "404": "There is no such route or model.",
    "408": "The time limit passed before anything was generated, or the body came too slowly.",
    "413": "The body is too large.",
    "415": "The body is not JSON.",
    "429": "The queue is full; see Retry-After.",
    "500": "An internal error of the server.",
    "503": "The server is loading, draining, dead, or out of connections; see Retry-After.",
}


def describe(
    summary: str,
    answer: str,
    *,
    bodies: tuple[str, ...] = (),
    examples: dict[str, Any] | None = None,
    media: str = "application/json",
    example_answer: Any = None,
    streams: bool = False,
    status: int = 200,
    query: tuple[str, ...] = (),
    any_query: bool = False,
) -> dict[str, Any]:
    """Describes a route: what it adds to its OpenAPI operation.

    `answer` and `bodies` are names of schemas, `query` of parameters.

    `any_query`: the answer is the same whatever stands behind the path, as links, caches and load balancers put there.
    """
    content: dict[str, Any] = {media: {"schema": {"$ref": _REF + answer} if answer else {"type": "string"}}}
    if example_answer is not None:
        content[media]["example"] = example_answer
    if streams:
        content["text/event-stream"] = {"schema": {"description": "One chunk per event, `[DONE]` last."}}
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {str(status): {"description": "The answer.", "content": content}},
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


# Documents by the identities of their routers, which are constants: an application in the same process finds its own.
_DOCUMENTS: dict[tuple[int, ...], dict[str, Any]] = {}


def build(app: FastAPI, routers: tuple[APIRouter, ...]) -> dict[str, Any]:
    """The whole document, OpenAPI 3.1, of an application with these routers."""
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
    answers = SCHEMAS | (BATCH_SCHEMAS if has_batches else {})
    wanted: list[tuple[type[BaseModel], JsonSchemaMode]] = [(body, "validation") for body in bodies]
    _, definitions = models_json_schema(wanted, ref_template=_REF + "{model}")
    components = document.setdefault("components", {})
    components["schemas"] = definitions["$defs"] | answers
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    document["security"] = [{}, {"key": []}]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            _finish(path, method, operation)
    return document


def with_defaults(document: dict[str, Any], defaults: Mapping[str, float]) -> dict[str, Any]:
    """Write these defaults into the document's schemas of generating requests, and return it."""
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
