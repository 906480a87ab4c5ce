"""The access log: one line for each HTTP answer. Never a query, a body or a key."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from server.observability.logs import event, logger

_log = logger("access")


class AccessLog:
    """Writes the lines."""

    def __init__(self, frequent: Collection[str]) -> None:
        """`frequent`: paths that machines ask every few seconds. Where they are answered well, there is no line."""
        self._frequent = frozenset(frequent)

    def write(self, scope: Any, request_id: str, status: int, num_bytes: int, seconds: float) -> None:
        """One answer, complete or not, of so many bytes of body. `status` 0: its client left before it began."""
        path = scope["path"]
        if path in self._frequent and 200 <= status < 300:
            return
        client, key = scope.get("client"), scope["state"]["key"]
        line = event(
            "access",
            client=None if client is None else client[0],
            method=scope["method"],
            path=path[:200],
            status=status,
            bytes=num_bytes,
            seconds=seconds,
            request_id=request_id,
            key=None if key is None else key.label,
        )
        _log.info(line)
