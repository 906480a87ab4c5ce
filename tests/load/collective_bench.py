"""Times the sum over two ranks, in Python and in the kernels, on one thread each.

    python -m tests.load.collective_bench [--floats N] [--rounds N]

Two processes take turns with both forms on the same memory, without work in between. Figures are microseconds per sum:
the median over rounds of the mean of a round.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable

import torch

from oarlock.workers.distributed.shm_all_reduce import SharedMemoryGroup
from oarlock.workers.distributed.shm_layout import total_bytes
from oarlock.workers.distributed.shm_ring import anonymous_memory
from oarlock.workers.kernels.cpu.collective import ALL_CAME, all_reduce_of
from oarlock.workers.kernels.cpu.library import library

RANKS, SUMS = 2, 500  # sums in one round, of each form


def rank_times(memory_fd: int, rank: int, floats: int, rounds: int) -> dict[str, float]:
    """One rank's figures, in microseconds."""
    torch.set_num_threads(1)
    group = SharedMemoryGroup(memory_fd, rank, RANKS, floats * 4, timeout_s=60)
    x = torch.zeros(floats)
    in_kernels = all_reduce_of(library())

    def kernels() -> None:
        assert in_kernels(group.address, x.data_ptr(), floats) == ALL_CAME

    forms: dict[str, Callable[[], object]] = {"python": lambda: group.all_reduce(x), "kernels": kernels}
    means: dict[str, list[float]] = {name: [] for name in forms}
    for turn in range(rounds + 1):  # the first warms up
        for name, form in forms.items():
            form()
            started = time.perf_counter()
            for _ in range(SUMS):
                form()
            if turn > 0:
                means[name].append((time.perf_counter() - started) / SUMS * 1e6)
    return {name: statistics.median(values) for name, values in means.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.load.collective_bench", description=__doc__)
    parser.add_argument("--floats", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args(argv)
    library()  # compiled before either rank waits
    memory_fd = anonymous_memory(total_bytes(RANKS, arguments.floats * 4))
    peer = multiprocessing.get_context("fork").Process(
        target=rank_times, args=(memory_fd, 1, arguments.floats, arguments.rounds)
    )
    peer.start()
    found = rank_times(memory_fd, 0, arguments.floats, arguments.rounds)
    peer.join()
    print(f"sum of {arguments.floats} float32 over {RANKS} ranks: python {found['python']:.1f} us, ", end="")
    print(f"kernels {found['kernels']:.1f} us")


if __name__ == "__main__":
    main()
