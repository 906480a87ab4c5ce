"""A layer of Ray's HTTP proxy: each request says how its prompt begins, in a header that the request router reads.

Ray's routers see the headers of a request and never its body. So the body is read here, up to a bound, and the text of
its prompt becomes a chain of hashes, one for each block of characters: two prompts with equal hashes up to some block
begin with equal text up to its end. Knows nothing of Ray and of replicas.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Where Ray's proxy looks for the session of a request, unless RAY_SERVE_SESSION_ID_HEADER_KEY names another header.
HEADER = b"x-session-id"
BLOCK_CHARACTERS = 128
MAX_BLOCKS = 128  # what differs after so much text is told apart by nobody: 16,384 characters
MAX_BODY_BYTES = 1 << 20  # a larger body is passed on as it comes, without a chain
_HASH_BYTES = 6
# What a prompt is made of, in the order in which templates put it there.
_FIELDS = ("model", "tools", "system", "instructions", "prompt", "messages", "input")


def chain_of(body: bytes) -> list[str]:
    """A hash for each whole block of the prompt's text, covering all blocks before it too; none without a prompt."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):  # the server answers it with an error
        return []
    if not isinstance(request, dict) or not request.keys() & {"prompt", "messages", "input"}:
        return []
    text = "".join(_text(request[name]) for name in _FIELDS if name in request)
    hashes: list[str] = []
    last = b""
    for start in range(0, min(len(text) // BLOCK_CHARACTERS, MAX_BLOCKS) * BLOCK_CHARACTERS, BLOCK_CHARACTERS):
        block = text[start : start + BLOCK_CHARACTERS].encode("utf-8", "surrogatepass")
        last = hashlib.blake2b(last + block, digest_size=_HASH_BYTES).digest()
        hashes.append(last.hex())
    return hashes


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class PromptPrefix:
    """Adds the chain of a request's prompt to its headers. A client's own header of that name is taken away."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        messages, body = await _read(receive)
        chain = chain_of(body) if body is not None else []
        headers = [pair for pair in scope["headers"] if pair[0].lower() != HEADER]
        if chain:
            headers.append((HEADER, ",".join(chain).encode()))
        await self._app({**scope, "headers": headers}, _replayed(messages, receive), send)


async def _read(receive: Receive) -> tuple[list[Message], bytes | None]:
    """Messages up to the end of the body or its bound, and the body if it is whole."""
    messages: list[Message] = []
    size = 0
    while size <= MAX_BODY_BYTES:
        message = await receive()
        messages.append(message)
        if message["type"] != "http.request":
            return messages, None
        size += len(message.get("body", b""))
        if not message.get("more_body", False):
            return messages, b"".join(one.get("body", b"") for one in messages)
    return messages, None


def _replayed(messages: list[Message], receive: Receive) -> Callable[[], Awaitable[Message]]:
    """Returns the messages that were read, then those that come."""
    waiting = iter(messages)

    async def next_message() -> Message:
        for message in waiting:
            return message
        return await receive()

    return next_message
