"""One streamed answer: the request is sent, its chunks are read, and what they say goes to its display."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

from oarlock.server.cli.remote import Remote, ServerError

_PATH = "/v1/chat/completions"


class Listener(Protocol):
    """Gets the pieces of an answer in their order."""

    def thought(self, text: str) -> None: ...

    def said(self, text: str) -> None: ...


@dataclass(slots=True)
class Answer:
    """Answer to one request, whole or not."""

    request_id: str = ""
    text: str = ""
    tools: list[str] = field(default_factory=list)  # names of the calls that it asks for
    finish_reason: str | None = None
    is_stopped: bool = False  # by Ctrl-C
    began: float = field(default_factory=time.perf_counter)
    first_at: float | None = None
    last_at: float | None = None
    chunks: int = 0
    usage: dict[str, Any] | None = None

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_at is None else self.first_at - self.began

    @property
    def output_tokens(self) -> int:
        """Number of answer tokens as the server counts them; of an answer that was stopped, its chunks."""
        return self.chunks if self.usage is None else int(self.usage.get("completion_tokens") or 0)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens per second after the first token; None where it cannot be told."""
        if self.first_at is None or self.last_at is None or self.last_at <= self.first_at or self.output_tokens < 2:
            return None
        return (self.output_tokens - 1) / (self.last_at - self.first_at)


class _Reader:
    """Feeds an `Answer` from the bytes of a stream of server-sent events."""

    def __init__(self, answer: Answer, listener: Listener) -> None:
        self._answer = answer
        self._listener = listener
        self._rest = b""
        self.error: str | None = None

    def feed(self, now: float, piece: bytes) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            data = line[5:].strip() if line.startswith(b"data:") else b""
            if data and data != b"[DONE]":
                try:
                    self._chunk(now, json.loads(data))
                except (ValueError, TypeError, KeyError, AttributeError, IndexError):
                    self.error = self.error or f"a chunk is not OpenAI's: {data[:200].decode('utf-8', 'replace')}"

    def _chunk(self, now: float, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = self.error or str(chunk["error"].get("message") or chunk["error"])
            return
        answer = self._answer
        answer.request_id = chunk.get("id") or answer.request_id
        answer.usage = chunk.get("usage") or answer.usage
        for choice in chunk["choices"][:1]:
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            said = delta.get("content")
            answer.tools += [call["function"]["name"] for call in delta.get("tool_calls") or () if _begins(call)]
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            if thought or said:
                answer.chunks += 1
                answer.first_at, answer.last_at = answer.first_at or now, now
            if thought:
                self._listener.thought(thought)
            if said:
                answer.text += said
                self._listener.said(said)


def _begins(call: dict[str, Any]) -> bool:
    return bool((call.get("function") or {}).get("name"))


async def ask(remote: Remote, fields: dict[str, Any], listener: Listener, answer: Answer) -> None:
    """Fill `answer`. A cancelled one is whole as far as it came, and marked. Raises `ServerError`.

    `fields`: model, messages and sampling of the request.
    """
    reader = _Reader(answer, listener)
    body = {**fields, "stream": True, "stream_options": {"include_usage": True}}
    try:
        await remote.stream(_PATH, body, reader.feed)
    except asyncio.CancelledError:  # Ctrl-C: the connection is closed by now, and the server stops computing
        answer.is_stopped = True
        return
    if reader.error is not None:
        raise ServerError(f"The answer broke off: {reader.error}", 500)
    if answer.finish_reason is None:
        raise ServerError("The answer broke off: its stream ended without a reason.", 500)
