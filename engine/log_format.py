"""Log lines as JSON objects for the engine and the server; the same class as in the workers."""

from oarlock.workers.log_format import JsonFormatter

__all__ = ["JsonFormatter"]
