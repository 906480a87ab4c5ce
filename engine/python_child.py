"""Python child processes that end with the server. Re-exports the workers' functions."""

from oarlock.workers.python_child import (
    EXIT_UNREAD,
    HUB_SECRETS,
    die_with_parent,
    import_path,
    python_command,
    run_while_read,
    start_python,
)
