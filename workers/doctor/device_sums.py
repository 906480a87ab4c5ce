"""Measures how ranks on CUDA devices sum, and how long each way takes, as each start does, but without a model.

python -m oarlock.workers.doctor.device_sums PARENT_PID CONTROL_FD     # one of the ranks
"""

import os
import select
import sys

import torch

from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.control_channel import Control
from oarlock.workers.distributed.shm_ring import ChannelClosedError
from oarlock.workers.doctor.finding import WARNING, Finding
from oarlock.workers.ranks.cpu_affinity import with_cpus
from oarlock.workers.ranks.spawn_ranks import RankArguments, begin, spawn_ranks
from oarlock.workers.runner.worker_process import join, log_to_stderr

_TIMEOUT_S = 120.0  # for all ranks to join and measure


def all_reduce_choice(config: WorkerConfig) -> Finding:
    """Starts the ranks of `config`, which names a device, and reports how they sum. All have ended on return."""
    count = torch.cuda.device_count() if config.device == "cuda" else config.tensor_parallel_size
    if count < config.tensor_parallel_size:
        text = f"not measured: {count} CUDA device(s) for {config.tensor_parallel_size} ranks"
        return Finding("all-reduce", text, WARNING, f"Give --tensor-parallel-size {max(1, count)}, or --device cpu.")
    config = with_cpus(config, config.device).with_(log_level="WARNING")
    ranks = spawn_ranks("oarlock.workers.doctor.device_sums", config, [{}] * config.tensor_parallel_size)
    try:
        answer = _first_answer(ranks.controls)
    finally:
        ranks.end()
    if answer["kind"] == "failed":
        return Finding("all-reduce", f"not measured: {answer['cause']}", WARNING, answer["fix"])
    return Finding("all-reduce", answer["text"], facts={"ranks": config.tensor_parallel_size})


def _first_answer(controls: list[Control]) -> dict[str, str]:
    """The choice, which the first rank sends, or the first failure of any."""
    readable = select.select(controls, [], [], _TIMEOUT_S)[0]
    if not readable:
        return _failed(f"the ranks did not answer within {_TIMEOUT_S:g} s")
    try:
        return readable[0].recv()
    except ChannelClosedError:
        return _failed(f"rank {controls.index(readable[0])} ended")


def _failed(cause: str) -> dict[str, str]:
    return {"kind": "failed", "cause": cause, "fix": "What the ranks have printed stands above: mend that first."}


def main(argv: list[str]) -> int:
    control = begin(argv)
    try:
        arguments = RankArguments.receive(control)
        log_to_stderr(arguments.config, arguments.rank)
        groups = join(arguments)
        if arguments.rank == 0:
            control.send("chosen", text=groups.tp.sums_by)
        control.recv()  # the others stay, silent, until the parent has its answer
    except ChannelClosedError:
        return 0
    except Exception as error:
        failure = _failed(f"{type(error).__name__}: {error}")
        control.send("failed", cause=failure["cause"], fix=failure["fix"])
        return 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # as in `worker_process`: another rank may be gone already
