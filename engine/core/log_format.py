"""Log lines of the engine's process, as text or as JSON objects. The server uses the same formats."""

import logging
import sys
import time

from oarlock.base.log_format import JsonFormatter


class LineFormatter(logging.Formatter):
    """One line per event: `time=... level=... logger=... pid=... event=... key=value`, times in UTC.

    Control characters are escaped, so that no logged text can start a new line; tracebacks follow indented.
    """

    converter = time.gmtime

    def __init__(self) -> None:
        super().__init__("time=%(asctime)s level=%(levelname)s logger=%(name)s pid=%(process)d %(message)s")
        self.default_time_format = "%Y-%m-%dT%H:%M:%S"
        self.default_msec_format = "%s.%03dZ"

    def formatMessage(self, record: logging.LogRecord) -> str:
        return _on_one_line(super().formatMessage(record))

    def formatException(self, ei) -> str:
        lines = super().formatException(ei).splitlines()
        return "\n".join("    " + _on_one_line(line) for line in lines)


def _on_one_line(text: str) -> str:
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def log_to_stderr(level: str = "INFO", *, is_json: bool = False) -> None:
    """Make all loggers of this process write to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if is_json else LineFormatter())
    root = logging.getLogger("oarlock")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
