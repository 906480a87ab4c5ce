"""The executor with N rank processes on this host: steps go out through one ring, outputs come back through another.

executor --steps--> ring --> rank 0 .. rank N-1        rank 0 --outputs--> ring --> executor
executor <--control socket (JSON lines)--> each rank   rank <--collectives--> rank (shared memory, gloo or NCCL)
"""

import contextlib
import logging
import os
import select
import signal
import subprocess
import time
from dataclasses import asdict, replace
from typing import NoReturn

from workers.config import LOADING_TIMEOUT_S, OnProgress, WorkerConfig, WorkerInfo
from workers.distributed.control_channel import Control
from workers.distributed.shm_layout import last_of
from workers.distributed.shm_ring import ChannelClosedError, RingLayout, RingReader, RingWriter, anonymous_memory
from workers.errors import StartupError, WorkerError
from workers.platform.cores import available_cores
from workers.protocol import (
    FillMasks,
    StepMetadata,
    StepOutput,
    empty_step,
    max_output_bytes,
    max_step_bytes,
    pack_step,
    unpack_output,
    unpack_step,
)
from workers.worker.load_progress import LoadProgress
from workers.worker.spawn_ranks import RankExtras, describe_exit, spawn_ranks
from workers.worker.step_limits import adapted
from workers.worker.worker_process import RankRings

logger = logging.getLogger("oarlock.executor")

_GRACE_S = 3.0  # for a rank to end by itself
_KILL_S = 5.0  # for the kernel to end a rank; one that waits for a dead network file system may never end


class MultiprocExecutor:
    """Starts the ranks in its constructor; raises `StartupError` with everything cleaned up when one cannot load."""

    max_in_flight = 2  # fewer than a ring has slots

    def __init__(
        self, config: WorkerConfig, on_progress: OnProgress, *, loading_timeout_s: float = LOADING_TIMEOUT_S
    ) -> None:
        """`loading_timeout_s`: the longest time without a message of any rank."""
        self.config = config
        self._loading_timeout_s = loading_timeout_s
        self._size = config.tensor_parallel_size
        self._processes: list[subprocess.Popen[bytes]] = []
        self._controls: list[Control] = []
        self._step_id = 0
        self._closed = False
        try:
            self._spawn()
            self.info = self._load(on_progress)
            if self.info.step_cost is not None:
                self.config = adapted(config, self.info.step_cost)
        except BaseException:
            self.close(grace_s=0.0)
            raise
        logger.info("event=ranks_ready size=%d pids=%s", self._size, ",".join(map(str, self.rank_pids)))

    @property
    def best_in_flight(self) -> int:
        """2 where the engine has a core to schedule on while the ranks compute; else it would take one from a rank,
        for which the others wait, and nothing is gained."""
        config = self.config
        leaves_core = config.device == "cuda" or available_cores() > self._size * (config.num_threads or 1)
        return self.max_in_flight if leaves_core else 1

    @property
    def rank_pids(self) -> tuple[int, ...]:
        return tuple(process.pid for process in self._processes)

    # -- start

    def _spawn(self) -> None:
        """Create the two rings, then one process per rank that inherits its ends of them."""
        step_layout = RingLayout.holding(max_step_bytes(self.config), self._size)
        output_layout = RingLayout.holding(max_output_bytes(self.config), 1)
        step_memory = anonymous_memory(step_layout.total_bytes)
        output_memory = anonymous_memory(output_layout.total_bytes)
        step_pipes = [os.pipe() for _ in range(self._size)]
        output_pipe = os.pipe()
        self._steps = RingWriter(step_memory, [write for _, write in step_pipes], step_layout)
        self._answers = RingReader(output_memory, output_pipe[0], 0, output_layout)
        extras = []
        for rank, (step_wake_fd, _) in enumerate(step_pipes):
            rings = RankRings(
                step_memory_fd=step_memory,
                step_wake_fd=step_wake_fd,
                step_layout=step_layout.to_fields(),
                output_memory_fd=output_memory,
                output_wake_fd=output_pipe[1] if rank == 0 else -1,
                output_layout=output_layout.to_fields(),
            )
            extras.append(RankExtras(asdict(rings), rings.fds))
        self._processes, self._controls, self._collectives = spawn_ranks(
            "workers.worker.worker_process", self.config, extras
        )
        for fd in (step_memory, output_memory, output_pipe[1], *(read for read, _ in step_pipes)):
            os.close(fd)  # the ranks have their own; ours would keep a dead rank's pipe open

    def _load(self, on_progress: OnProgress) -> WorkerInfo:
        """Follow all ranks through loading; they agree on the smallest number of blocks any of them has room for."""
        loading = LoadProgress(self._size)
        while not loading.is_done:
            for rank, message in self._next_messages(loading):
                loading.handle(rank, message)
                if message["kind"] == "progress":
                    on_progress("loading", loading.fraction)
                elif message["kind"] == "loaded" and loading.num_blocks is not None:
                    for control in self._controls:
                        control.send("allocate", num_blocks=loading.num_blocks)
        return joint_info(loading.infos)

    def _next_messages(self, loading: LoadProgress) -> list[tuple[int, dict]]:
        """Wait for control messages while loading. Raises `StartupError` when a rank ends, or when none sends any."""
        ready = [control for control in self._controls if control.has_pending]
        if not ready:
            ready = select.select(self._controls, [], [], self._loading_timeout_s)[0]
        if not ready:
            self._log_stacks()
            raise loading.no_progress_error(self._collectives.read(), self._loading_timeout_s)
        messages = []
        for control in ready:
            rank = self._controls.index(control)
            try:
                messages.append((rank, control.recv()))
            except ChannelClosedError:
                raise StartupError(
                    f"rank {rank} ended while loading ({_how_it_ended(self._processes[rank])}).",
                    "If it was killed, the machine ran out of memory: use a smaller model or more ranks.",
                    4,
                ) from None
        return messages

    # -- steps

    def submit(self, step: StepMetadata, fill_masks: FillMasks | None = None) -> None:
        self._step_id = step.step_id
        late = fill_masks is not None
        try:
            with self._steps.send(rest_follows=late) as slot:
                pack_step(step, slot, without_masks=late)
            if fill_masks is not None:
                with self._steps.send_rest() as slot:
                    fill_masks(unpack_step(slot).mask_bits)
        except ChannelClosedError:
            self._fail()

    def collect(self) -> StepOutput:
        deadline = time.monotonic() + self.config.step_timeout_s
        waiting = [self._answers.wake_fd, *self._controls]
        while True:
            ready = select.select(waiting, [], [], max(0.0, deadline - time.monotonic()))[0]
            if self._answers.wake_fd in ready:
                try:
                    with self._answers.recv() as slot:
                        return unpack_output(slot)
                except ChannelClosedError:
                    self._fail()
            if ready:
                self._fail()
            self._fail_hung()

    def ping(self) -> None:
        self.submit(empty_step(self._step_id))
        self.collect()
        deadline = time.monotonic() + self.config.step_timeout_s
        while any(self._steps.finished(rank) < self._steps.sent for rank in range(self._size)):
            if select.select(self._controls, [], [], 0.001)[0]:
                self._fail()
            if time.monotonic() > deadline:
                self._fail_hung()

    def fileno_for_death(self) -> list[int]:
        return [control.fileno() for control in self._controls]

    # -- end

    def _fail(self) -> NoReturn:
        """A rank has ended or raised: raise the first cause that the ranks have sent."""
        deadline = time.monotonic() + 0.2  # a rank's pipe may end shortly before its last message arrives
        ended: tuple[int, str] | None = None
        while time.monotonic() < deadline:
            for control in select.select(self._controls, [], [], 0.05)[0]:
                rank = self._controls.index(control)
                try:
                    message = control.recv()
                except ChannelClosedError:
                    ended = ended or (rank, _how_it_ended(self._processes[rank]))
                    continue
                if message["kind"] == "raised":
                    raise WorkerError(rank, int(message["step_id"]), message["cause"])
            if ended is not None:
                break
        rank, how = ended or (0, "its channel closed")
        raise WorkerError(rank, self._step_id, how)

    def _fail_hung(self) -> NoReturn:
        """No output in time: raise with the rank that is behind the others, which wait for it in a collective."""
        finished = [self._steps.finished(rank) for rank in range(self._size)]
        collectives = self._collectives.read()
        last = last_of(finished, collectives)
        cause = f"no answer within {self.config.step_timeout_s:g} s"
        if last is None:
            cause += f"; all ranks that have not answered are as far, at collective {min(collectives)}"
        self._log_stacks()
        raise WorkerError(finished.index(min(finished)) if last is None else last, self._step_id, cause, hung=True)

    def _log_stacks(self) -> None:
        """Make each rank that still runs write the stacks of its threads to the log."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGUSR1)
        time.sleep(0.2)

    def close(self, grace_s: float = _GRACE_S) -> None:
        """Close the ring, at which ranks end; a rank that has not ended after `grace_s` seconds is killed."""
        if self._closed:
            return
        self._closed = True
        if hasattr(self, "_steps"):
            self._steps.close()
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
        if hasattr(self, "_answers"):
            self._answers.close()
        if hasattr(self, "_collectives"):
            self._collectives.close()


def joint_info(infos: dict[int, WorkerInfo]) -> WorkerInfo:
    """Rank 0's info; invariant only if every rank is, else with the reason of the first that is not."""
    joint = infos[0]
    for rank, info in sorted(infos.items()):
        if joint.batch_invariant and not info.batch_invariant:
            reason = f"rank {rank}: {info.batch_invariant_reason}"
            joint = replace(joint, batch_invariant=False, batch_invariant_reason=reason)
        if joint.rank_invariant and not info.rank_invariant:
            reason = f"rank {rank}: {info.rank_invariant_reason}"
            joint = replace(joint, rank_invariant=False, rank_invariant_reason=reason)
    return joint


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    try:
        status = process.wait(1.0)
    except subprocess.TimeoutExpired:
        return "it closed its channel"
    return describe_exit(status)
