"""`oarlock` with one ear more: on SIGUSR1 it writes the number of its event loop's tasks to a file.

The server keeps no such figure for itself; a test that looks for leaks needs it from the running process.
"""

import asyncio
import os
import signal
from pathlib import Path

from server.entrypoints.cli import main


def write_tasks(number: int, frame: object) -> None:
    """Whole or not at all: the reader waits for the file to appear."""
    path = Path(os.environ["COUNTED_TASKS_FILE"])
    partial = path.with_suffix(".partial")
    partial.write_text(str(len(asyncio.all_tasks())))
    partial.replace(path)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, write_tasks)
    raise SystemExit(main())
