"""The access log: one line for each HTTP answer, and one now and then of requests that a full queue refuses. Never a
query, a body or a key."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from oarlock.server.observability.logs import event, logger

_log = logger("access")
_queue_log = logger("http")
_REFUSALS_EVERY_S = 10.0


class AccessLog:
    """Writes one line for each HTTP answer."""

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


class RefusalLog:
    """Writes how many requests a full queue has refused: one line in ten seconds, since refusals must cost nothing."""

    def __init__(self) -> None:
        self._num = 0
        self._written_s = -_REFUSALS_EVERY_S

    def count(self, now: float) -> None:
        """One more. `now`: seconds on a clock that only goes forward."""
        self._num += 1
        if now - self._written_s >= _REFUSALS_EVERY_S:
            _queue_log.warning(event("queue_full", refused=self._num))
            self._num, self._written_s = 0, now
