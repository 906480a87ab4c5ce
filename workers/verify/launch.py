"""Start of a verification's reference process, then of its ranks, which are followed to their end. Torch-free."""

import contextlib
import os
import select
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from oarlock.base.errors import StartupError
from oarlock.base.python_child import start_python
from oarlock.workers.config import LOADING_TIMEOUT_S, WorkerConfig
from oarlock.workers.distributed.control_channel import Control
from oarlock.workers.distributed.shm_layout import last_of
from oarlock.workers.distributed.shm_ring import ChannelClosedError
from oarlock.workers.ranks.multiproc_executor import HUNG
from oarlock.workers.ranks.spawn_ranks import SpawnedRanks, describe_exit, spawn_ranks

_KILL_S = 5.0  # time for the kernel to end a process; a process that waits for a dead network file system may never end
_LOOK_S = 1.0  # interval of looks at the processor time of the reference
_BUSY_S = 0.5  # processor time that counts as progress; a process that only waits uses far less

ReportLine = Callable[[str], None]


def run_reference(folder: Path, report_line: ReportLine, *, timeout_s: float = LOADING_TIMEOUT_S) -> None:
    """Run transformers in a process whose memory is free again when our ranks start.

    `timeout_s`: the longest time without progress, which is a reported line or `_BUSY_S` of processor time. Raises
    `StartupError` after that, and if the process fails. The process is gone when this returns.
    """
    ours, theirs = Control.pair()
    with contextlib.closing(ours):
        with contextlib.closing(theirs):
            fd = theirs.fileno()
            process = start_python(
                ["-m", "oarlock.workers.verify.reference", str(folder), str(os.getpid()), str(fd)], pass_fds=[fd]
            )
        try:
            status = _follow_reference(process, ours, report_line, timeout_s)
        finally:
            if process.poll() is None:
                process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_KILL_S)
    if status:
        raise StartupError(
            f"transformers could not run this model ({describe_exit(status)}).",
            "See its message above; if it was killed, the machine ran out of memory.",
            status if status > 0 else 4,
        )


def _follow_reference(
    process: subprocess.Popen[bytes], control: Control, report_line: ReportLine, timeout_s: float
) -> int:
    """Return the exit status of the reference. It reports nothing while it loads, but uses processor time."""
    doing, moved, used = "starting", time.monotonic(), 0.0
    while time.monotonic() - moved <= timeout_s:
        if control.has_pending or select.select([control], [], [], _LOOK_S)[0]:
            try:
                doing = control.recv()["text"]
            except ChannelClosedError:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(timeout_s)
                break
            report_line(f"transformers: {doing}")
            moved = time.monotonic()
        elif (time_s := _processor_time_s(process.pid)) >= used + _BUSY_S:
            moved, used = time.monotonic(), time_s
    raise StartupError(
        f"transformers has made no progress for {timeout_s:g} s after this: {doing}.",
        "If the model or Python's packages are on a network file system, check that it responds; then start again.",
        HUNG,
    )


def _processor_time_s(pid: int) -> float:
    """Return the processor time of all threads of a child that was not waited for yet."""
    times = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()  # fields after the command's name
    return (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")


def run_ranks(
    config: WorkerConfig, folder: Path, report_line: ReportLine, *, timeout_s: float = LOADING_TIMEOUT_S
) -> None:
    """Run our side: one process per rank, as many as serve. None of them is left when this returns.

    `timeout_s`: the longest time without progress of any rank. Raises `StartupError` after that, and if a rank fails.
    """
    extras = [{"folder": str(folder)}] * config.ranks_per_node
    ranks = spawn_ranks("oarlock.workers.verify.rank", config, extras)
    try:
        _follow(ranks, report_line, timeout_s)
    finally:
        ranks.end()


def _follow(ranks: SpawnedRanks, report_line: ReportLine, timeout_s: float) -> None:
    """Follow the ranks until every one is done. Raises `StartupError` for the first that fails."""
    running = dict(enumerate(ranks.controls))
    progress = [["starting"] for _ in running]  # per rank, the different lines it has sent
    while running:
        ready = [rank for rank, control in running.items() if control.has_pending]
        if not ready:
            readable = select.select(list(running.values()), [], [], timeout_s)[0]
            ready = [rank for rank, control in running.items() if control in readable]
        if not ready:
            raise _stuck(ranks, progress, timeout_s)
        for rank in ready:
            try:
                message = running[rank].recv()
            except ChannelClosedError:
                raise StartupError(
                    f"rank {rank} ended before its work was done ({describe_exit(ranks.processes[rank].wait(10))}).",
                    "See its message above; if it was killed, the machine ran out of memory.",
                    4,
                ) from None
            if message["kind"] == "failed":
                raise StartupError(message["cause"], message["fix"], int(message["exit_code"]))
            if message["kind"] == "done":
                progress[rank].append("done")
                del running[rank]
            elif message["text"] != progress[rank][-1]:
                progress[rank].append(message["text"])
                if rank == 0:
                    report_line(f"our {len(progress)} rank(s): {message['text']}")


def _stuck(ranks: SpawnedRanks, progress: list[list[str]], timeout_s: float) -> StartupError:
    """Return an error with the rank that the others wait for, or with the first rank among equals."""
    lines = [len(lines) for lines in progress]
    last = last_of(lines, ranks.collectives.read())
    rank = lines.index(min(lines)) if last is None else last
    others = "" if last is not None else "; other ranks are at the same point"
    return StartupError(
        f"rank {rank} has made no progress for {timeout_s:g} s after this: {progress[rank][-1]}{others}.",
        "If the model or Python's packages are on a network file system, check that it responds; then start again.",
        HUNG,
    )
