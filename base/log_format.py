"""Log lines as JSON objects, one per line, for programs that collect logs.

Log messages have the form `event=name key=value …`. Their keys become members of the object: from `record.msg.fields`
if the message has them, else from the template and its arguments, so that no logged value can add or change a member.
"""

import json
import logging
import re
import time
from typing import Any

_PAIR = re.compile(r'(\w+)=("[^"]*"|\S+)\s*')
_SPEC = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?[a-zA-Z]")
_VALUES = (bool, int, float, str)


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
    template, arguments = str(record.msg), record.args
    if not isinstance(arguments, tuple) or _PAIR.sub("", template).strip():
        return {"message": record.getMessage()}
    found: dict[str, Any] = {}
    left = list(arguments)
    for name, value in _PAIR.findall(template):
        text = value.strip('"')
        specs = _SPEC.findall(text)
        given, left = left[: len(specs)], left[len(specs) :]
        is_value = specs == [text] and isinstance(given[0], _VALUES)
        found[name] = given[0] if is_value else text % tuple(given)
    return found
