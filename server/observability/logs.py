"""Log lines: one per lifecycle event, `key=value`, control characters escaped; and the access log.

The access log has one line for each HTTP response. Requests that a full queue refuses share one line in ten seconds.
Nothing is logged per token, and never a prompt, a query, a body or a key.
"""

import logging
import sys
import time
from collections.abc import Collection
from typing import Any

from oarlock.base.log_format import JsonFormatter, escape, value_of

_NAMES = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}


class Event(str):
    """A line of the log, with its fields for formats that keep them apart."""

    fields: dict[str, Any]


def event(name: str, **values: Any) -> Event:
    """Make the log line `event=name a=1 b="two words"`; None is left out."""
    parts = [f"event={name}"]
    for key, value in values.items():
        if value is None:
            continue
        text = f"{value:.3f}" if isinstance(value, float) else str(value)
        parts.append(f"{key}={value_of(text)}")
    line = Event(" ".join(parts))
    line.fields = {"event": name} | {key: value for key, value in values.items() if value is not None}
    return line


class _OneLine(logging.Formatter):
    """Formatter of `time=… level=… logger=… event=…` and, for our own bugs, the traceback below it."""

    converter = time.gmtime

    def formatMessage(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", self.converter(record.created))
        level, message = record.levelname, escape(record.message)
        return f"time={stamp}.{int(record.msecs):03d}Z level={level} logger={record.name} {message}"


def configure(level: str, form: str = "text") -> None:
    """Send our lines from `level` on, and the libraries' warnings, to standard error. `form`: text or json."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if form == "json" else _OneLine())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("oarlock").setLevel(_NAMES[level])
    # uvicorn logs its start, its stop and each lost client, which our own lines have
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL if level != "debug" else logging.DEBUG)


def logger(name: str) -> logging.Logger:
    """Return the logger `oarlock.name`."""
    return logging.getLogger(f"oarlock.{name}")


_log = logger("access")
_queue_log = logger("http")
_REFUSALS_EVERY_S = 10.0


class AccessLog:
    """Log with one line for each HTTP response."""

    def __init__(self, frequent: Collection[str]) -> None:
        """Set the `frequent` paths, which machines request every few seconds. A successful response to them is not
        logged."""
        self._frequent = frozenset(frequent)

    def write(self, scope: Any, request_id: str, status: int, num_bytes: int, seconds: float) -> None:
        """Log one response, complete or not. `num_bytes`: size of its body. `status` 0: the client left before it
        began."""
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
    """Log of requests that a full queue refuses: one line in ten seconds, since refusals must cost nothing."""

    def __init__(self) -> None:
        self._num = 0
        self._written_s = -_REFUSALS_EVERY_S

    def count(self, now: float) -> None:
        """Count one more refusal. `now`: seconds on a clock that only goes forward."""
        self._num += 1
        if now - self._written_s >= _REFUSALS_EVERY_S:
            _queue_log.warning(event("queue_full", refused=self._num))
            self._num, self._written_s = 0, now
