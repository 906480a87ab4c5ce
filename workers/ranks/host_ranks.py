"""The rank processes of this host. They get steps through one ring and return outputs through another.

owner --steps--> ring --> its ranks                     the answering rank --outputs--> ring --> owner owner <--control
socket (JSON lines)--> each rank       rank <--collectives--> rank (shared memory, TCP or NCCL)

Rank numbers are always those in the whole group. Does not know the other hosts, unlike `group_ranks.py`.
"""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.control_channel import Control
from oarlock.workers.distributed.shm_ring import (
    ChannelClosedError,
    RingLayout,
    RingReader,
    RingWriter,
    anonymous_memory,
)
from oarlock.workers.distributed.topology import Topology
from oarlock.workers.errors import WorkerError
from oarlock.workers.kv_offload import KVReports
from oarlock.workers.protocol import (
    max_output_bytes,
    max_step_bytes,
)
from oarlock.workers.rank_processes import SERVES, RankProcess
from oarlock.workers.ranks.spawn_ranks import THE_ONLY_NODE, NodePosition, RankRings, describe_exit, spawn_ranks

_KINDS = ("raised", "ended", "failed")


class FirstCause:
    """The first failure of each rank, collected from their messages, and the failure that caused the others.

    `of_peer` in a message: the failure follows from the loss of another rank. `of_node`: the whole node of that rank is
    lost.

    An error that a rank raises because it has lost another rank is not a cause.
    """

    def __init__(self) -> None:
        self._failures: dict[tuple[int, bool], Mapping[str, Any]] = {}

    def add(self, rank: int, message: Mapping[str, Any]) -> bool:
        """Record the message if it is a failure, and return whether it is."""
        failed = message["kind"] in _KINDS
        if failed:
            self._failures.setdefault((rank, "of_node" in message), message)
        return failed

    @property
    def is_sure(self) -> bool:
        """Whether a rank has failed by itself. Otherwise the known failures may follow from one that is not known
        yet."""
        return any(not message.get("of_peer") for message in self._failures.values())

    def error(self, step_id: int) -> WorkerError | None:
        """Return the first cause, or None without a failure. `step_id`: used for ranks that did not report in which
        step they failed."""
        for (rank, _), message in sorted(self._failures.items(), key=lambda failure: how_late(failure[1])):
            return WorkerError(rank, int(message.get("step_id", step_id)), message["cause"])
        return None


def how_late(message: Mapping[str, Any]) -> int:
    """Return the rank of a failure among causes: 0 a rank's own failure, 1 a lost node, 2 the consequence of a lost
    peer."""
    return 2 if message.get("of_peer") else 1 if "of_node" in message else 0


GRACE_S = 3.0  # time for ranks to end by themselves
GRACE_AFTER_FAILURE_S = 0.5  # shorter, because ranks may wait for one that is lost
_POLL_S = 0.001
_KILL_S = 5.0  # time for the kernel to end a rank; a rank that waits for a dead network file system may never end


class RankProgress(NamedTuple):
    """Progress of a rank as growing counters. The first counter that differs shows which of two ranks is behind."""

    finished: int  # steps
    vote: int
    collective: int


class HostRanks:
    """Ranks of one host, driven by an executor. The constructor starts them; if that fails, it leaves nothing behind.

    Methods that send, receive or wait raise `ChannelClosedError` if a rank has ended or raised an error. `failure` then
    returns the first cause.
    """

    steps: RingWriter
    outputs: RingReader | None  # None if nobody on this host reads them
    kv_reports: KVReports | None = None  # None if no blocks are kept outside the pool
    failure_report_s = 0.2  # a rank's pipe may end shortly before its last message arrives

    def __init__(
        self,
        config: WorkerConfig,
        ahead: Sequence[RankProcess] = (),
        position: NodePosition = THE_ONLY_NODE,
        relay: Control | None = None,
    ) -> None:
        """Start the ranks. `ahead`: ranks whose processes already run. `relay`: on the first of several hosts, an
        additional reader of the steps, which also writes the outputs if the answering rank is on another host. It gets
        its ends of the rings."""
        topology = Topology.of(config)
        self.numbers = topology.ranks_of(position.node)
        self.outputs = None
        self._processes = [rank.process for rank in ahead]
        self._controls = [rank.control for rank in ahead]
        self._closed = False
        self._first_cause = FirstCause()
        try:
            self._spawn(config, topology.output_rank, ahead, position, relay)
        except BaseException as error:
            self.close(error if isinstance(error, Exception) else None, grace_s=0.0)
            raise
        self._open = list(self._controls)  # controls of ranks that have not ended, and of a relay

    def _spawn(
        self,
        config: WorkerConfig,
        answering: int,
        ahead: Sequence[RankProcess],
        position: NodePosition,
        relay: Control | None,
    ) -> None:
        """Create the two rings, and start one process per rank, which gets its ends of them."""
        size = len(self.numbers) + (relay is not None)  # number of readers
        in_flight = config.pipeline_parallel_size  # steps in flight; `RingLayout` adds slots
        step_layout = RingLayout.holding(max_step_bytes(config), size, in_flight)
        output_layout = RingLayout.holding(max_output_bytes(config), 1, in_flight)
        step_memory = anonymous_memory(step_layout.total_bytes)
        output_memory = anonymous_memory(output_layout.total_bytes)
        step_pipes = [os.pipe() for _ in range(size)]
        output_pipe = os.pipe()
        self.steps = RingWriter(step_memory, [write for _, write in step_pipes], step_layout)
        outputs = RingReader(output_memory, output_pipe[0], 0, output_layout)
        if answering in self.numbers or relay is not None:
            self.outputs = outputs
        else:
            outputs.close()
        report_fd = None
        if config.offloads_kv:
            read_fd, report_fd = os.pipe()
            self.kv_reports = KVReports(read_fd)
        extras = []
        # The relay replaces an answering rank that is on another host.
        readers = [*self.numbers, None if answering in self.numbers else answering][:size]
        for rank, (step_wake_fd, _) in zip(readers, step_pipes, strict=True):
            rings = RankRings(
                step_memory_fd=step_memory,
                step_wake_fd=step_wake_fd,
                step_layout=step_layout.to_fields(),
                output_memory_fd=output_memory,
                output_wake_fd=output_pipe[1] if rank == answering else None,
                output_layout=output_layout.to_fields(),
                kv_report_fd=report_fd,
            )
            extras.append(asdict(rings))
        if relay is not None:
            relay.send("rings", reader=size - 1, rings=extras.pop())
        self._processes, self._controls, self._collectives = spawn_ranks(SERVES, config, extras, ahead, position)
        ends = [step_memory, output_memory, output_pipe[1], *(read for read, _ in step_pipes)]
        for fd in ends if report_fd is None else [*ends, report_fd]:
            os.close(fd)  # the ranks have their own; ours would keep a dead rank's pipe open

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of this host's ranks, in their order."""
        return tuple(process.pid for process in self._processes)

    @property
    def filenos(self) -> list[int]:
        """Descriptors that become readable when a rank has ended or raised an error."""
        return [control.fileno() for control in self._open]

    # -- messages

    def send_to_all(self, kind: str, **fields: Any) -> None:
        for control in self._controls:
            with contextlib.suppress(ChannelClosedError):  # it has ended, which reading its messages shows
                control.send(kind, **fields)

    @property
    def has_message(self) -> bool:
        """Whether a message was already read into a buffer, which `select` cannot see."""
        return any(control.has_pending for control in self._open)

    def messages(self, timeout_s: float) -> list[tuple[int, dict[str, Any]]]:
        """Wait for a message, and return one message of each rank that has sent any, as (rank, message). A rank that
        has ended gets a last message of the kind "ended", with a `cause`."""
        return self._receive(timeout_s)

    def _receive(self, timeout_s: float) -> list[tuple[int, dict[str, Any]]]:
        ready = [control for control in self._open if control.has_pending]
        ready = ready or select.select(self._open, [], [], timeout_s)[0]
        messages = [message for control in ready if (message := self._read(control)) is not None]
        for rank, message in messages:
            self._first_cause.add(rank, message)
        return messages

    def _read(self, control: Control) -> tuple[int, dict[str, Any]] | None:
        number = self._controls.index(control)
        try:
            message = control.recv()
        except ChannelClosedError:
            self._open.remove(control)
            message = {"kind": "ended", "cause": how_it_ended(self._processes[number])}
        return self.numbers[number], message

    def failure(self, step_id: int) -> WorkerError:
        """Return the first cause, after a rank has ended or raised an error. `step_id`: id of the newest step."""
        deadline = time.monotonic() + self.failure_report_s
        while not self._first_cause.is_sure and (left := deadline - time.monotonic()) > 0:
            self._receive(left)
        error = self._first_cause.error(step_id)
        return error or WorkerError(self.numbers[0], step_id, "its channel closed")

    # -- steps

    def wait_until_finished(self, timeout_s: float) -> bool:
        """Return whether all ranks finish all sent steps within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while any(rank.finished < self.steps.sent for rank in self.progress()):
            self._receive(_POLL_S)
            if self._first_cause.error(0) is not None:
                raise ChannelClosedError("a rank or a node has ended or raised")
            if time.monotonic() > deadline:
                return False
        return True

    # -- hung ranks

    def progress(self) -> list[RankProgress]:
        """Return the progress of all ranks, in their order."""
        finished = [self.steps.finished(reader) for reader in range(len(self.numbers))]
        return list(map(RankProgress, finished, self._collectives.read_votes(), self._collectives.read()))

    def log_stacks(self) -> None:
        """Make each rank that still runs write the stacks of its threads to the log."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)

    # -- end

    def close(self, failure: Exception | None = None, *, grace_s: float | None = None) -> None:
        """Close the ring, at which ranks end; kill each rank that has not ended after `grace_s`. `failure`: the reason,
        if there was a failure. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if grace_s is None:
            grace_s = GRACE_S if failure is None else GRACE_AFTER_FAILURE_S
        if hasattr(self, "steps"):
            self.steps.close()
        deadline = time.monotonic() + grace_s
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            if process.poll() is None:
                process.kill()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_KILL_S)
        for control in self._controls:
            control.close()
        if self.outputs is not None:
            self.outputs.close()
        if self.kv_reports is not None:
            self.kv_reports.close()
        if hasattr(self, "_collectives"):
            self._collectives.close()


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """Describe the end of a process whose channel has closed."""
    try:
        status = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "it closed its channel"
    return describe_exit(status)
