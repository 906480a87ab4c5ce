"""One line per lifecycle event on stderr: `time=... level=... logger=... event=... key=value`.

Whatever is logged stays on its line: control characters are escaped, so that no text can forge a line.
"""

import logging
import sys
import time


class LineFormatter(logging.Formatter):
    """Times in UTC; a traceback follows its line, indented."""

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


def log_to_stderr(level: str = "INFO") -> None:
    """For a process of its own: all loggers of the house write here."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LineFormatter())
    root = logging.getLogger("oarlock")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
