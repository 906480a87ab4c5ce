"""Log lines: one per lifecycle event, `key=value`, control characters escaped.

Nothing is logged per token, and never a prompt or a key.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

from oarlock.engine.log_format import JsonFormatter

_NAMES = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_ESCAPES = {code: f"\\x{code:02x}" for code in (*range(32), 0x7F, 0x85)} | {0x2028: "\\u2028", 0x2029: "\\u2029"}
_ESCAPES |= {10: "\\n", 13: "\\r", 9: "\\t", 27: "\\e"}


def escape(text: str) -> str:
    """Escape `text` to one line: a client's text cannot begin a second line or move the cursor."""
    if text.isprintable():
        return text
    return text.translate(_ESCAPES).encode("utf-8", "backslashreplace").decode()


class Event(str):
    """A line of the log, with its fields for formats that keep them apart."""

    fields: dict[str, Any]


def event(name: str, **values: Any) -> Event:
    """Make the log line `event=name a=1 b="two words"`: None is left out."""
    parts = [f"event={name}"]
    for key, value in values.items():
        if value is None:
            continue
        text = f"{value:.3f}" if isinstance(value, float) else escape(str(value))
        parts.append(f'{key}="{text}"' if " " in text or not text else f"{key}={text}")
    line = Event(" ".join(parts))
    line.fields = {"event": name} | {key: value for key, value in values.items() if value is not None}
    return line


class _OneLine(logging.Formatter):
    """Formats `time=… level=… logger=… event=…` and, for our own bugs, the traceback below it."""

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
    # uvicorn logs its start, its stop and each lost client: our own lines have that
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL if level != "debug" else logging.DEBUG)


def logger(name: str) -> logging.Logger:
    """The logger `oarlock.name`."""
    return logging.getLogger(f"oarlock.{name}")
