"""A small HTTP/1.1 client for measuring: connections are kept, and each piece of a body comes with its time of arrival.

Made for many streams on one core: bytes go from the event loop through llhttp (httptools) to a callback, without a task
or queue between them. It follows no redirect and uses no proxy.
"""

import asyncio
import json
import os
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httptools

OnBody = Callable[[float, bytes], None]  # called with time.perf_counter() and a piece of the body
_MAX_ERROR_BYTES = 65_536


class ConnectError(Exception):
    """The connection could not be opened."""


class BrokenError(Exception):
    """The connection ended before the response was complete."""


class NotHttpError(BrokenError):
    """The server sent bytes that are not HTTP."""


class StatusError(Exception):
    """The response is complete and its status is not 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status
        self.text = text


@dataclass(frozen=True, slots=True)
class Target:
    """Address of a server. `path` is prepended to every path, for servers with a prefix."""

    host: str
    port: int
    tls: bool
    path: str

    @classmethod
    def parse(cls, url: str) -> "Target":
        """Parse a URL such as `http://127.0.0.1:8000`, with or without `/v1` at its end. Raises `ValueError`."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError("it must begin with http:// or https:// and contain a host")
        if parts.query or parts.fragment or parts.username is not None:
            raise ValueError("it may contain only a host, a port and a path")
        tls = parts.scheme == "https"
        path = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, path)

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class HttpClient:
    """Client of one server, with a connection for each concurrent request."""

    def __init__(self, target: Target, api_key: str | None = None) -> None:
        self._target = target
        self._tls = ssl.create_default_context() if target.tls else None
        self._idle: list[_Connection] = []
        lines = [f"Host: {target.host_header}", "Accept: */*", "Content-Type: application/json"]
        if api_key:
            lines.append(f"Authorization: Bearer {api_key}")
        self._head = "\r\n".join(lines)

    async def post(self, path: str, body: bytes, on_body: OnBody) -> None:
        """Send `body`; returns when the response is complete. Raises this module's errors, or `TimeoutError`."""
        await self._exchange("POST", path, body, on_body)

    async def get(self, path: str) -> bytes:
        """Return the body of a path. Raises this module's errors."""
        pieces: list[bytes] = []
        await self._exchange("GET", path, b"", lambda at, piece: pieces.append(piece))
        return b"".join(pieces)

    async def get_json(self, path: str) -> Any:
        """Return the JSON of a path. Raises `ValueError` too."""
        return json.loads(await self.get(path))

    def close(self) -> None:
        """Close the connections that are not in use."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _exchange(self, method: str, path: str, body: bytes, on_body: OnBody) -> None:
        line = f"{method} {self._target.path}{path} HTTP/1.1\r\n{self._head}\r\nContent-Length: {len(body)}\r\n\r\n"
        message = line.encode("latin-1") + body
        while True:
            connection = self._idle.pop() if self._idle else None
            reused = connection is not None
            if connection is None:
                connection = await self._connect()
            try:
                await connection.exchange(message, on_body)
            except BrokenError:
                # A server may close an idle connection just as we write to it. Nothing was read, so the request is sent
                # again.
                if reused and not connection.has_answered:
                    continue
                raise
            finally:
                if connection.is_reusable:
                    self._idle.append(connection)
                else:
                    connection.close()
            return

    async def _connect(self) -> "_Connection":
        loop, target = asyncio.get_running_loop(), self._target
        try:
            _, connection = await loop.create_connection(_Connection, target.host, target.port, ssl=self._tls)
        except OSError as error:  # refused, unreachable, an unknown name, or a certificate that is not accepted
            is_plain = isinstance(error, ConnectionError) and error.errno  # asyncio's own message is too long to read
            raise ConnectError(os.strerror(error.errno or 0) if is_plain else str(error)) from None
        return connection


class _Connection(asyncio.Protocol):
    """One connection, with at most one request at a time."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._parser: Any = None
        self._done: asyncio.Future[None] | None = None
        self._on_body: OnBody | None = None
        self._status = 0
        self._error_text = b""
        self._now = 0.0
        self._ends_with_connection = True  # neither a length nor chunks mark the end of the body
        self._is_open = False
        self.has_answered = False
        self.is_reusable = False

    async def exchange(self, message: bytes, on_body: OnBody) -> None:
        """Write a request and wait for the end of its response."""
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._on_body = on_body
        self._status, self._error_text = 0, b""
        self._ends_with_connection = True
        self.has_answered = self.is_reusable = False
        if not self._is_open:
            raise BrokenError("the server closed the connection")
        self._transport.write(message)
        await self._done
        if self._status != 200:
            raise StatusError(self._status, self._error_text.decode("utf-8", "replace"))

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.abort()

    # ------------------------------------------------------------------ called by the event loop
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._is_open = transport, True

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._done is None or self._done.done():
            self.close()  # bytes that nobody asked for
            return
        self.has_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(NotHttpError(str(error)))

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_open = self.is_reusable = False
        if self._status and self._ends_with_connection and exc is None:
            self._finish()
        else:
            self._fail(BrokenError(f"the connection was lost: {exc}" if exc else "the server closed the connection"))

    # ------------------------------------------------------------------ called by the parser
    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        if self._status == 200 and self._on_body is not None:
            self._on_body(self._now, piece)
        elif len(self._error_text) < _MAX_ERROR_BYTES:
            self._error_text += piece

    def on_message_complete(self) -> None:
        self.is_reusable = self._parser.should_keep_alive() and not self._ends_with_connection
        self._finish()

    # ------------------------------------------------------------------ ends
    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)

    def _fail(self, error: BrokenError) -> None:
        self.is_reusable = False
        if self._done is not None and not self._done.done():
            self._done.set_exception(error)


_CONTENT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


class EventReader:
    """Reader of a stream's events. Feed it the body as it arrives.

    Every chunk with a choice counts, as in vLLM's client, also a chunk with an empty text. In a chat, a chunk that only
    has the role does not count: some servers send it before anything is computed.
    """

    def __init__(self, *, is_chat: bool, keep_text: bool = False) -> None:
        self._is_chat = is_chat
        self._keep_text = keep_text
        self._rest = b""
        self.times: list[float] = []  # arrival times of the chunks, by time.perf_counter()
        self.texts: list[str] = []
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.error: str | None = None
        self.malformed: str | None = None
        self.is_complete = False  # a finish reason or [DONE] has come

    def feed(self, now: float, piece: bytes) -> None:
        """Read a piece of the body that arrived at `now`. An event is timed by its last byte."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):  # others are comments, empty lines or other fields of the event
                self._data(now, line[5:].strip())

    def _data(self, now: float, data: bytes) -> None:
        if data == b"[DONE]":
            self.is_complete = True
            return
        try:
            self._chunk(now, json.loads(data))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError):
            self.malformed = self.malformed or data[:300].decode("utf-8", "replace")

    def _chunk(self, now: float, chunk: dict[str, Any]) -> None:
        if chunk.get("error") or chunk.get("object") == "error":
            self.error = self.error or json.dumps(chunk.get("error") or chunk, ensure_ascii=False)[:500]
            return
        choices = chunk.get("choices")
        if usage := chunk.get("usage"):
            self.prompt_tokens, self.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        elif choices is None:
            raise ValueError("neither choices nor usage")
        if not choices:
            return
        choice = choices[0]
        ended = choice.get("finish_reason") is not None
        self.is_complete = self.is_complete or ended
        if self._is_chat:
            delta = choice["delta"]
            if not ended and not any(delta.get(name) for name in _CONTENT_FIELDS):
                return
            text = delta.get("content")
        else:
            text = choice["text"]
        self.times.append(now)
        if self._keep_text and text:
            self.texts.append(text)
