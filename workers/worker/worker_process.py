"""The process of one rank: receive a step, execute it, answer (rank 0 only), until the pipe ends.

`python -m workers.worker.worker_process '{"rank": 0, ...}'`, started by `multiproc_executor.py` with inherited
descriptors. Decides nothing: everything it does follows from the bytes of the step.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import logging
import os
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Protocol

from workers.config import WorkerConfig
from workers.distributed.control_channel import Control
from workers.distributed.shm_ring import ChannelClosedError, RingLayout, RingReader, RingWriter
from workers.errors import StartupError
from workers.platform.memory_needs import OUT_OF_MEMORY, is_out_of_memory
from workers.protocol import pack_output, unpack_step

if TYPE_CHECKING:
    from workers.distributed.parallel_state import TensorParallel
    from workers.worker.model_runner import ModelRunner

logger = logging.getLogger("oarlock.rank")

_PR_SET_PDEATHSIG = 1
_PATIENCE_S = 3600.0  # of a rank that waits for another; its parent ends it long before, or ends itself


class Invitation(Protocol):
    """What a rank must know to join the others."""

    @property
    def rank(self) -> int: ...
    @property
    def collective_memory_fd(self) -> int: ...
    @property
    def collective_bytes(self) -> int: ...
    @property
    def store_port(self) -> int: ...
    @property
    def store_listen_fd(self) -> int: ...  # -1 for all ranks but 0


@dataclass(frozen=True, slots=True)
class RankArguments:
    """What a rank inherits. Descriptors keep their numbers across the spawn."""

    rank: int
    parent_pid: int
    control_fd: int
    step_memory_fd: int
    step_wake_fd: int
    step_layout: dict[str, int]
    output_memory_fd: int
    output_wake_fd: int  # -1 for all ranks but 0
    output_layout: dict[str, int]
    collective_memory_fd: int
    collective_bytes: int
    store_port: int
    store_listen_fd: int  # -1 for all ranks but 0
    config: str  # WorkerConfig as JSON

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def die_with_parent(parent_pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to end this process when its parent ends; the pipes do the same where there is no such call."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent_pid:  # it ended before the call above
        os._exit(1)


def log_to_stderr(rank: int, level: str) -> None:
    """Lines like the engine's, with the rank in place of the process."""
    logging.Formatter.converter = time.gmtime
    logging.basicConfig(
        level=level,
        stream=sys.stderr,
        format=f"time=%(asctime)s.%(msecs)03dZ level=%(levelname)s logger=%(name)s rank={rank} %(message)s",
        datefmt="%Y-%m-%dT%H:%M:%S",
    )


def main(argv: list[str]) -> int:
    """Entry of a rank process. Returns 0 after an orderly end; leaves at once when the parent is gone."""
    arguments = RankArguments(**json.loads(argv[0]))
    die_with_parent(arguments.parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal group; the parent decides
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # asked for by the group when a step hangs
    log_to_stderr(arguments.rank, WorkerConfig.from_json(arguments.config).log_level)
    control = Control.from_fd(arguments.control_fd)
    try:
        runner, tp = start(arguments, control)
    except StartupError as error:
        control.send("failed", cause=error.cause, fix=error.fix, exit_code=error.exit_code)
        return error.exit_code
    except ChannelClosedError:
        return 1
    except Exception as error:
        if is_out_of_memory(error):  # before there is a model to do sums about
            cause = f"rank {arguments.rank} ran out of memory while starting: {error}"
            control.send("failed", cause=cause, fix="Free memory, or use fewer ranks.", exit_code=OUT_OF_MEMORY)
            return OUT_OF_MEMORY
        traceback.print_exc()
        control.send(
            "failed",
            cause=f"rank {arguments.rank} failed while loading: {type(error).__name__}: {error}",
            fix="The traceback above names the place; `--load-format dummy` tells whether the weights are at fault.",
            exit_code=3,
        )
        return 3
    try:
        serve(arguments, control, runner)
    finally:
        tp.leave()
    return 0


def join(arguments: Invitation, config: WorkerConfig) -> TensorParallel:
    """Meet the other ranks; a rank alone meets nobody."""
    # Imported late: torch takes seconds, and a parent that is already gone should be noticed before.
    import torch

    from workers.distributed.parallel_state import RendezvousInfo, TensorParallel
    from workers.worker.model_runner import device_of

    device = device_of(config, arguments.rank)
    if device.type == "cpu" and config.num_threads:
        torch.set_num_threads(config.num_threads)
    if config.tensor_parallel_size == 1:
        return TensorParallel.solo()
    meeting = RendezvousInfo(
        rank=arguments.rank,
        size=config.tensor_parallel_size,
        port=arguments.store_port,
        listen_fd=arguments.store_listen_fd if arguments.store_listen_fd >= 0 else None,
        memory_fd=arguments.collective_memory_fd,
        buffer_bytes=arguments.collective_bytes,
        # Longer than the group waits: it sees all ranks and names the one that hangs; a rank only sees that it waits.
        timeout_s=max(config.step_timeout_s, _PATIENCE_S),
    )
    return TensorParallel.join(meeting, device)


def start(arguments: RankArguments, control: Control) -> tuple[ModelRunner, TensorParallel]:
    """Join the other ranks, load this rank's slice and allocate its pages, in step with the group."""
    config = WorkerConfig.from_json(arguments.config)
    from workers.worker.model_runner import ModelRunner

    control.send("phase", name="joining")
    tp = join(arguments, config)
    control.send("phase", name="loading")
    runner = ModelRunner(config, tp)
    last_report = 0.0

    def on_progress(fraction: float) -> None:
        nonlocal last_report
        if time.monotonic() - last_report > 0.1:
            last_report = time.monotonic()
            control.send("progress", fraction=fraction)

    runner.load(on_progress)
    control.send("loaded", num_blocks=runner.num_blocks_that_fit())
    num_blocks = int(control.recv()["num_blocks"])
    control.send("phase", name="allocating")
    runner.allocate(num_blocks)
    control.send("phase", name="timing")
    runner.time_steps()
    control.send("ready", info=runner.info().to_json())
    return runner, tp


def serve(arguments: RankArguments, control: Control, runner: ModelRunner) -> None:
    """The step loop. Ends when the group closes the ring; a failure is reported before the process goes down."""
    steps = RingReader(
        arguments.step_memory_fd, arguments.step_wake_fd, arguments.rank, RingLayout(**arguments.step_layout)
    )
    answers = None
    if arguments.output_wake_fd >= 0:
        layout = RingLayout(**arguments.output_layout)
        answers = RingWriter(arguments.output_memory_fd, [arguments.output_wake_fd], layout)
    await_masks = partial(steps.wait_for_rest, runner.config.step_timeout_s)
    step_id = 0
    try:
        while True:
            with steps.recv() as slot:
                step = unpack_step(slot)
                step_id = step.step_id
                output = runner.execute(step, await_masks)
                if answers is not None:
                    assert output is not None, "rank 0 answers every step"
                    with answers.send() as buffer:
                        pack_output(output, buffer)
    except ChannelClosedError:
        return
    except Exception as error:
        # The first cause must reach the group before this process ends: its peers will only see a lost connection.
        traceback.print_exc()
        control.send("raised", step_id=step_id, cause=f"{type(error).__name__}: {error}")
        raise SystemExit(1) from error


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    # Skips interpreter teardown: a peer may be gone already, and gloo's threads would wait for it.
    os._exit(status)
