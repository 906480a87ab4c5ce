"""`oarlock` with a handler for SIGUSR1 that writes the number of its event loop's tasks to a file.

A test that looks for leaks needs the figure from the running process.
"""

import asyncio
import os
import signal
from pathlib import Path

from oarlock.server.cli.main import main


def write_tasks(number: int, frame: object) -> None:
    """Write the file in one step, because the reader waits for it to appear."""
    path = Path(os.environ["COUNTED_TASKS_FILE"])
    partial = path.with_suffix(".partial")
    partial.write_text(str(len(asyncio.all_tasks())))
    partial.replace(path)


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, write_tasks)
    raise SystemExit(main())
