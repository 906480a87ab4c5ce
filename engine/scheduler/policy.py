"""Policy of a step: which sequence is preempted, which prompts come first, and how many drafts and prompt tokens fit.

Each decoding sequence gets one token. The remaining tokens of a step are for drafts and for prompts, and neither takes
the part of the other: a prompt would otherwise wait until answers end, or drafts until no prompt comes. Without a limit
on its time a chunk of a long prompt would delay everyone's next token by the time of fifty steps without it.

Changes no sequence, queue or block.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from oarlock.engine.kv_cache.manager import KVCacheManager
from oarlock.engine.scheduler.request_queue import RequestQueue
from oarlock.engine.scheduler.sequence import SchedulerOutput, Sequence
from oarlock.engine.scheduler.step_cost import StepCosts
from oarlock.workers.config import StepCost

# Most other sequences that are admitted before one that waits only because it was preempted.
MAX_PASSED = 4
_LOOKED_AT = 64  # waiting sequences
RATIO = 2.5  # of the time of a step with prompt tokens to one without, where no limit is given
FEWEST_TOKENS = 16  # of a chunk, however long a step takes: prompts must make progress


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


def give_way(under_way: list[Sequence], waiting: RequestQueue) -> tuple[list[Sequence], list[Sequence], bool]:
    """Split the prompts `under_way` into those that continue and those that continue only in a step with no others;
    return also whether any prompt is left that does not yield. Such a prompt's steps are not made longer by others."""
    urgent = [seq for seq in under_way if not seq.request.yields]
    if not urgent and not waiting.is_urgent:
        return under_way, [], False
    return urgent, [seq for seq in under_way if seq.request.yields], True


def has_room_for_text(seq: Sequence, output: SchedulerOutput, budget: int, most_vectors: int) -> bool:
    """Whether a step has room for a text that cannot be divided: `budget` tokens are left, and the step returns vectors
    of at most `most_vectors` tokens. There is always room for the first text of a step."""
    num_vectors = output.num_token_vectors + seq.returns_all_tokens * seq.num_tokens
    return not output.num_seqs or (seq.num_tokens <= budget and num_vectors <= most_vectors)


def num_tokens_left(under_way: list[Sequence], waiting: RequestQueue) -> int:
    """Prompt tokens left to compute in this step and later ones; those of waiting prompts include cached beginnings."""
    return sum(map(num_left, under_way)) + waiting.num_tokens


def num_joining(running: list[Sequence], under_way: list[Sequence], waiting: RequestQueue, num_free_rows: int) -> int:
    """Count the sequences that will soon decode: prompts `under_way`, and waiting ones for which there are rows.

    Sequences that yield count only if all that run yield, since they must not make the steps of others longer.
    """
    is_urgent = not all(seq.request.yields for seq in running)
    num_waiting = sum(len(seqs) for (yields, _), seqs in waiting.lines.items() if not (is_urgent and yields))
    num_under_way = sum(not (is_urgent and seq.request.yields) for seq in under_way)
    return num_under_way + min(num_waiting, num_free_rows)


def num_left(seq: Sequence) -> int:
    """Tokens of `seq` that are known and not computed."""
    return len(seq.token_ids) - seq.num_computed_tokens


def shorter_by_half(first: Sequence, waiting: RequestQueue) -> Iterator[Sequence]:
    """Waiting sequences of at most half the tokens that `first` has left, in order.

    Stops at one that was refused blocks: the next blocks that become free are for it.
    """
    most = num_left(first) // 2
    for seq in list(islice(waiting, _LOOKED_AT)):
        if seq.shortage is not None:
            return
        if len(seq.token_ids) <= most and seq.request.yields <= first.request.yields:
            yield seq


class StepBudget:
    """Divides the part of a step that decoding sequences leave among drafts and prompts."""

    def __init__(self, costs: StepCosts, max_step_s: float | None, num_stages: int) -> None:
        """`max_step_s`: limit for a step that continues answers; None: `RATIO` times one without prompt tokens.
        `num_stages`: pipeline stages through which a step passes."""
        self._costs = costs
        self._max_step_s = max_step_s
        self._num_stages = num_stages
        self._part = self._num_after_part = 0  # the last division: the tokens of a step, and those left after it

    def drafts(self, num_decodes: int, room: int, *, beside_prompts: bool) -> int:
        """Most drafts of a step that has `room` tokens beside `num_decodes` sequences that get one each.

        `beside_prompts`: there are prompts that could be computed. They get half of the room, and half of the time if
        it is limited.
        """
        if not beside_prompts:
            return room
        room //= 2
        if self._max_step_s is not None and self._costs.seconds(num_decodes) is not None:
            step_s, row_s = self._costs.step_and_row_s(num_decodes)
            room = min(room, int(max(0.0, self._max_step_s - step_s) / 2 / row_s))
        return room

    def prompt_tokens(self, num_rows: int, room: int, num_left: int, num_joining: int = 0) -> int:
        """Return the number of prompt tokens for a step with `room` for them beside `num_rows` rows, drafts included.

        `num_left`: prompt tokens to compute in this step and later ones. `num_joining`: sequences that will soon decode
        beside these rows. The step may take `RATIO` times as long as a step without prompts will take then. If the rows
        of today set the limit, a step for few rows takes few prompt tokens, and the batch stays small, and the server
        slow, as long as requests keep coming.

        The estimates of time are wrong if other programs have slowed the machine down since steps without prompts ran,
        and in a crowd no such step comes to correct them. But a prompt token costs no more than a row with the same
        context, so a number of tokens in proportion to the rows is within the limit whatever the estimates are.
        """
        measured = self._costs.measured
        if self._num_stages > 1 and measured is not None and measured.fixed_s:
            room = min(room, self._of_a_part(num_left, measured))
        if num_rows == 0 or num_left == 0:
            return room
        rows_s = self._costs.seconds(num_rows)
        if rows_s is None:
            return room
        fewest, limit_s, num_soon = FEWEST_TOKENS, self._max_step_s, num_rows + num_joining
        if limit_s is None:
            fewest = max(fewest, int(RATIO * num_soon) - num_rows)
            limit_s = RATIO * max(rows_s, self._costs.seconds(num_soon) or 0.0)
        return min(room, max(fewest, self._costs.prompt_tokens_in(limit_s - rows_s, num_rows, room)))

    def _of_a_part(self, num_left: int, cost: StepCost) -> int:
        """Tokens of each step when `num_left` tokens are divided into several, so that all stages have one to compute;
        constant until other prompts come.

        With m steps each takes (fixed + token x num_left / m) / stages in each stage, and the last one leaves the last
        stage after m + stages - 1 of those times: soonest for m = sqrt((stages - 1) x token x num_left / fixed).
        """
        if num_left > self._num_after_part:
            fixed_s = cost.fixed_s + cost.experts_s  # parts are long enough to have all experts
            best = math.sqrt((self._num_stages - 1) * cost.token_s * num_left / fixed_s)
            self._part = -(-num_left // max(1, round(min(best, num_left / FEWEST_TOKENS))))
        self._num_after_part = max(0, num_left - self._part)
        return max(1, self._part)
