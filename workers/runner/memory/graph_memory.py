"""Measures the memory that graphs of decode steps take from a device, before KV memory takes the rest.

The largest graphs bring the pool, in which the others find room for what they compute. What each size takes beside
it, for the kernels' arguments and its own tensors, the second largest tells: a smaller one takes no more. So two sizes
are captured, and destroyed.
"""

from collections.abc import Callable, Sequence

from oarlock.workers.runner.memory.meter import MemoryMeter


def graph_bytes(
    capture: Callable[[int], object], release: Callable[[], None], sizes: Sequence[int], meter: MemoryMeter
) -> int:
    """Bytes of graphs for all `sizes`, ascending. `capture` makes those of one size, `release` destroys all.

    Compared with the device after `release`, so that what libraries load and keep at a first use is not counted: that
    is in use already.
    """
    free = []
    for size in sorted(sizes, reverse=True)[:2]:
        capture(size)
        free.append(meter.free_bytes())
    release()
    both, one_more = meter.free_bytes() - free[-1], free[0] - free[-1]
    return max(0, both) + (len(sizes) - len(free)) * max(0, one_more)
