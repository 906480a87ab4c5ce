"""Ends a program without a word when nobody reads its output any more, as in `oarlock snippets | head -1`.

Python ignores the signal that ends other programs there, since it would end a server too whose client leaves. Instead
whatever writes next raises `BrokenPipeError`, which often is not before the interpreter's end.
"""

import os
import select
import signal
import sys
from collections.abc import Callable

EXIT_UNREAD = 128 + signal.SIGPIPE  # as a shell reports a program that the signal ended


def run_while_read(main: Callable[[], int]) -> int:
    """Run `main`, and write out all that it printed. Returns its exit code, or `EXIT_UNREAD` where a write failed
    because the reader of standard output or standard error has left. What it raises is raised."""
    try:
        try:
            return main()
        finally:
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
    except BrokenPipeError:
        unread = [number for number in (1, 2) if _is_unread(number)]
        if not unread:  # another pipe or socket of the program
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in unread:  # what is still buffered is written at the end of the interpreter
            os.dup2(nowhere, number)
        return EXIT_UNREAD


def _is_unread(descriptor: int) -> bool:
    """Whether it is a pipe or a socket whose other end is closed."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
