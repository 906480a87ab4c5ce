"""Measurements that take seconds: how fast memory is read, and how long a sum over ranks takes.

python -m oarlock.workers.doctor.measure DESCRIPTOR RANK RANKS     # one of the other ranks of that sum
"""

import statistics
import sys
import time

import torch

from oarlock.workers.distributed.all_reduce import SharedMemoryGroup
from oarlock.workers.distributed.shm_layout import total_bytes
from oarlock.workers.distributed.shm_ring import anonymous_memory
from oarlock.workers.doctor.finding import Finding
from oarlock.workers.kernels.cpu.fused_layer import ALL_CAME, all_reduce_of
from oarlock.workers.kernels.cpu.library import library
from oarlock.workers.python_child import start_python

_READ_BYTES = 1 << 30  # more than any cache holds
_PASSES = 7
_SUMS = 300  # of one size in one round
_ROUNDS = 9
_TIMEOUT_S = 60.0  # for a rank to start, too
_SIZES = (4 << 10, 16 << 10, 64 << 10, 1 << 20)  # bytes of float32


def memory_speed() -> Finding:
    """Reading memory once from start to end with all threads: what a decode step cannot be faster than."""
    memory = torch.ones(_READ_BYTES // 8, dtype=torch.float64)
    best = 0.0
    for _ in range(_PASSES):
        started = time.perf_counter()
        memory.sum()
        best = max(best, _READ_BYTES / (time.perf_counter() - started))
    text = f"{best / 1e9:.1f} GB/s read by {torch.get_num_threads()} threads, the best of {_PASSES} passes"
    return Finding("memory speed", text, facts={"bytes_per_s": best, "threads": torch.get_num_threads()})


def all_reduce_time(ranks: int) -> Finding:
    """Microseconds of one sum over `ranks` processes in shared memory, by its size: two of them are in every layer."""
    library()  # compiled before a rank waits for another
    memory_fd = anonymous_memory(total_bytes(ranks, max(_SIZES)))
    module = "oarlock.workers.doctor.measure"
    peers = [
        start_python(["-m", module, str(memory_fd), str(rank), str(ranks)], pass_fds=[memory_fd])
        for rank in range(1, ranks)
    ]
    try:
        found = _times(memory_fd, 0, ranks)
        for peer in peers:
            peer.wait(_TIMEOUT_S)
    finally:
        for peer in peers:
            peer.kill()
    parts = [f"{size >> 10} KiB {seconds * 1e6:.0f} us" for size, seconds in found.items()]
    text = f"{', '.join(parts)}, over {ranks} ranks in shared memory"
    return Finding("all-reduce", text, facts={"seconds_by_bytes": {str(size): found[size] for size in found}})


def _times(memory_fd: int, rank: int, ranks: int) -> dict[int, float]:
    """Seconds of a sum by its bytes, as one rank sees it: the median over rounds of a round's mean."""
    torch.set_num_threads(1)
    group = SharedMemoryGroup(memory_fd, rank, ranks, max(_SIZES), timeout_s=_TIMEOUT_S)
    add = all_reduce_of(library())
    found = {}
    for size in _SIZES:
        x = torch.zeros(size // 4)
        means = []
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            for _ in range(_SUMS):
                missing = add(group.address, x.data_ptr(), len(x))
                if missing != ALL_CAME:
                    raise group.lost(missing)
            means.append((time.perf_counter() - started) / _SUMS)
        found[size] = statistics.median(means[1:])
    return found


if __name__ == "__main__":
    _times(*map(int, sys.argv[1:]))
