"""Which sequence gives its blocks back when there are too few, and when it may run again."""

from collections.abc import Iterable

from engine.scheduler.kv_cache_manager import KVCacheManager
from engine.scheduler.sequence import Sequence

# At most so many other sequences are admitted before one that waits only because it was preempted.
MAX_PASSED = 4


def choose_victim(running: Iterable[Sequence]) -> Sequence:
    """The sequence to preempt: the last in the order of service."""
    return max(running, key=lambda seq: seq.key)


def reserved_blocks(num_running: int, num_preemptions: int) -> int:
    """Blocks that must stay free when a sequence with `num_preemptions` is admitted beside `num_running` others.

    One for each that runs, so that their growth does not preempt the new one at once. How long answers become is not
    known; that a sequence was preempted shows that one block each was too few. Doubling it each time bounds the
    preemptions of one sequence by the logarithm of the pool, whatever `max_tokens` allows.
    """
    return num_running << num_preemptions


def may_be_passed(seq: Sequence, num_running: int, kv_cache_manager: KVCacheManager) -> bool:
    """Whether later sequences may be admitted before `seq`, which was just refused.

    Only if it was preempted, would fit with the smaller reserve of a new sequence, and was not passed often.
    """
    if seq.num_passed >= MAX_PASSED or seq.num_preemptions == 0:
        return False
    return kv_cache_manager.can_allocate(seq, reserved_blocks(num_running, 0))
