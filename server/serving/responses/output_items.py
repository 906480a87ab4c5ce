"""An answer as output items, and the events of a stream that shows them grow: one machine for both.

An item is a dictionary of the wire: thoughts (`reasoning`), text (`message`) or a call (`function_call`), each added,
filled and done before the next begins.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from oarlock.server.chat.events import ContentDelta, MessageEvent, ReasoningDelta, ToolCallStart
from oarlock.server.protocol.responses.items import sealed

Event = tuple[str, dict[str, Any]]  # type, and the members beside type and sequence number


class OutputItems:
    """The items of one answer as it grows."""

    def __init__(self, *, with_encrypted: bool) -> None:
        """`with_encrypted`: thoughts are there once more, for clients that send them back."""
        self.items: list[dict[str, Any]] = []  # done, and the open one
        self._with_encrypted = with_encrypted
        self._open = ""  # the type of the open item
        self._texts: list[str] = []  # of the open item
        self._logprobs: list[dict[str, Any]] = []
        self._blank = ""  # white space that is text only if text follows, or if nothing else comes

    def push(self, events: Iterable[MessageEvent], logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        """What a piece of the answer adds. `logprobs`: of its tokens, where the answer is plain text."""
        for event in events:
            if isinstance(event, ContentDelta):
                if self._open != "message" and not event.text.strip() and not logprobs:
                    self._blank += event.text
                    continue
                yield from self._begin("message")
                text, self._blank = self._blank + event.text, ""
                yield from self._grow(text, logprobs)
            elif isinstance(event, ReasoningDelta):
                yield from self._begin("reasoning")
                yield from self._grow(event.text)
            elif isinstance(event, ToolCallStart):
                self._blank = ""
                yield from self._done("completed")
                yield from self._begin("function_call", {"name": event.name})
            else:
                yield from self._grow(event.text)

    def end(self, status: str) -> Iterator[Event]:
        """Close the open item with this status. An answer of white space alone, or of nothing, is a message."""
        if not self.items:
            yield from self._begin("message")
            if self._blank:
                yield from self._grow(self._blank)
        yield from self._done(status)

    @property
    def _at(self) -> dict[str, Any]:
        """The members that every event of the open item's content has."""
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _begin(self, kind: str, members: dict[str, Any] | None = None) -> Iterator[Event]:
        if self._open == kind and kind != "function_call":
            return
        yield from self._done("completed")
        self._open, self._texts, self._logprobs = kind, [], []
        if kind == "message":
            item = {"id": _new_id("msg"), "type": kind, "status": "in_progress", "role": "assistant", "content": []}
        elif kind == "reasoning":
            item = {"id": _new_id("rs"), "type": kind, "status": "in_progress", "summary": [], "content": []}
        else:
            item = {"id": _new_id("fc"), "type": kind, "status": "in_progress", "call_id": _new_id("call")}
            item |= {**(members or {}), "arguments": ""}
        self.items.append(item)
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": dict(item)}
        if kind != "function_call":
            yield "response.content_part.added", {**self._at, "content_index": 0, "part": self._part()}

    def _grow(self, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> Iterator[Event]:
        self._texts.append(text)
        self._logprobs += logprobs
        if self._open == "message":
            members = {"content_index": 0, "delta": text, "logprobs": list(logprobs)}
            yield "response.output_text.delta", {**self._at, **members}
        elif self._open == "reasoning":
            yield "response.reasoning_text.delta", {**self._at, "content_index": 0, "delta": text}
        else:
            yield "response.function_call_arguments.delta", {**self._at, "delta": text}

    def _done(self, status: str) -> Iterator[Event]:
        if not self._open:
            return
        item, text = self.items[-1], "".join(self._texts)
        if self._open == "function_call":
            item["arguments"] = text
            done = {"name": item["name"], "arguments": text}
            yield "response.function_call_arguments.done", {**self._at, **done}
        else:
            part = self._part(text)
            item["content"] = [part]
            if self._open == "message":
                done = {"text": text, "logprobs": self._logprobs}
                yield "response.output_text.done", {**self._at, "content_index": 0, **done}
            else:
                yield "response.reasoning_text.done", {**self._at, "content_index": 0, "text": text}
                if self._with_encrypted:
                    item["encrypted_content"] = sealed(text)
            yield "response.content_part.done", {**self._at, "content_index": 0, "part": part}
        item["status"] = status
        yield "response.output_item.done", {"output_index": len(self.items) - 1, "item": dict(item)}
        self._open = ""

    def _part(self, text: str = "") -> dict[str, Any]:
        if self._open == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(self._logprobs)}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(12)}"
