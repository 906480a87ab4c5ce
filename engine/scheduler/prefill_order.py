"""Divides a step's tokens among prompts: the first in line continues, and shorter ones need not wait for its end."""

from collections.abc import Callable, Iterator
from itertools import islice

from oarlock.engine.scheduler.output import SchedulerOutput
from oarlock.engine.scheduler.request_queue import RequestQueue
from oarlock.engine.scheduler.sequence import Sequence, Status

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
