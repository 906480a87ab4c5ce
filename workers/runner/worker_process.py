"""The process of one rank: receive a step, execute it, send the output (one rank only), until the pipe is closed.

`python -m oarlock.workers.runner.worker_process PARENT_PID CONTROL_FD`, started by `workers/rank_processes.py`. It
imports torch at once, then waits for its arguments. It decides nothing: all its actions follow from the bytes of the
step, so that all ranks do the same.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import logging
import os
import signal
import sys
import time
import traceback
from functools import partial
from typing import TYPE_CHECKING

from oarlock.base.errors import EXIT_CONFIGURATION, EXIT_OUT_OF_MEMORY, StartupError
from oarlock.base.log_format import JsonFormatter, LineFormatter
from oarlock.workers.adapters import AdapterControl, AdapterReport, read_commands
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.control_channel import Control
from oarlock.workers.distributed.shm_ring import ChannelClosedError, RingLayout, RingReader, RingWriter
from oarlock.workers.kv_offload import KVReportSender
from oarlock.workers.protocol import StepMetadata, StepOutput, StepReader, pack_output
from oarlock.workers.ranks.cpu_affinity import use_cpus
from oarlock.workers.ranks.spawn_ranks import RankArguments, RankRings, begin
from oarlock.workers.runner.memory_needs import is_out_of_memory
from oarlock.workers.runner.pending_output import AnsweringThread, with_reports

if TYPE_CHECKING:
    from oarlock.workers.distributed.rank_groups import RankGroups
    from oarlock.workers.runner.encoder_runner import EncoderRunner
    from oarlock.workers.runner.model_runner import ModelRunner

logger = logging.getLogger("oarlock.rank")


def log_to_stderr(config: WorkerConfig, rank: int) -> None:
    """Log in the engine's format, with the rank in place of the process and, with replicas, the engine's number."""
    names = ({} if config.data_parallel_size == 1 else {"engine": config.data_parallel_rank}) | {"rank": rank}
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format == "json":
        handler.setFormatter(JsonFormatter(**names))
    else:
        handler.setFormatter(LineFormatter(" ".join(f"{name}={number}" for name, number in names.items())))
    logging.basicConfig(level=config.log_level, handlers=[handler])


def main(argv: list[str]) -> int:
    """Run a rank process. Return the exit status; exits at once if the parent has ended."""
    control = begin(argv)
    # torch reads this when it is imported. Its warnings are only about host names that cannot be resolved.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # sent by the executor if a step hangs
    gc.disable()  # until steps are served: imports only make objects that stay
    with contextlib.suppress(Exception):  # `start` needs it as well, and reports the failure
        import oarlock.workers.runner.model_runner  # noqa: F401
    try:
        arguments = RankArguments.receive(control)
    except ChannelClosedError:
        return 1
    log_to_stderr(arguments.config, arguments.rank)
    try:
        runner, groups = start(arguments, control)
    except StartupError as error:
        control.send("failed", cause=error.cause, fix=error.fix, exit_code=error.exit_code)
        return error.exit_code
    except ChannelClosedError:
        return 1
    except Exception as error:
        if is_out_of_memory(error):  # before the model's sizes are known
            cause = f"rank {arguments.rank} ran out of memory while starting: {error}"
            control.send("failed", cause=cause, fix="Free memory, or use fewer ranks.", exit_code=EXIT_OUT_OF_MEMORY)
            return EXIT_OUT_OF_MEMORY
        from oarlock.workers.distributed import parallel_state

        traceback.print_exc()
        control.send(
            "failed",
            cause=f"rank {arguments.rank} failed while loading: {type(error).__name__}: {error}",
            fix="The traceback above names the place; `--load-format dummy` shows whether the weights are at fault.",
            exit_code=EXIT_CONFIGURATION,
            of_peer=parallel_state.follows_from_peer(error),
        )
        return EXIT_CONFIGURATION
    gc.collect()
    gc.freeze()
    gc.enable()
    try:
        serve(arguments, control, runner, groups)
    finally:
        runner.close()  # graphs hold collectives of the group
        groups.destroy()
    return 0


def join(arguments: RankArguments) -> RankGroups:
    """Join this rank's groups, and return when all ranks have joined.

    First the process is bound to its CPUs and its device, because on a CUDA device the ranks try all-reduces as they
    join.
    """
    # Imported late, so that a parent that is already gone is noticed first.
    import torch

    from oarlock.workers.distributed.rank_groups import join_groups
    from oarlock.workers.runner.device import use_device

    use_cpus(arguments.config, arguments.local_rank)
    return join_groups(
        arguments.rendezvous,
        use_device(arguments.config, arguments.local_rank),
        getattr(torch, arguments.config.dtype, torch.bfloat16),  # `auto` if there is no model, as in the doctor
        share_device=arguments.config.share_device,
        in_order=arguments.config.batch_invariant,
    )


def start(arguments: RankArguments, control: Control) -> tuple[ModelRunner | EncoderRunner, RankGroups]:
    """Join the other ranks, load this rank's slice and allocate its pages, together with the other ranks."""
    from oarlock.workers.runner.encoder_runner import EncoderRunner
    from oarlock.workers.runner.model_runner import ModelRunner

    control.send("phase", name="joining")
    groups = join(arguments)
    control.send("phase", name="loading")
    config = arguments.config
    runner = (
        EncoderRunner(config, groups.tp) if config.whole_texts else ModelRunner(config, groups.tp, stage=groups.stage)
    )
    last_report = 0.0

    def on_progress(fraction: float) -> None:
        nonlocal last_report
        if time.monotonic() - last_report > 0.1:
            last_report = time.monotonic()
            control.send("progress", fraction=fraction)

    runner.load(on_progress)
    control.send("loaded", num_blocks=runner.num_blocks_that_fit())
    num_blocks = [int(count) for count in control.recv()["num_blocks"]]
    control.send("phase", name="allocating")
    runner.allocate(num_blocks)
    control.send("phase", name="timing")
    runner.time_steps()
    control.send("ready", info=runner.info().to_json())
    return runner, groups


def serve(arguments: RankArguments, control: Control, runner: ModelRunner | EncoderRunner, groups: RankGroups) -> None:
    """Run the step loop until the executor closes the ring. A failure is reported before the process ends.

    If the device runs asynchronously, the next step is launched as soon as it is in the ring, and another thread waits
    for the outputs.
    """
    from oarlock.workers.runner.device import use_device  # imports torch
    from oarlock.workers.runner.step_guard import StepGuard

    rings = RankRings(**arguments.extra)
    steps = RingReader(rings.step_memory_fd, rings.step_wake_fd, arguments.local_rank, RingLayout(**rings.step_layout))
    answers = None
    if rings.output_wake_fd is not None:
        answers = RingWriter(rings.output_memory_fd, [rings.output_wake_fd], RingLayout(**rings.output_layout))
    later = None
    if answers is not None and runner.runs_ahead:
        begin_thread = partial(use_device, runner.config, arguments.local_rank)
        later = AnsweringThread(partial(_send, answers), partial(_report, control), begin_thread)
    await_masks = partial(steps.wait_for_rest, runner.config.step_timeout_s)
    if runner.kv_offload is not None:
        assert rings.kv_report_fd is not None
        runner.kv_offload.start(KVReportSender(rings.kv_report_fd, arguments.rank))
    adapters = _adapter_control(runner, groups)
    guard = StepGuard(runner.bytes_of, runner.device, groups.votes, groups.stage)
    step_id, reader = 0, StepReader()
    try:
        while True:
            step = reader.read(steps.receive())
            begun_ns, step_id = time.monotonic_ns(), step.step_id
            if len(step.kv_copies):
                assert runner.kv_offload is not None
                runner.kv_offload.run_copies(step)
            reports = _run_commands(adapters, step) if len(step.adapter_commands) else []
            launched = guard.run(step, partial(runner.launch, step, await_masks))
            if reports:
                launched = with_reports(launched, reports)
            if len(step.token_ids):  # heartbeats have no tokens
                steps.note_duration(time.monotonic_ns() - begun_ns)
            if later is not None:
                later.add(step_id, launched)
            elif answers is not None:
                assert isinstance(launched, StepOutput), "the answering rank answers every step"
                pack_output(launched, answers.next_slot())
                answers.publish()
            steps.finish()
    except ChannelClosedError:
        return
    except Exception as error:
        _report(control, step_id, error)
        raise SystemExit(1) from error
    finally:
        if later is not None:
            later.close()


def _adapter_control(runner: ModelRunner | EncoderRunner, groups: RankGroups) -> AdapterControl | None:
    """Return the control of this rank's LoRA adapters; None if it serves none."""
    if runner.adapters is None:
        return None
    return AdapterControl(runner.adapters, bool if groups.votes is None else groups.votes.all_agree)


def _run_commands(adapters: AdapterControl | None, step: StepMetadata) -> list[AdapterReport]:
    """Run the commands of `step` for adapters, and return the reports for its output."""
    assert adapters is not None, "a rank without adapters got commands for them"
    return adapters.run(read_commands(step.adapter_commands, step.adapter_digests, step.adapter_texts))


def _send(answers: RingWriter, output: StepOutput) -> None:
    with answers.send() as buffer:
        pack_output(output, buffer)


def _report(control: Control, step_id: int, error: Exception) -> None:
    """Report the cause to the executor before this process ends: other ranks only see a lost connection."""
    if not isinstance(error, ChannelClosedError):
        from oarlock.workers.distributed import parallel_state

        cause, of_peer = f"{type(error).__name__}: {error}", parallel_state.follows_from_peer(error)
        if not of_peer:  # otherwise the failure is another rank's
            traceback.print_exception(error)
        control.send("raised", step_id=step_id, cause=cause, of_peer=of_peer)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    # Skips interpreter teardown: if another rank has ended, gloo's threads would wait for it.
    os._exit(status)
