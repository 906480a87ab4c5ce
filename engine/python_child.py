"""Starts Python processes for the server, and lets them end with it; the same functions as in the workers."""

from oarlock.workers.python_child import (
    EXIT_UNREAD,
    die_with_parent,
    import_path,
    python_command,
    run_while_read,
    start_python,
)

__all__ = ["EXIT_UNREAD", "die_with_parent", "import_path", "python_command", "run_while_read", "start_python"]
