"""Chooses the sequence that gives up its blocks when there are too few, and decides when it may run again."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from oarlock.engine.scheduler.kv_cache_manager import KVCacheManager
from oarlock.engine.scheduler.output import SchedulerOutput
from oarlock.engine.scheduler.request_queue import RequestQueue
from oarlock.engine.scheduler.sequence import Sequence, Status

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


_LOOKED_AT = 64  # waiting sequences


def share_among_prompts(
    under_way: list[Sequence], waiting: RequestQueue, budget: int, run: Callable[[Sequence, int], int]
) -> int:
    """Give a step's budget of tokens to the prompts `under_way`, oldest first; return what is left of it.

    `run(seq, most)` schedules at most so many tokens of a sequence, which it admits if it waits, and returns how many.
    Up to half goes to others than the oldest: to those under way with the fewest tokens left, then to waiting ones that
    are shorter by half. A short prompt behind a long one is therefore answered soon, and the long one takes at most
    twice as long; prompts of about one length follow one another, which serves them sooner on average.
    """
    if not under_way:
        return budget
    oldest, *others = under_way
    share = budget // 2
    for seq in sorted(others, key=_num_left):
        share -= run(seq, share)
    for seq in _shorter_by_half(oldest, waiting):
        if share == 0:
            break
        taken = run(seq, share)
        if taken == 0:
            break
        share -= taken
    budget -= budget // 2 - share
    return budget - run(oldest, budget)


def give_way(under_way: list[Sequence], waiting: RequestQueue) -> tuple[list[Sequence], list[Sequence], bool]:
    """Split the prompts `under_way` into those that continue and those that continue only in a step with no others;
    return also whether any prompt is left that does not yield. Such a prompt's steps are not made longer by others."""
    urgent = [seq for seq in under_way if not seq.request.yields]
    if not urgent and not waiting.is_urgent:
        return under_way, [], False
    return urgent, [seq for seq in under_way if seq.request.yields], True


def admit_in_order(
    waiting: RequestQueue,
    budget: int,
    run: Callable[[Sequence, int], int],
    may_be_passed: Callable[[Sequence], bool],
    *,
    is_urgent: bool,
) -> int:
    """Admit waiting sequences in order, and run them with `run`; return what is left of the budget.

    A sequence that cannot be admitted blocks those behind it, so that long prompts are served, unless it
    `may_be_passed`. `is_urgent`: admit only sequences that do not yield.
    """
    passed: list[Sequence] = []
    while len(passed) < len(waiting) and budget > 0:
        seq = waiting[len(passed)]
        if is_urgent and seq.request.yields:
            break
        budget -= run(seq, budget)
        if seq.status is Status.RUNNING:
            for other in passed:
                other.num_passed += 1
        elif seq.status is Status.WAITING:
            passed.append(seq)
        if not all(may_be_passed(other) for other in passed):
            break
    return budget


def has_room_for_text(seq: Sequence, output: SchedulerOutput, budget: int, most_vectors: int) -> bool:
    """Whether a step has room for a text that cannot be divided: `budget` tokens are left, and the step returns vectors
    of at most `most_vectors` tokens. There is always room for the first text of a step."""
    num_vectors = output.num_token_vectors + seq.returns_all_tokens * seq.num_tokens
    return not output.num_seqs or (seq.num_tokens <= budget and num_vectors <= most_vectors)


def num_tokens_left(under_way: list[Sequence], waiting: RequestQueue) -> int:
    """Prompt tokens left to compute in this step and later ones; those of waiting prompts include cached beginnings."""
    return sum(map(_num_left, under_way)) + waiting.num_tokens


def _num_left(seq: Sequence) -> int:
    """Tokens of `seq` that are known and not computed."""
    return len(seq.token_ids) - seq.num_computed_tokens


def _shorter_by_half(first: Sequence, waiting: RequestQueue) -> Iterator[Sequence]:
    """Waiting sequences of at most half the tokens that `first` has left, in order.

    Stops at one that was refused blocks: the next blocks that become free are for it.
    """
    most = _num_left(first) // 2
    for seq in list(islice(waiting, _LOOKED_AT)):
        if seq.shortage is not None:
            return
        if len(seq.token_ids) <= most and seq.request.yields <= first.request.yields:
            yield seq
