"""Formats log lines as JSON objects for the engine and the server; re-exports the workers' class."""

from oarlock.workers.log_format import JsonFormatter

__all__ = ["JsonFormatter"]
