"""Routes of OpenAI's API and of others that clients try, which are not served: the error says what is."""

from __future__ import annotations

from oarlock.server.errors import HttpError

_SERVED = "/v1/completions, /v1/chat/completions, /v1/responses, /v1/messages and /v1/embeddings"
_BATCHES = ("batches", "files")  # served with an option
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
    """The error (404) for a path that is known and not served; None: it is not known."""
    if not path.startswith("/v1/"):
        return None
    family = path.removeprefix("/v1/").split("/")[0]
    if family in _BATCHES:
        message = f"{path} is not served here: start the server with --batch-dir DIR for /v1/files and /v1/batches."
    elif family in _NOT_SERVED:
        message = f"{path} is not served here: this server answers {_SERVED}."
    else:
        return None
    return HttpError(404, message, code="route_not_supported")
