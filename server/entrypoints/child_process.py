"""Runs the program behind a command, such as `oarlock verify`, as a child that never outlives it.

Knows signals and exit statuses: both share a terminal, but Ctrl-C, SIGTERM and a closed terminal concern this process
alone, which asks the child to end and waits for it. Knows nothing of what the program does.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import FrameType

from engine.python_child import start_python

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def run_program(module: str, arguments: Sequence[str]) -> int:
    """`python -m MODULE --parent OURS ARGUMENTS` until it ends: its status, or 128 + the signal that ended it or us.

    A first signal is passed on as SIGTERM, which lets the child clean up; a second one kills it.
    """
    with _unheard_by_children():
        child = start_python(["-m", module, f"--parent={os.getpid()}", *arguments], stdin=None)
    stopped_by: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        child.send_signal(signal.SIGKILL if stopped_by else signal.SIGTERM)
        stopped_by.append(number)

    heard = [number for number in _STOPS if signal.getsignal(number) is not signal.SIG_IGN]
    before = [signal.signal(number, stop) for number in heard]
    try:
        status = child.wait()
    finally:
        for number, handler in zip(heard, before, strict=True):
            signal.signal(number, handler)
    if stopped_by:
        return 128 + stopped_by[0]
    return status if status >= 0 else 128 - status


@contextmanager
def _unheard_by_children() -> Generator[None]:
    """What a terminal sends to everybody in it is ignored by processes started meanwhile: their parent decides."""
    numbers = (signal.SIGINT, signal.SIGHUP)
    before = [signal.signal(number, signal.SIG_IGN) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
