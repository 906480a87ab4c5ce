"""Reads a stream of server-sent events with OpenAI's chunks: when each came, and how the answer ended."""

from __future__ import annotations

import json
from typing import Any

_SAID = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


class EventReader:
    """Feed it the body as it arrives.

    Every chunk with a choice counts, as in vLLM's client, also one with an empty text. Of a chat, the chunk that only
    says whose turn it is does not: some servers send it before anything is computed.
    """

    def __init__(self, *, is_chat: bool, keep_text: bool = False) -> None:
        self._is_chat = is_chat
        self._keep_text = keep_text
        self._rest = b""
        self.times: list[float] = []  # of the chunks, by time.perf_counter()
        self.texts: list[str] = []
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.error: str | None = None
        self.malformed: str | None = None
        self.is_complete = False  # a finish reason or [DONE] has come

    def feed(self, now: float, piece: bytes) -> None:
        """A piece of the body that arrived at `now`. An event is timed by its last byte."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):  # else a comment, an empty line or another field of the event
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
            if not ended and not any(delta.get(name) for name in _SAID):
                return
            text = delta.get("content")
        else:
            text = choice["text"]
        self.times.append(now)
        if self._keep_text and text:
            self.texts.append(text)
