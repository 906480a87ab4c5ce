"""Chooses the sequence that gives up its blocks when there are too few, and decides when it may run again."""

from collections import Counter
from collections.abc import Iterable

from oarlock.engine.scheduler.kv_cache_manager import KVCacheManager
from oarlock.engine.scheduler.request_queue import RequestQueue
from oarlock.engine.scheduler.sequence import Sequence

# Most other sequences that are admitted before one that waits only because it was preempted.
MAX_PASSED = 4


def choose_victim(running: Iterable[Sequence]) -> Sequence:
    """Choose the sequence to preempt: the last in the order of service, among those that yield if there are any."""
    return max(running, key=lambda seq: (seq.request.yields, seq.key))


def choose_over_share(
    running: list[Sequence], waiting: RequestQueue, num_rows: int, kv_cache_manager: KVCacheManager
) -> Sequence | None:
    """Choose the sequence to preempt for the next in turn when that has no row or too few blocks: the newest that
    yields to it, of any client, else the newest of the client that has most of the `num_rows` rows or of the blocks.

    None unless that client has more than its share of them, and has had more work done, while the client of the next
    in turn stays within its share with it. A client therefore takes from another at most its due, and while no other
    waits, one client may have everything. Sequences that yield are compared with each other in the same way.
    """
    behind = [seq for seq in running if seq.request.yields] if waiting.is_urgent else []
    if not behind and not waiting.has_several_clients(running):
        return None
    head = waiting[0]
    reserve = reserved_blocks(len(running), head.num_preemptions)
    if len(running) < num_rows and kv_cache_manager.can_allocate(head, reserve):
        return None
    if behind:
        return choose_victim(behind)
    rows, blocks = Counter[str](), Counter[str]()
    equals = [seq for seq in running if seq.request.yields == head.request.yields]
    for seq in equals:
        rows[seq.request.client] += 1
        blocks[seq.request.client] += len(seq.block_ids)
    client, share = head.request.client, 1 / len(rows.keys() | set(waiting.clients))
    held = {other: max(rows[other] / num_rows, blocks[other] / kv_cache_manager.num_total) for other in rows}
    wanted = kv_cache_manager.blocks_for(head.num_tokens)
    with_head = max((rows[client] + 1) / num_rows, (blocks[client] + wanted) / kv_cache_manager.num_total)
    if with_head > share or not held:
        return None
    heaviest = max(held, key=lambda other: (held[other], other))
    if held[heaviest] <= share or waiting.time_of(heaviest) <= waiting.time_of(client):
        return None
    return choose_victim(seq for seq in equals if seq.request.client == heaviest)


def reserved_blocks(num_running: int, num_preemptions: int) -> int:
    """Blocks that must stay free when a sequence with `num_preemptions` is admitted beside `num_running` others.

    One for each that runs, so that their growth does not preempt the new one at once. How long answers become is not
    known; that a sequence was preempted shows that one block each was too few. Doubling it each time bounds the
    preemptions of one sequence by the logarithm of the pool, whatever `max_tokens` allows.
    """
    return num_running << num_preemptions


def may_be_passed(seq: Sequence, running: list[Sequence], kv_cache_manager: KVCacheManager) -> bool:
    """Whether later sequences may be admitted before `seq`, which was just refused.

    Only if it was preempted, would fit with the smaller reserve of a new sequence, and was not passed often.
    """
    if seq.num_passed >= MAX_PASSED or seq.num_preemptions == 0:
        return False
    return kv_cache_manager.can_allocate(seq, reserved_blocks(len(running), 0))
