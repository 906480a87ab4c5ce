"""Starts Python processes for the server, and lets them end with it; the same functions as in the workers."""

from workers.python_child import die_with_parent, start_python

__all__ = ["die_with_parent", "start_python"]
