"""The machine that a plan is for: named GPUs, or a CPU whose memory is measured in a moment."""

from __future__ import annotations

import argparse
import os
import re
import threading
import time
from dataclasses import dataclass

from oarlock.engine.preflight import Memory, free_host_bytes, human_bytes
from oarlock.server.cli.arguments import UsageError
from oarlock.server.cli.plan.gpus import parse_gpus
from oarlock.server.config.options import parse_size

_READ_BYTES = 96 << 20  # of each thread: more than caches hold
_PASSES = 6
_CPU_SUM_S = 6e-6  # of a sum over ranks in shared memory


@dataclass(frozen=True, slots=True)
class Machine:
    """Machine of a plan. `bandwidth`, `ops`: of one device, or of the host; per second; None: not known."""

    text: str
    memory: Memory
    count: int  # devices; of a CPU 1
    bandwidth: float | None
    ops: float | None  # None on a CPU: follows from the numbers that a model computes with
    link: float
    sum_s: float


def machine_of(arguments: argparse.Namespace, *, has_vectors: bool = False) -> Machine:
    """Machine that the flags describe. `has_vectors`: whether the model makes vectors. Raises `UsageError`."""
    memory, bandwidth = _size(arguments.memory, "--memory", "24GB"), _size(arguments.bandwidth, "--bandwidth", "1008GB")
    ops = _tflops(arguments.tflops)
    if arguments.gpus is not None and arguments.cpu:
        raise UsageError("--gpus and --cpu exclude one another.", "Give one of them.")
    if arguments.gpus is not None:
        count, gpu = parse_gpus(arguments.gpus)
        memory, speed = memory or gpu.memory, bandwidth or gpu.bandwidth
        rate = f"{speed / 1e9:,.0f} GB/s" if speed else "a bandwidth that is not known"
        text = f"{count} x {gpu.name}: {human_bytes(memory)} and {rate} each"
        return Machine(text, Memory("cuda", memory, has_vectors), count, speed, ops or gpu.ops, gpu.link, gpu.sum_s)
    is_measured = bandwidth is None
    speed = bandwidth or measured_bandwidth()
    total = memory or free_host_bytes()
    free = "" if memory else " free"
    how = "measured" if is_measured else "given"
    text = f"CPU: {human_bytes(total)} of memory{free}, read at {speed / 1e9:,.1f} GB/s ({how})"
    return Machine(text, Memory("cpu", total, has_vectors), 1, speed, ops, 0.0, _CPU_SUM_S)


def measured_bandwidth() -> float:
    """Bytes per second that all cores read together: the best of a few passes, a fraction of a second."""
    import numpy as np

    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parts = [np.ones(_READ_BYTES // 8, np.uint64) for _ in range(threads)]

    def read() -> float:
        readers = [threading.Thread(target=np.bitwise_or.reduce, args=(part,)) for part in parts]
        begun = time.perf_counter()
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
        return threads * _READ_BYTES / (time.perf_counter() - begun)

    return max(read() for _ in range(_PASSES))


def _size(text: str | None, flag: str, example: str) -> int | None:
    if text is None:
        return None
    try:
        size = parse_size(re.sub(r"/s(ec)?$", "", text))
    except ValueError:
        size = 0
    if size <= 0:
        raise UsageError(f"{flag} is {text!r}, which is no size above 0.", f"For example: {flag} {example}.")
    return size


def _tflops(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise UsageError(f"--tflops is {text!r}, which is no number above 0.", "For example: --tflops 165.")
    return 1e12 * value
