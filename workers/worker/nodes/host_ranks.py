"""The rank processes of one host: they get steps through one ring and answer through another, and end with it.

owner --steps--> ring --> its ranks                     the answering rank --outputs--> ring --> owner
owner <--control socket (JSON lines)--> each rank       rank <--collectives--> rank (shared memory, TCP or NCCL)

Does not know what is on other hosts.
"""

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

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
    StepMetadata,
    StepOutput,
    max_output_bytes,
    max_step_bytes,
    pack_step,
    unpack_output,
    unpack_step,
)
from oarlock.workers.rank_processes import SERVES, RankProcess
from oarlock.workers.worker.nodes.first_cause import FirstCause
from oarlock.workers.worker.nodes.ranks import GRACE_AFTER_FAILURE_S, GRACE_S, Place
from oarlock.workers.worker.spawn_ranks import THE_ONLY_NODE, NodePlace, describe_exit, spawn_ranks
from oarlock.workers.worker.worker_process import RankRings

_KILL_S = 5.0  # for the kernel to end a rank; one that waits for a dead network file system may never end
_LAST_WORDS_S = 0.2  # a rank's pipe may end shortly before its last message arrives


class HostRanks:
    """`Ranks` of one host. Starts them in its constructor, and leaves nothing behind where that fails."""

    steps: RingWriter
    answers: RingReader | None  # None where nobody here reads them

    def __init__(
        self,
        config: WorkerConfig,
        ahead: Sequence[RankProcess] = (),
        place: NodePlace = THE_ONLY_NODE,
        relay: Control | None = None,
    ) -> None:
        """`ahead`: ranks whose processes run already. `relay`: on the first of several hosts, another reader of the
        steps, which writes the answers where the answering rank is on another host. It gets its ends of the rings."""
        topology = Topology.of(config)
        self.numbers = topology.ranks_of(place.node)
        self.answers = None
        self.kv_reports: KVReports | None = None
        self._processes = [rank.process for rank in ahead]
        self._controls = [rank.control for rank in ahead]
        self._closed = self._steps_are_closed = False
        self._first_cause = FirstCause()
        try:
            self._spawn(config, topology.answering_rank, ahead, place, relay)
        except BaseException:
            self.close(grace_s=0.0)
            raise
        self._open = list(self._controls)  # of ranks that have not ended

    def _spawn(
        self,
        config: WorkerConfig,
        answering: int,
        ahead: Sequence[RankProcess],
        place: NodePlace,
        relay: Control | None,
    ) -> None:
        """Create the two rings, and one process per rank that gets its ends of them."""
        size = len(self.numbers) + (relay is not None)  # readers
        in_flight = config.pipeline_parallel_size  # steps, and others that ranks have not finished with
        step_layout = RingLayout.holding(max_step_bytes(config), size, in_flight)
        output_layout = RingLayout.holding(max_output_bytes(config), 1, in_flight)
        step_memory = anonymous_memory(step_layout.total_bytes)
        output_memory = anonymous_memory(output_layout.total_bytes)
        step_pipes = [os.pipe() for _ in range(size)]
        output_pipe = os.pipe()
        self.steps = RingWriter(step_memory, [write for _, write in step_pipes], step_layout)
        answers = RingReader(output_memory, output_pipe[0], 0, output_layout)
        if answering in self.numbers or relay is not None:
            self.answers = answers
        else:
            answers.close()
        report_fd = None
        if config.offloads_kv:
            read_fd, report_fd = os.pipe()
            self.kv_reports = KVReports(read_fd)
        extras = []
        # The relay stands for an answering rank that is not here.
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
        self._processes, self._controls, self._collectives = spawn_ranks(SERVES, config, extras, ahead, place)
        ends = [step_memory, output_memory, output_pipe[1], *(read for read, _ in step_pipes)]
        for fd in ends if report_fd is None else [*ends, report_fd]:
            os.close(fd)  # the ranks have their own; ours would keep a dead rank's pipe open

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    @property
    def filenos(self) -> list[int]:
        return [control.fileno() for control in self._open]

    @property
    def step_times_ns(self) -> Sequence[int]:
        return self.steps.durations()[: len(self.numbers)]

    # -- messages

    def tell_all(self, kind: str, **fields: Any) -> None:
        for control in self._controls:
            with contextlib.suppress(ChannelClosedError):  # it has ended: reading its messages shows it
                control.send(kind, **fields)

    @property
    def has_message(self) -> bool:
        """Whether one was read already, which `select` cannot see."""
        return any(control.has_pending for control in self._open)

    def messages(self, timeout_s: float) -> list[tuple[int, dict[str, Any]]]:
        """One message of each rank that has sent some."""
        ready = [control for control in self._open if control.has_pending]
        ready = ready or select.select(self._open, [], [], timeout_s)[0]
        messages: list[tuple[int, dict[str, Any]]] = []
        for control in ready:
            number = self._controls.index(control)
            try:
                message = control.recv()
            except ChannelClosedError:
                self._open.remove(control)
                message = {"kind": "ended", "cause": _how_it_ended(self._processes[number])}
            self._first_cause.add(self.numbers[number], message)
            messages.append((self.numbers[number], message))
        return messages

    def failure(self, step_id: int) -> WorkerError:
        deadline = time.monotonic() + _LAST_WORDS_S
        while not self._first_cause.is_sure and (left := deadline - time.monotonic()) > 0:
            self.messages(left)
        error = self._first_cause.error(step_id)
        return error or WorkerError(self.numbers[0], step_id, "its channel closed")

    # -- steps

    def send_step(self, step: StepMetadata, *, masks_follow: bool) -> None:
        with self.steps.send(rest_follows=masks_follow) as slot:
            pack_step(step, slot, without_masks=masks_follow)

    def send_masks(self, bits: np.ndarray) -> None:
        with self.steps.send_rest() as slot:
            unpack_step(slot).mask_bits[:] = bits

    def receive_answer(self, timeout_s: float, others: Sequence[int] = ()) -> StepOutput | None:
        """`others`: descriptors that become readable when the answer may never come, as those of ranks do."""
        assert self.answers is not None, "the answering rank is on another host"
        ready = select.select([self.answers.wake_fd, *self._open, *others], [], [], timeout_s)[0]
        if self.answers.wake_fd in ready:
            with self.answers.recv() as slot:
                return unpack_output(slot)
        if ready:
            raise ChannelClosedError("a rank or a node has something to say, or has ended")
        return None

    def wait_until_finished(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self.have_finished:
            if select.select(self._open, [], [], 0.001)[0]:
                raise ChannelClosedError("a rank has something to say, or has ended")
            if time.monotonic() > deadline:
                return False
        return True

    @property
    def have_finished(self) -> bool:
        """Whether every rank has finished all steps that were sent."""
        return all(self.steps.finished(reader) == self.steps.sent for reader in range(len(self.numbers)))

    # -- hung ranks

    def places(self) -> list[Place]:
        finished = [self.steps.finished(reader) for reader in range(len(self.numbers))]
        return list(map(Place, finished, self._collectives.read_votes(), self._collectives.read()))

    def log_stacks(self) -> None:
        self.ask_for_stacks()
        time.sleep(0.2)

    def ask_for_stacks(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)

    # -- end

    def begin_to_close(self) -> None:
        """Close the ring, without waiting for what `close` waits for."""
        if hasattr(self, "steps") and not self._steps_are_closed:
            self._steps_are_closed = True
            self.steps.close()

    def close(self, failure: Exception | None = None, *, grace_s: float | None = None) -> None:
        """Close the ring, at which ranks end; one that has not after `grace_s` is killed."""
        if self._closed:
            return
        self._closed = True
        if grace_s is None:
            grace_s = GRACE_S if failure is None else GRACE_AFTER_FAILURE_S
        self.begin_to_close()
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
        if self.answers is not None:
            self.answers.close()
        if self.kv_reports is not None:
            self.kv_reports.close()
        if hasattr(self, "_collectives"):
            self._collectives.close()


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """In words, of a rank whose channel has ended."""
    try:
        status = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "it closed its channel"
    return describe_exit(status)
