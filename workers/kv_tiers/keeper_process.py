"""Runs the keeper of the directory beside a rank: starts its process again when it ends, and logs what it says."""

import contextlib
import logging
import os
import subprocess
import threading

from oarlock.workers.kv_tiers import keeper
from oarlock.workers.kv_tiers.directory import BlockDirectory
from oarlock.workers.python_child import start_python

logger = logging.getLogger("oarlock.kv_offload")


class KeeperProcess:
    """Keeper of the directory in a process. Call `run` in a thread that does nothing else: the kernel ends the process
    with that thread."""

    def __init__(self, files: BlockDirectory, reports_fd: int, look_s: float) -> None:
        """`reports_fd`: the ranks' pipe, to which the process writes by itself. `look_s`: between two looks."""
        self._look_s = look_s
        self._reports_fd = reports_fd
        self._words = [
            *("-m", keeper.MODULE, f"--parent={os.getpid()}", f"--reports={reports_fd}", f"--look-s={look_s}"),
            *(f"--root={files.root}", f"--key={files.key}", f"--rank={files.rank}", f"--max-bytes={files.max_bytes}"),
        ]
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = threading.Event()
        self._warned: set[str] = set()

    def run(self) -> None:
        """Runs the keeper's process, again when it ends, until `close`."""
        while not self._is_closed.is_set():
            try:
                self._run_once()
            except OSError as error:
                self._warn(f'event=kv_offload_failed kind=keeper cause="{error.strerror}" once=true')
            self._is_closed.wait(self._look_s)

    def _run_once(self) -> None:
        said, say = os.pipe()
        with open(said, errors="replace") as lines:
            try:
                child = start_python(self._words, stdin=subprocess.PIPE, output=say, pass_fds=[self._reports_fd])
            finally:
                os.close(say)
            self._child = child
            if self._is_closed.is_set():  # `close` may not have seen it
                child.kill()
            with child:
                for line in lines:
                    self._log(line.rstrip())
        if not self._is_closed.is_set():
            self._warn(f'event=kv_offload_failed kind=keeper cause="ended with status {child.returncode}" once=true')

    def make_room(self) -> None:
        """Tells the keeper that room may be needed. Returns at once; a process that starts makes room by itself."""
        child = self._child
        if child is not None and child.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended, and its pipe perhaps is closed
                os.write(child.stdin.fileno(), b"1")

    def close(self) -> None:
        """End the process: all it does may be left at any time."""
        self._is_closed.set()
        if self._child is not None:
            self._child.kill()

    def _log(self, line: str) -> None:
        level, _, text = line.partition(" ")
        if level == str(logging.INFO):
            logger.info(text)
        else:  # a warning, or a line of a traceback
            self._warn(text if level.isdigit() else line)

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text)
