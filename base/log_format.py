"""Log lines of all processes: `event=name key=value …` as text, or JSON objects, one per line.

Fields come from `record.msg.fields` if the message has them, else from the template and its arguments. So no logged
value can begin a line, end before its end, or add or change a key.
"""

import json
import logging
import re
import time
from collections.abc import Iterator
from typing import Any

_PAIR = re.compile(r'(\w+)=("[^"]*"|\S+)\s*')
_SPEC = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]")
_VALUES = (bool, int, float, str)
_ESCAPE = {"\x1b": "\\e"}  # others are escaped as Python does
_QUOTED = frozenset(' "=\\')  # characters of values that need quotes


def escape(text: str) -> str:
    """Escape `text` to one line, so that a client's text cannot begin a second line, move the cursor or change the
    direction of writing."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    return _ESCAPE.get(char) or char.encode("unicode_escape").decode()


def value_of(text: str) -> str:
    """Return `text` as the value of a key: in quotes unless a reader finds its end without them.

    In quotes, quotes and backslashes are escaped by a backslash, as logfmt has it.
    """
    return text if text and text.isprintable() and _QUOTED.isdisjoint(text) else _in_quotes(text)


def _in_quotes(text: str) -> str:
    text = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escape(text)}"'


class LineFormatter(logging.Formatter):
    """One line per event: `time=... level=... logger=... PROCESS event=... key=value`, times in UTC.

    `PROCESS`: what `process` names. Tracebacks follow indented.
    """

    converter = time.gmtime

    def __init__(self, process: str = "pid=%(process)d") -> None:
        super().__init__(f"time=%(asctime)s level=%(levelname)s logger=%(name)s {process} %(message)s")
        self.default_time_format = "%Y-%m-%dT%H:%M:%S"
        self.default_msec_format = "%s.%03dZ"

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = message_of(record)
        return super().formatMessage(record)

    def formatException(self, ei) -> str:
        return "\n".join("    " + escape(line) for line in super().formatException(ei).splitlines())


def message_of(record: logging.LogRecord) -> str:
    """Return the message in one line. Values that a template has in quotes stay in their quotes."""
    if not _is_event(record):
        return escape(record.getMessage())
    parts = []
    for name, value, _, text in _pairs(record):
        is_quoted = value.startswith('"')
        parts.append(f"{name}={_in_quotes(text) if is_quoted else escape(text)}")
    return " ".join(parts)


class JsonFormatter(logging.Formatter):
    """`{"time", "level", "logger", "pid", "event", …}`; a traceback is the text of `exception`. Times are in UTC."""

    def __init__(self, **constants: int) -> None:
        """Set the `constants`, members of every object, such as the rank."""
        super().__init__()
        self._constants = constants

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
            **self._constants,
        }
        for name, value in fields_of(record).items():
            entry[f"{name}_" if name in entry else name] = round(value, 6) if isinstance(value, float) else value
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def fields_of(record: logging.LogRecord) -> dict[str, Any]:
    """Return the members of an event; for other text, only `message`."""
    fields = getattr(record.msg, "fields", None)
    if fields is not None:
        return dict(fields)
    if not _is_event(record):
        return {"message": record.getMessage()}
    found: dict[str, Any] = {}
    for name, value, given, text in _pairs(record):
        is_value = _SPEC.fullmatch(value.strip('"')) is not None and bool(given) and isinstance(given[0], _VALUES)
        found[name] = given[0] if is_value else text
    return found


def _is_event(record: logging.LogRecord) -> bool:
    """Return whether the template of a message consists of keys and values."""
    return isinstance(record.args, tuple) and not _PAIR.sub("", str(record.msg)).strip()


def _pairs(record: logging.LogRecord) -> Iterator[tuple[str, str, tuple[Any, ...], str]]:
    """Yield each key of an event, its value in the template, the arguments of the value, and the text with them."""
    left = record.args if isinstance(record.args, tuple) else ()
    has_arguments = bool(left)  # without any, `%` is no more than a character, as for `logging`
    for name, value in _PAIR.findall(str(record.msg)):
        text = value.strip('"')
        count = len(_SPEC.findall(text)) if has_arguments else 0
        given, left = left[:count], left[count:]
        yield name, value, given, text % given if has_arguments else text
