"""Errors of the framework itself, for unknown paths and wrong methods, in the format of all errors.

A client that is set up for another server, or with an address that lacks /v1, finds the right address in the error.
"""

import difflib
from collections.abc import Iterable, Mapping

from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from oarlock.server.errors import HttpError, error_response

# Paths of Ollama, llama.cpp's server, TGI, SGLang and older APIs, each with the route that does the same here.
_ELSEWHERE = {
    "/api/generate": "/v1/completions",
    "/api/chat": "/v1/chat/completions",
    "/api/embed": "/v1/embeddings",
    "/api/embeddings": "/v1/embeddings",
    "/api/tags": "/v1/models",
    "/api/ps": "/v1/models",
    "/api/show": "/v1/models",
    "/api/version": "/version",
    "/completion": "/v1/completions",
    "/embedding": "/v1/embeddings",
    "/embed": "/v1/embeddings",
    "/props": "/v1/state",
    "/slots": "/v1/state",
    "/generate": "/v1/completions",
    "/generate_stream": "/v1/completions",
    "/get_model_info": "/v1/models",
    "/info": "/v1/models",
    "/chat": "/v1/chat/completions",
    "/complete": "/v1/messages",
    "/reranking": "/v1/rerank",
    "/healthz": "/health",
    "/ping": "/health",
}
_BEFORE = frozenset({"", "api", "openai", "v1"})  # first parts of paths on other servers
_SIMILAR = 0.75  # least similarity of two paths, as difflib measures it
_MOST_SHOWN = 200  # characters of a path


class FrameworkErrors:
    """Handler of the framework's exceptions. It knows the routes of one application."""

    def __init__(self, routers: Iterable[APIRouter], root_path: str) -> None:
        """Collect the routes. `root_path`: the path below which a proxy shows the server, or an empty string."""
        routes = [route for router in routers for route in router.routes if isinstance(route, APIRoute)]
        fixed = [route for route in routes if "{" not in route.path]
        self._methods: Mapping[str, set[str]] = {route.path: route.methods or set() for route in fixed}
        self._root_path = root_path

    async def __call__(self, request: Request, error: Exception) -> Response:
        """Return the response to a request that the framework refused."""
        assert isinstance(error, HTTPException)
        path = request.url.path[:_MOST_SHOWN]
        if error.status_code == 404:
            return error_response(not_served(path) or self._unknown(request.method, path), request.scope)
        if error.status_code == 405:
            allowed = (error.headers or {}).get("Allow", "")
            message = f"{path} does not support {request.method}. Send {allowed.replace(', ', ' or ')}."
            headers = {"Allow": "GET, HEAD" if allowed == "GET" else allowed}
            return error_response(HttpError(405, message, code="method_not_allowed", headers=headers), request.scope)
        return error_response(HttpError(error.status_code, str(error.detail), headers=error.headers), request.scope)

    def _unknown(self, method: str, path: str) -> HttpError:
        meant, question = self.nearest(path), ""
        if meant is not None:
            methods = self._methods[meant]
            question = f" Did you mean {method if method in methods else min(methods)} {self._root_path}{meant}?"
        message = f"The route {method} {path} does not exist.{question} GET /docs lists all routes."
        return HttpError(404, message, code="route_not_found")

    def nearest(self, path: str) -> str | None:
        """Return the route that a client probably meant by this path, or None."""
        parts = [part for part in path.lower().split("/") if part]
        core = list(parts)
        while core and core[0] in _BEFORE:
            del core[0]
        whole, short = "/" + "/".join(parts), "/" + "/".join(core)
        elsewhere = (_ELSEWHERE.get(name) for name in (whole, short))
        for found in (whole, *elsewhere, f"/v1{short}", short):
            if found in self._methods and found != "/":
                return found
        # The address may have more parts before the route, such as Azure's /openai/deployments/NAME/chat/completions.
        ends = [route for route in self._methods if core and whole.endswith(route.removeprefix("/v1")) and route != "/"]
        if ends:
            return max(ends, key=len)
        return next(iter(difflib.get_close_matches(f"/v1{short}", self._methods, 1, _SIMILAR)), None)


_SERVED = "/v1/completions, /v1/chat/completions, /v1/responses, /v1/messages and /v1/embeddings"
_BATCHES = ("batches", "files")  # served only with --batch-dir
_NOT_SERVED = (
    "assistants",
    "audio",
    "chatkit",
    "containers",
    "conversations",
    "evals",
    "fine_tuning",
    "images",
    "moderations",
    "organization",
    "realtime",
    "skills",
    "threads",
    "uploads",
    "vector_stores",
    "videos",
)


def not_served(path: str) -> HttpError | None:
    """Return the error (404) for a path of OpenAI's API that is not served, or None for any other path."""
    if not path.startswith("/v1/"):
        return None
    family = path.removeprefix("/v1/").split("/")[0]
    if family in _BATCHES:
        message = f"{path} is not enabled: start the server with --batch-dir DIR for /v1/files and /v1/batches."
    elif family in _NOT_SERVED:
        message = f"{path} is not supported. This server supports {_SERVED}."
    else:
        return None
    return HttpError(404, message, code="route_not_supported")
