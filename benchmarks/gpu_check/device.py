"""Times on a device, and what it allows at this moment: memory that is read or copied, products, launches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.gpu_check.part import Where

REPEATS = 7


def synchronize(where: Where) -> None:
    if where.device == "cuda":
        torch.cuda.synchronize()


def seconds_of(where: Where, call: Callable[[], Any], at_once: int = 1) -> float:
    """The median over a few measurements of the time of one call, `at_once` of which are launched before it waits.

    On CUDA between events, so that the time of the host counts only where the device waits for it.
    """
    call()
    synchronize(where)
    found = []
    for _ in range(REPEATS):
        if where.device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(at_once):
                call()
            end.record()
            end.synchronize()
            found.append(begin.elapsed_time(end) / 1000 / at_once)
        else:
            started = time.perf_counter()
            for _ in range(at_once):
                call()
            found.append((time.perf_counter() - started) / at_once)
    return statistics.median(found)


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Ceilings of the device, as measured."""

    read_bytes_s: float  # one pass over memory that no cache holds, summed up
    copy_bytes_s: float  # bytes read and bytes written
    product_flop_s: float  # bfloat16, the best of a few square shapes
    launch_s: float  # of one operation on a few numbers, many in a row

    @property
    def bytes_s(self) -> float:
        """The better of both ways to use the memory."""
        return max(self.read_bytes_s, self.copy_bytes_s)


def measure_ceilings(where: Where) -> Ceilings:
    """Measure the device's ceilings: about a second on a GPU."""
    size = 2**16 if where.is_tiny else 2**30  # float32 elements: 4 GiB, many times a cache
    if where.device == "cuda":
        size = min(size, torch.cuda.mem_get_info()[0] // 16)
    source = torch.ones(size, dtype=torch.float32, device=where.device)
    into = torch.empty_like(source)
    read, copy = seconds_of(where, source.sum), seconds_of(where, lambda: into.copy_(source))
    few = torch.ones(16, device=where.device)
    return Ceilings(
        read_bytes_s=source.nbytes / read,
        copy_bytes_s=2 * source.nbytes / copy,
        product_flop_s=max(product_rate(where, n, n, n) for n in ((64,) if where.is_tiny else (4096, 8192))),
        launch_s=seconds_of(where, lambda: few.add_(1.0), at_once=10 if where.is_tiny else 1000),
    )


def product_rate(where: Where, rows: int, outputs: int, inputs: int) -> float:
    """FLOP/s of one product in bfloat16."""
    x = torch.randn(rows, inputs, device=where.device).bfloat16()
    w = torch.randn(outputs, inputs, device=where.device).bfloat16()
    return 2.0 * rows * outputs * inputs / seconds_of(where, lambda: F.linear(x, w), at_once=3)
