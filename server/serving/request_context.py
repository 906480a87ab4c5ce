"""What the middleware has found out about a request: its id, and the API key it came with. Read from the ASGI scope."""

from __future__ import annotations

import hashlib
from typing import Any

from oarlock.server.config.api_keys import Key
from oarlock.server.serving.explain.records import RequestRecord


def request_id_of(scope: Any) -> str:
    """The id that answers carry as `X-Request-Id`."""
    return scope["state"]["request_id"]


def record_of(scope: Any) -> RequestRecord | None:
    """What is kept of a request to generate; None for all others."""
    return scope["state"].get("record")


def salt_of(scope: Any, salt: str | None) -> str | None:
    """What separates a request's prompt from others in the prefix cache: the request's own `salt`, and with API keys
    its key's too, so that response times reveal nothing about the prompts of other keys."""
    key: Key | None = scope["state"]["key"]
    return salted(None if key is None else key.salt, salt)


def salted(owner: str | None, salt: str | None) -> str | None:
    """`salt_of` for the salt of a key; None: there are no keys."""
    return salt if owner is None else f"{owner}|{salt or ''}"


def label_of(scope: Any) -> str | None:
    """The operator's label of the request's API key."""
    key: Key | None = scope["state"]["key"]
    return None if key is None else key.label


def client_of(scope: Any, user: str | None) -> str:
    """For the log: the label of the key, and a hash of the end user's name."""
    label = label_of(scope)
    parts = [] if label is None else [label]
    if user:
        parts.append("user:" + hashlib.blake2b(user.encode(), digest_size=6).hexdigest())
    return "/".join(parts)
