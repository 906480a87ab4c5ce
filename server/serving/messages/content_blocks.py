"""An answer as content blocks, and the events of a stream that shows them grow: one machine for both.

A block is a dictionary of the wire: `thinking`, `text` or `tool_use`, each started, filled and stopped before the next.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic_core import from_json

from oarlock.server.chat.events import ContentDelta, MessageEvent, ReasoningDelta, ToolCallStart

Event = tuple[str, dict[str, Any]]  # type, and the other members
# Clients hand a thought back with what stands here. Nothing is checked then: thoughts are text that they can see.
SIGNATURE = "oarlock"


class ContentBlocks:
    """The blocks of one answer as it grows."""

    def __init__(self, *, shows_thoughts: bool) -> None:
        """`shows_thoughts`: else blocks of thoughts are empty."""
        self.blocks: list[dict[str, Any]] = []  # stopped, and the open one
        self._shows_thoughts = shows_thoughts
        self._open = ""  # the type of the open block
        self._texts: list[str] = []  # of the open block
        self._blank = ""  # white space that is text only if text follows, or if nothing else comes

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self.blocks)

    def push(self, events: Iterable[MessageEvent]) -> Iterator[Event]:
        """What a piece of the answer adds."""
        for event in events:
            if isinstance(event, ContentDelta):
                if self._open != "text" and not event.text.strip():
                    self._blank += event.text
                    continue
                yield from self._begin("text", {"text": ""})
                text, self._blank = self._blank + event.text, ""
                yield from self._grow(text, {"type": "text_delta", "text": text})
            elif isinstance(event, ReasoningDelta):
                yield from self._begin("thinking", {"thinking": "", "signature": ""})
                if self._shows_thoughts:
                    yield from self._grow(event.text, {"type": "thinking_delta", "thinking": event.text})
            elif isinstance(event, ToolCallStart):
                self._blank = ""
                yield from self._stop()
                called = {"id": f"toolu_{secrets.token_hex(12)}", "name": event.name, "input": {}}
                yield from self._begin("tool_use", called)
            else:
                yield from self._grow(event.text, {"type": "input_json_delta", "partial_json": event.text})

    def end(self) -> Iterator[Event]:
        """Stop the open block. An answer of white space alone is text; of nothing, no block."""
        if not self.blocks and self._blank:
            yield from self._begin("text", {"text": ""})
            yield from self._grow(self._blank, {"type": "text_delta", "text": self._blank})
        yield from self._stop()

    @property
    def _index(self) -> int:
        return len(self.blocks) - 1

    def _begin(self, kind: str, members: dict[str, Any]) -> Iterator[Event]:
        if self._open == kind and kind != "tool_use":
            return
        yield from self._stop()
        self._open, self._texts = kind, []
        self.blocks.append({"type": kind, **members})
        yield "content_block_start", {"index": self._index, "content_block": dict(self.blocks[-1])}

    def _grow(self, text: str, delta: dict[str, Any]) -> Iterator[Event]:
        self._texts.append(text)
        yield "content_block_delta", {"index": self._index, "delta": delta}

    def _stop(self) -> Iterator[Event]:
        if not self._open:
            return
        block, text = self.blocks[-1], "".join(self._texts)
        if self._open == "tool_use":
            block["input"] = _object(text)
        else:
            block[self._open] = text
        if self._open == "thinking":
            block["signature"] = SIGNATURE
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            yield "content_block_delta", {"index": self._index, "delta": delta}
        yield "content_block_stop", {"index": self._index}
        self._open = ""


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call; of one that was cut short or written wrongly, what of it can be read."""
    try:
        value = from_json(text, allow_partial=True) if text.strip() else {}
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
