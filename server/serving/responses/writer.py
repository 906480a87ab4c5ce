"""Responses and their streams on the wire: `response` objects, and numbered events that end with one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from oarlock.server.chat.message_parser import AnswerShape, MessageParser
from oarlock.server.errors import HttpError, error_object
from oarlock.server.json_text import dumps
from oarlock.server.llm.generation import Generation
from oarlock.server.llm.output_processor import ABORT, TIMEOUT, Delta
from oarlock.server.llm.prompt_scores import TokenScore
from oarlock.server.serving.response_writer import AnswerWriter
from oarlock.server.serving.responses.output_items import Event, OutputItems

# Reasons of an end -> status of the response, and why it is not complete.
_ENDS = {
    "length": ("incomplete", "max_output_tokens"),
    TIMEOUT: ("incomplete", "timeout"),
    ABORT: ("cancelled", None),
}


class ResponsesWriter(AnswerWriter):
    """One response, whole or as events."""

    def __init__(
        self,
        fields: dict[str, Any],
        generation: Generation,
        shape: AnswerShape,
        entry: Callable[[TokenScore], dict[str, Any]] | None,
        on_end: Callable[[dict[str, Any]], None],
        *,
        with_encrypted: bool,
    ) -> None:
        """`fields`: the members of the response that the request decides. `entry`: a token's logprob on the wire; None:
        there are none. `on_end` gets the response when it is complete."""
        self._fields = fields
        self._generation = generation
        self._parser = MessageParser(shape, in_items=True)
        self._entry = entry
        self._on_end = on_end
        self._output = OutputItems(with_encrypted=with_encrypted)
        self._number = 0  # of the next event
        self._finish_reason: str | None = None

    @property
    def response_id(self) -> str:
        return self._fields["id"]

    def opening(self, num_choices: int) -> Iterable[bytes]:
        response = self.response("in_progress")
        return [self._event(f"response.{kind}", {"response": response}) for kind in ("created", "in_progress")]

    def chunk(self, delta: Delta) -> bytes | None:
        return b"".join(self._event(*event) for event in self._push(delta)) or None

    def closing(self, generation: Generation) -> Iterable[bytes]:
        for event in self._end_items():
            yield self._event(*event)
        response = self._ended()
        kind = "completed" if response["status"] == "completed" else "incomplete"
        yield self._event(f"response.{kind}", {"response": response})

    def failure(self, error: HttpError) -> bytes:
        """The items so far stay as they are."""
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        if 400 <= error.status < 500 and error.status != 429:
            code = "invalid_prompt"
        response = self.response("failed") | {"error": {"code": code, "message": error_object(error)["message"]}}
        return self._event("response.failed", {"response": response})

    def whole(self, deltas: Sequence[Sequence[Delta]], generation: Generation) -> Iterator[str]:
        for delta in deltas[0]:
            for _ in self._push(delta):
                pass
        for _ in self._end_items():
            pass
        return iter((dumps(self._ended()),))

    def abort(self) -> bool:
        """End what is still generated. False when nothing was."""
        return self._generation.abort()

    def response(self, status: str) -> dict[str, Any]:
        """The response as it is now."""
        ended = status != "in_progress"
        return self._fields | {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": None,
            "incomplete_details": None,
            "output": [dict(item) for item in self._output.items],
            "usage": self._usage() if ended else None,
        }

    def _push(self, delta: Delta) -> Iterator[Event]:
        logprobs = [] if self._entry is None else [self._entry(score) for score in delta.scores]
        self._finish_reason = self._parser.finish_reason(delta) or self._finish_reason
        yield from self._output.push(self._parser.push(delta), logprobs)

    def _end_items(self) -> Iterator[Event]:
        return self._output.end("incomplete" if self._finish_reason in _ENDS else "completed")

    def _ended(self) -> dict[str, Any]:
        status, why = _ENDS.get(self._finish_reason or "", ("completed", None))
        response = self.response(status)
        if why is not None:
            response["incomplete_details"] = {"reason": why}
        self._on_end(response)
        return response

    def _usage(self) -> dict[str, Any]:
        prompt, completion = self._generation.prompt_tokens, self._generation.completion_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": self._generation.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self._parser.reasoning_tokens},
            "total_tokens": prompt + completion,
        }

    def _event(self, kind: str, members: dict[str, Any]) -> bytes:
        written = dumps({"type": kind, "sequence_number": self._number, **members})
        self._number += 1
        return f"event: {kind}\ndata: {written}\n\n".encode()
