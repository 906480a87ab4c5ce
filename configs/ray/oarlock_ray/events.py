"""Server-sent events as bytes: whole ones only, so that an error can always follow; and errors in OpenAI's shape."""

from __future__ import annotations

import json

_END = b"\n\n"
DONE = b"data: [DONE]\n\n"


class WholeEvents:
    """Cuts a stream of bytes where events end. The bytes that come out are those that went in."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """The events that are complete with `piece`; the beginning of the next one is kept."""
        self._rest += piece
        end = self._rest.rfind(_END)
        if end < 0:
            return b""
        whole, self._rest = self._rest[: end + len(_END)], self._rest[end + len(_END) :]
        return whole

    def rest(self) -> bytes:
        """Bytes after the last event, when the stream has ended as it should."""
        return self._rest


def error_body(message: str, code: str, kind: str = "server_error") -> bytes:
    """The body of an error. `kind`: OpenAI's `type`."""
    return json.dumps({"error": {"message": message, "type": kind, "param": None, "code": code}}).encode()


def error_event(message: str, code: str) -> bytes:
    """The last events of a stream that broke off."""
    return b"data: " + error_body(message, code) + _END + DONE
