"""The engine's process: `python -m oarlock.engine.core FD PARENT_PID NUM_RANKS`, started by `engine/engine_process.py`.

It starts the processes of its ranks before its own imports, so that all processes import in parallel. Then `process.py`
serves the frontend at the other end of the socket `FD`.
"""

import gc
import sys
from functools import partial

from oarlock.base.python_child import die_with_parent, leave_signals_to_parent
from oarlock.workers.rank_processes import start_ranks_ahead


def main(argv: list[str]) -> int:
    fd, parent_pid, num_ranks = map(int, argv)
    die_with_parent(parent_pid)
    leave_signals_to_parent()
    ranks = start_ranks_ahead(num_ranks)
    gc.disable()  # imports create only objects that are kept; enabled when the loop runs

    from oarlock.engine.core.process import run
    from oarlock.workers.executor import start_executor

    return run(fd, partial(start_executor, ahead=ranks))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
