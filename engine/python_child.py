"""Starts Python processes for the server; the same function as in the workers."""

from workers.python_child import start_python

__all__ = ["start_python"]
