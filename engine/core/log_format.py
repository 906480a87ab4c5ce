"""The log of the engine's process, as text or as JSON objects. Every process has the same formats."""

import logging
import sys

from oarlock.base.log_format import JsonFormatter, LineFormatter


def log_to_stderr(level: str = "INFO", *, is_json: bool = False) -> None:
    """Make all loggers of this process write to stderr."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if is_json else LineFormatter())
    root = logging.getLogger("oarlock")
    root.handlers[:] = [handler]
    root.setLevel(level)
    root.propagate = False
