"""The process of one rank: receive a step, execute it, send the output (rank 0 only), until the pipe ends.

`python -m workers.worker.worker_process ARGUMENTS`, started by `spawn_ranks.py`. It decides nothing: everything it does
follows from the bytes of the step, so that all ranks do the same.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from workers.distributed.control_channel import Control
from workers.distributed.shm_ring import ChannelClosedError, RingLayout, RingReader, RingWriter
from workers.errors import StartupError
from workers.parent_death import die_with_parent
from workers.protocol import pack_output, unpack_step
from workers.worker.cpu_affinity import use_cpus
from workers.worker.memory_needs import OUT_OF_MEMORY, is_out_of_memory
from workers.worker.spawn_ranks import RankArguments

if TYPE_CHECKING:
    from workers.distributed.parallel_state import TensorParallel
    from workers.worker.model_runner import ModelRunner

logger = logging.getLogger("oarlock.rank")


@dataclass(frozen=True, slots=True)
class RankRings:
    """The ends of both rings that one rank inherits: steps to read and, for rank 0, answers to write."""

    step_memory_fd: int
    step_wake_fd: int
    step_layout: dict[str, int]
    output_memory_fd: int
    output_wake_fd: int  # -1 for all ranks but 0
    output_layout: dict[str, int]

    @property
    def fds(self) -> tuple[int, ...]:
        wake_fds = (self.step_wake_fd, self.output_wake_fd)
        return (self.step_memory_fd, self.output_memory_fd, *(fd for fd in wake_fds if fd >= 0))


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
    """Entry point of a rank process. Returns the exit status; exits at once when the parent has ended."""
    arguments = RankArguments.from_json(argv[0])
    die_with_parent(arguments.parent_pid)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C goes to all processes of the terminal; the parent ends this one
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # sent by the executor when a step hangs
    log_to_stderr(arguments.rank, arguments.config.log_level)
    control = Control.from_fd(arguments.control_fd)
    gc.disable()  # until it serves: imports make nothing but objects that stay
    try:
        runner, tp = start(arguments, control)
    except StartupError as error:
        control.send("failed", cause=error.cause, fix=error.fix, exit_code=error.exit_code)
        return error.exit_code
    except ChannelClosedError:
        return 1
    except Exception as error:
        if is_out_of_memory(error):  # before the model's sizes are known
            cause = f"rank {arguments.rank} ran out of memory while starting: {error}"
            control.send("failed", cause=cause, fix="Free memory, or use fewer ranks.", exit_code=OUT_OF_MEMORY)
            return OUT_OF_MEMORY
        traceback.print_exc()
        control.send(
            "failed",
            cause=f"rank {arguments.rank} failed while loading: {type(error).__name__}: {error}",
            fix="The traceback above names the place; `--load-format dummy` shows whether the weights are at fault.",
            exit_code=3,
        )
        return 3
    gc.collect()
    gc.freeze()
    gc.enable()
    try:
        serve(arguments, control, runner)
    finally:
        tp.destroy()
    return 0


def init_distributed(arguments: RankArguments) -> TensorParallel:
    """This rank's process group, once all ranks are there. First puts this process on its CPUs."""
    # Imported late: torch takes seconds, and a parent that is already gone should be noticed before.
    from workers.distributed import parallel_state
    from workers.worker.model_runner import device_of

    use_cpus(arguments.config, arguments.rank)
    return parallel_state.init_distributed(arguments.rendezvous, device_of(arguments.config, arguments.rank))


def start(arguments: RankArguments, control: Control) -> tuple[ModelRunner, TensorParallel]:
    """Form the process group, load this rank's slice and allocate its pages, together with the other ranks."""
    from workers.worker.model_runner import ModelRunner

    control.send("phase", name="joining")
    tp = init_distributed(arguments)
    control.send("phase", name="loading")
    runner = ModelRunner(arguments.config, tp)
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
    """The step loop. Returns when the executor closes the ring; a failure is reported before the process ends."""
    rings = RankRings(**arguments.extra)
    steps = RingReader(rings.step_memory_fd, rings.step_wake_fd, arguments.rank, RingLayout(**rings.step_layout))
    answers = None
    if rings.output_wake_fd >= 0:
        answers = RingWriter(rings.output_memory_fd, [rings.output_wake_fd], RingLayout(**rings.output_layout))
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
        # The cause must reach the executor before this process ends: other ranks only see a lost connection.
        traceback.print_exc()
        control.send("raised", step_id=step_id, cause=f"{type(error).__name__}: {error}")
        raise SystemExit(1) from error


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    # Skips interpreter teardown: another rank may have ended, and gloo's threads would wait for it.
    os._exit(status)
