"""Becomes a command that the kernel kills when the process that asked for it ends, however that ends.

    python with_parent.py PARENT COMMAND...

So a replica whose actor was killed leaves no server behind that holds its device.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>; kept over exec


def main(parent: str, *command: str) -> int:
    """Does not return where the command could be run."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it ended before the kernel was asked
        return 1
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"error: {command[0]} cannot be run: {error.strerror}.", file=sys.stderr)
        print("fix: Name the program by its absolute path, which must be the same on every node.", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
