"""Checks of CUDA devices and of their requirements. Without a driver there is one finding.

python -m oarlock.workers.doctor.cuda PARENT_PID CONTROL_FD     # a rank, to measure all-reduces between devices
"""

import importlib.util
import os
import select
import sys
from typing import Any

import torch

from oarlock.base.host_memory import human_bytes
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.control_channel import Control
from oarlock.workers.distributed.parallel_state import WITHOUT_PEERS, nccl_version
from oarlock.workers.distributed.shm_ring import ChannelClosedError
from oarlock.workers.doctor.finding import ERROR, NOTE, WARNING, Finding
from oarlock.workers.platform import cuda_driver
from oarlock.workers.platform.cuda_driver import driver_version, why_too_old
from oarlock.workers.ranks.cpu_affinity import with_cpus
from oarlock.workers.ranks.spawn_ranks import RankArguments, begin, spawn_ranks
from oarlock.workers.runner.worker_process import join, log_to_stderr

NOT_MEASURED = "not measured on a GPU yet: make gpu-check does"


def findings(requested: str, ranks: int) -> list[Finding]:
    """Check the CUDA devices. `requested`: auto, cpu or cuda."""
    driver, built = driver_version(), torch.version.cuda
    facts = {"driver": driver, "torch": built}
    if requested == "cpu":
        return [Finding("CUDA", "not requested", NOTE, facts=facts)]
    if torch.version.hip is not None and torch.cuda.is_available():
        text = f"torch is built for ROCm {torch.version.hip}, on which nothing has been tried yet"
        return [Finding("CUDA", text, WARNING, "make gpu-check shows what works.", facts), *_devices(ranks), _triton()]
    wanted = ERROR if requested == "cuda" else NOTE
    if driver is None:
        fix = "Install NVIDIA's driver (in a container: the container toolkit and --gpus all), or use --device cpu."
        return [Finding("CUDA", "no driver responds", wanted, fix if wanted == ERROR else "", facts)]
    if built is None:
        text = f"the driver supports CUDA {driver}, but the installed torch is built for CPUs"
        state = ERROR if requested == "cuda" else WARNING
        return [Finding("CUDA", text, state, "Install torch's CUDA build of the pinned version.", facts)]
    too_old = why_too_old(driver, built)
    if too_old is not None:
        return [Finding("CUDA", too_old[0], ERROR if requested == "cuda" else WARNING, too_old[1], facts)]
    if not torch.cuda.is_available():
        text = f"torch for CUDA {built} finds no device with a driver for CUDA {driver}"
        fix = "Look at CUDA_VISIBLE_DEVICES and at nvidia-smi."
        return [Finding("CUDA", text, ERROR if requested == "cuda" else WARNING, fix, facts)]
    found = [Finding("CUDA", f"driver for {driver}, torch for {built}; {NOT_MEASURED}", NOTE, facts=facts)]
    return [*found, *_devices(ranks), _triton(), *([_links(ranks)] if ranks > 1 else [])]


def _devices(ranks: int) -> list[Finding]:
    count = torch.cuda.device_count()
    found = []
    if count < ranks:
        fix = f"Use --tensor-parallel-size {count}, or --device cpu."
        found.append(Finding("devices", f"{count}, and {ranks} ranks need one each", ERROR, fix))
    for index in range(count):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = (properties.major, properties.minor)
        facts: dict[str, Any] = {"name": properties.name, "capability": capability, "free_bytes": free}
        text = f"{properties.name}, compute capability {capability[0]}.{capability[1]}, "
        text += f"{human_bytes(free)} free of {human_bytes(total)}"
        if capability < cuda_driver.LEAST_CAPABILITY:
            fix = "Use a GPU of the Ampere generation or later."
            found.append(Finding(f"device {index}", f"{text}; our kernels need 8.0", WARNING, fix, facts))
        elif free < 0.8 * total:
            fix = "Stop what else uses it (nvidia-smi), or lower --gpu-memory-utilization."
            found.append(Finding(f"device {index}", f"{text}: something else uses it", WARNING, fix, facts))
        else:
            found.append(Finding(f"device {index}", text, facts=facts))
    return found


def _triton() -> Finding:
    if importlib.util.find_spec("triton") is None:
        return Finding("Triton", "not installed", WARNING, "pip install triton of the version that torch pins.")
    missing = cuda_driver.missing_to_launch()
    if missing:
        text = f"its kernels cannot be launched without {' and '.join(missing)}"
        return Finding("Triton", text, WARNING, "apt install gcc python3-dev")
    return Finding("Triton", "installed, with a C compiler and Python's headers")


def _links(ranks: int) -> Finding:
    """Report whether each rank's device can read the memory of every other."""
    devices = range(min(ranks, torch.cuda.device_count()))
    apart = [(a, b) for a in devices for b in devices if a < b and not torch.cuda.can_device_access_peer(a, b)]
    version = nccl_version()
    facts = {"nccl": version, "without_peer_access": apart}
    if version is None:
        return Finding("NCCL", "torch has none", ERROR, "Install torch's CUDA build for Linux.", facts)
    if apart:
        pairs = ", ".join(f"{a}-{b}" for a, b in apart)
        fix = (
            f"Use GPUs behind one switch or with NVLink; NCCL goes through the host's memory otherwise. {WITHOUT_PEERS}"
        )
        return Finding("NCCL", f"{version}; no peer access between devices {pairs}", WARNING, fix, facts)
    return Finding("NCCL", f"{version}; all devices have peer access", facts=facts)


_TIMEOUT_S = 120.0  # limit for all ranks to join and measure


def all_reduce_choice(config: WorkerConfig) -> Finding:
    """Start the ranks of `config`, which names a device, and report their all-reduce. All have ended on return."""
    count = torch.cuda.device_count() if config.device == "cuda" else config.tensor_parallel_size
    if count < config.tensor_parallel_size:
        text = f"not measured: {count} CUDA device(s) for {config.tensor_parallel_size} ranks"
        return Finding("all-reduce", text, WARNING, f"Give --tensor-parallel-size {max(1, count)}, or --device cpu.")
    config = with_cpus(config, config.device).with_(log_level="WARNING")
    ranks = spawn_ranks("oarlock.workers.doctor.cuda", config, [{}] * config.tensor_parallel_size)
    try:
        answer = _first_answer(ranks.controls)
    finally:
        ranks.end()
    if answer["kind"] == "failed":
        return Finding("all-reduce", f"not measured: {answer['cause']}", WARNING, answer["fix"])
    return Finding("all-reduce", answer["text"], facts={"ranks": config.tensor_parallel_size})


def _first_answer(controls: list[Control]) -> dict[str, str]:
    """Return the choice, which the first rank sends, or the first failure of any rank."""
    readable = select.select(controls, [], [], _TIMEOUT_S)[0]
    if not readable:
        return _failed(f"the ranks did not respond within {_TIMEOUT_S:g} s")
    try:
        return readable[0].recv()
    except ChannelClosedError:
        return _failed(f"rank {controls.index(readable[0])} ended")


def _failed(cause: str) -> dict[str, str]:
    return {"kind": "failed", "cause": cause, "fix": "See the output of the ranks above."}


def main(argv: list[str]) -> int:
    control = begin(argv)
    try:
        arguments = RankArguments.receive(control)
        log_to_stderr(arguments.config, arguments.rank)
        groups = join(arguments)
        if arguments.rank == 0:
            control.send("chosen", text=groups.tp.all_reduce_method)
        control.recv()  # the other ranks wait until the parent has its answer
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
    os._exit(status)  # another rank may be gone already, as in `worker_process`
