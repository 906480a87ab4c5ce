"""The process next to the first rank that looks after the directory. It reports files of others, and makes room.

If there are many files, each look takes long. In the rank's own process it would delay steps, because Python runs one
thread at a time. The process does not remember which files the rank wrote, since several servers and people may change
the directory. It reads the directory each time.
"""

import argparse
import contextlib
import logging
import os
import select
import subprocess
import sys
import threading

from oarlock.base.python_child import die_with_parent, leave_signals_to_parent, start_python
from oarlock.workers.kv_offload import KVReportKind, KVReportSender
from oarlock.workers.kv_tiers.directory import BlockDirectory

logger = logging.getLogger("oarlock.kv_offload")

MODULE = "oarlock.workers.kv_tiers.keeper"
LOG_FORMAT = "%(levelno)d %(message)s"  # format of each line of the standard output, which the rank logs
_NICENESS = 10  # steps have priority


def keep(files: BlockDirectory, reports: KVReportSender, wakes: int, look_s: float) -> None:
    """Look every `look_s` seconds until `wakes` is closed. A byte from `wakes` asks to make room, if the limit is
    reached, and to look at once."""
    asks_for_room = True
    while True:
        if asks_for_room:
            try:
                reports.usage(*files.make_room())
            except BrokenPipeError:
                raise
            except OSError as error:
                logger.warning("event=kv_offload_failed kind=room path=%r cause=%r", str(files.path), error.strerror)
        appeared, vanished = files.changes()
        reports.digests(KVReportKind.APPEARED, appeared)
        reports.digests(KVReportKind.VANISHED, vanished)
        is_awake = bool(select.select([wakes], [], [], look_s)[0])
        received = os.read(wakes, 4096) if is_awake else b""
        if is_awake and not received:
            return
        asks_for_room = bool(received)


def main(argv: list[str]) -> int:
    """Run the keeper's process, which `FileThreads.keep` starts."""
    parser = argparse.ArgumentParser(prog="python -m oarlock.workers.kv_tiers.keeper", allow_abbrev=False)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--reports", type=int, required=True, help="descriptor of the ranks' pipe")
    parser.add_argument("--root", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--max-bytes", type=int, required=True)
    parser.add_argument("--look-s", type=float, required=True)
    arguments = parser.parse_args(argv)
    die_with_parent(arguments.parent)
    leave_signals_to_parent()
    os.nice(_NICENESS)
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format=LOG_FORMAT)
    try:
        files = BlockDirectory(arguments.root, arguments.key, arguments.rank, arguments.max_bytes)
        keep(files, KVReportSender(arguments.reports, arguments.rank), sys.stdin.fileno(), arguments.look_s)
    except BrokenPipeError:  # the engine has ended, and the ranks end with it
        return 0
    except OSError as error:
        logger.warning("event=kv_offload_failed kind=room path=%r cause=%r", arguments.root, error.strerror)
        return 1
    return 0


class KeeperProcess:
    """Keeper of the directory in a process. Call `run` in a thread that does nothing else: the kernel ends the process
    together with that thread."""

    def __init__(self, files: BlockDirectory, reports_fd: int, look_s: float) -> None:
        """Prepare the command. `reports_fd`: the ranks' pipe, to which the process writes by itself. `look_s`: interval
        between looks."""
        self._look_s = look_s
        self._reports_fd = reports_fd
        self._words = [
            *("-m", MODULE, f"--parent={os.getpid()}", f"--reports={reports_fd}", f"--look-s={look_s}"),
            *(f"--root={files.root}", f"--key={files.key}", f"--rank={files.rank}", f"--max-bytes={files.max_bytes}"),
        ]
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = threading.Event()
        self._warned: set[str] = set()

    def run(self) -> None:
        """Run the keeper's process, and restart it if it ends, until `close`."""
        while not self._is_closed.is_set():
            try:
                self._run_once()
            except OSError as error:
                self._warn(f'event=kv_offload_failed kind=keeper cause="{error.strerror}" once=true')
            self._is_closed.wait(self._look_s)

    def _run_once(self) -> None:
        read_fd, write_fd = os.pipe()
        with open(read_fd, errors="replace") as lines:
            try:
                child = start_python(self._words, stdin=subprocess.PIPE, output=write_fd, pass_fds=[self._reports_fd])
            finally:
                os.close(write_fd)
            self._child = child
            if self._is_closed.is_set():  # `close` may not have seen the new process
                child.kill()
            with child:
                for line in lines:
                    self._log(line.rstrip())
        if not self._is_closed.is_set():
            self._warn(f'event=kv_offload_failed kind=keeper cause="ended with status {child.returncode}" once=true')

    def make_room(self) -> None:
        """Ask the keeper to make room if needed. Returns at once. A process that is only starting makes room by
        itself."""
        child = self._child
        if child is not None and child.stdin is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended, and its pipe may be closed
                os.write(child.stdin.fileno(), b"1")

    def close(self) -> None:
        """End the process. Its work can be interrupted at any time."""
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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
