"""Policy of a step: the sequence to preempt, the order of prompts, and the number of drafts and prompt tokens.

Each decoding sequence gets one token. Drafts and prompts share the remaining tokens of a step, and each keeps its own
part: otherwise prompts would wait until other requests end, or drafts until no prompt comes. The time of a step is
limited, because a chunk of a long prompt could otherwise delay every next token by the time of fifty decode steps.

Changes no sequence, queue or block.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from oarlock.engine.kv_cache.sequence_memory import SequenceMemory
from oarlock.engine.scheduler.request_queue import RequestQueue
from oarlock.engine.scheduler.sequence import SchedulerOutput, Sequence
from oarlock.engine.scheduler.step_cost import StepCosts
from oarlock.workers.config import StepCost

# Maximum number of sequences admitted ahead of a sequence that waits only because it was preempted.
MAX_PASSED = 4
MAX_CONSIDERED = 64  # waiting sequences that a step considers besides those that it admits in order
MAX_STEP_RATIO = 2.5  # maximum ratio of the time of a step with prompt tokens to a decode step, if no limit is set
MIN_CHUNK_TOKENS = 16  # minimum tokens of a chunk, however long a step takes: prompts must make progress


def choose_victim(running: Iterable[Sequence]) -> Sequence:
    """Return the sequence to preempt: the last in the order of service, low-priority sequences first."""
    return max(running, key=lambda seq: (seq.request.is_low_priority, seq.key))


def choose_victim_for_head(
    running: list[Sequence], waiting: RequestQueue, num_rows: int, memory: SequenceMemory
) -> Sequence | None:
    """Choose the sequence to preempt if the head of the queue has no row or too few blocks.

    It is the newest running low-priority sequence of any client if the head has normal priority, or else the newest
    sequence of the client that has most of the `num_rows` rows or of the blocks.

    In the second case return None unless that client has more than its share and more work done, and the head's client
    stays within its own share with the head. A client therefore takes at most its due from another client, and a client
    may have everything while no other client waits. Low-priority sequences are compared only with each other.
    """
    low_priority = [seq for seq in running if seq.request.is_low_priority] if waiting.has_normal_priority else []
    if not low_priority and not waiting.has_several_clients(running):
        return None
    head = waiting[0]
    reserve = reserved_blocks(len(running), head.num_preemptions)
    if len(running) < num_rows and memory.can_allocate(head, reserve):
        return None
    if low_priority:
        return choose_victim(low_priority)
    rows, blocks = Counter[str](), Counter[str]()
    peers = [seq for seq in running if seq.request.is_low_priority == head.request.is_low_priority]
    for seq in peers:
        rows[seq.request.client] += 1
        blocks[seq.request.client] += memory.num_blocks_of(seq)
    client, share = head.request.client, 1 / len(rows.keys() | set(waiting.clients))
    held = {other: max(rows[other] / num_rows, memory.share(blocks[other])) for other in rows}
    wanted = memory.blocks_for(head.num_tokens)
    with_head = max((rows[client] + 1) / num_rows, memory.share(blocks[client] + wanted))
    if with_head > share or not held:
        return None
    heaviest = max(held, key=lambda other: (held[other], other))
    if held[heaviest] <= share or waiting.time_of(heaviest) <= waiting.time_of(client):
        return None
    return choose_victim(seq for seq in peers if seq.request.client == heaviest)


def reserved_blocks(num_running: int, num_preemptions: int) -> int:
    """Return the blocks that must stay free when a sequence with `num_preemptions` is admitted next to `num_running`
    others.

    The reserve is one block per running sequence, so that their growth does not preempt the new sequence at once. The
    final lengths are unknown, and a preemption shows that one block each was too few. Doubling the reserve each time
    bounds the preemptions of one sequence by the logarithm of the pool, whatever `max_tokens` allows.
    """
    return num_running << num_preemptions


def may_be_passed(seq: Sequence, running: list[Sequence], memory: SequenceMemory) -> bool:
    """Return whether later sequences may be admitted before `seq`, which was just refused.

    They may only if it was not passed often, and either waits for a checkpoint of its prefix, or was preempted and
    would fit with the smaller reserve of a new sequence.
    """
    if seq.num_passed >= MAX_PASSED:
        return False
    if seq.awaited_checkpoint is not None:
        return True
    if seq.num_preemptions == 0:
        return False
    return memory.can_allocate(seq, reserved_blocks(len(running), 0))


def split_by_priority(under_way: list[Sequence], waiting: RequestQueue) -> tuple[list[Sequence], list[Sequence], bool]:
    """Split the prompts `under_way` by whether they continue in this step or only in a step without other prompts.

    Also return whether there is a prompt of normal priority: low-priority prompts must not lengthen its steps.
    """
    normal = [seq for seq in under_way if not seq.request.is_low_priority]
    if not normal and not waiting.has_normal_priority:
        return under_way, [], False
    return normal, [seq for seq in under_way if seq.request.is_low_priority], True


def has_room_for_text(seq: Sequence, output: SchedulerOutput, budget: int, most_vectors: int) -> bool:
    """Return whether a step has room for a text that cannot be divided.

    The text must fit into `budget` tokens, and the step may return vectors of at most `most_vectors` tokens. There is
    always room for the first text of a step.
    """
    num_vectors = output.num_token_vectors + seq.returns_token_vectors * seq.num_tokens
    return not output.num_seqs or (seq.num_tokens <= budget and num_vectors <= most_vectors)


def num_tokens_left(under_way: list[Sequence], waiting: RequestQueue) -> int:
    """Return the prompt tokens left to compute in this step and later ones, including cached prefixes of waiting
    prompts."""
    return sum(map(num_left, under_way)) + waiting.num_tokens


def num_upcoming(running: list[Sequence], under_way: list[Sequence], waiting: RequestQueue, num_free_rows: int) -> int:
    """Count the sequences that will soon decode: prompts `under_way`, and waiting prompts for which there are rows.

    Low-priority sequences count only if all running sequences have low priority, since they must not make the steps of
    others longer.
    """
    normal_only = not all(seq.request.is_low_priority for seq in running)
    num_waiting = sum(len(seqs) for (is_low, _), seqs in waiting.lines.items() if not (normal_only and is_low))
    num_under_way = sum(not (normal_only and seq.request.is_low_priority) for seq in under_way)
    return num_under_way + min(num_waiting, num_free_rows)


def num_left(seq: Sequence) -> int:
    """Return the number of tokens of `seq` that are known and not computed."""
    return len(seq.token_ids) - seq.num_computed_tokens


def waiting_of_half_length(first: Sequence, waiting: RequestQueue) -> Iterator[Sequence]:
    """Yield the waiting sequences of at most half the tokens that `first` has left, in order.

    Stop at a sequence that was refused blocks: the next free blocks are reserved for it.
    """
    most = num_left(first) // 2
    for seq in list(islice(waiting, MAX_CONSIDERED)):
        if seq.shortage is not None:
            return
        if len(seq.token_ids) <= most and seq.request.is_low_priority <= first.request.is_low_priority:
            yield seq


class StepBudget:
    """Division of a step's tokens, after its decodes, among drafts and prompts."""

    def __init__(self, costs: StepCosts, max_step_s: float | None, num_stages: int) -> None:
        """Set the time limit and the pipeline depth.

        `max_step_s` limits a step that contains decodes; None: `MAX_STEP_RATIO` times the time of a step without
        prompt tokens.
        `num_stages` is the number of pipeline stages through which a step passes.
        """
        self._costs = costs
        self._max_step_s = max_step_s
        self._num_stages = num_stages
        self._part = self._num_after_part = 0  # last division: the tokens of a step, and the tokens left after it

    def drafts(self, num_decodes: int, room: int, *, beside_prompts: bool) -> int:
        """Return the maximum number of drafts in a step with `room` tokens next to `num_decodes` decoded tokens.

        `beside_prompts`: some prompts could be computed. They get half of the room, and half of the time if it is
        limited.
        """
        if not beside_prompts:
            return room
        room //= 2
        if self._max_step_s is not None and self._costs.seconds(num_decodes) is not None:
            step_s, row_s = self._costs.step_and_row_s(num_decodes)
            room = min(room, int(max(0.0, self._max_step_s - step_s) / 2 / row_s))
        return room

    def prompt_tokens(self, num_rows: int, room: int, num_left: int, num_upcoming: int = 0) -> int:
        """Return the number of prompt tokens for a step with `room` for them next to `num_rows` rows, drafts included.

        `num_left`: prompt tokens to compute in this step and later ones. `num_upcoming`: sequences that will soon
        decode together with these rows. The step may take `MAX_STEP_RATIO` times as long as a step without prompts will
        take then. If the limit followed from the current rows, a step with few rows would take few prompt tokens, so
        that the batch would stay small and the server slow as long as requests keep coming.

        The estimates of time are wrong if other programs have slowed the machine down since steps without prompts ran,
        and under a constant load no such step comes to correct them. But a prompt token costs no more than a row with
        the same context, so a number of tokens proportional to the rows is within the limit whatever the estimates are.
        """
        measured = self._costs.measured
        if self._num_stages > 1 and measured is not None and measured.fixed_s:
            room = min(room, self._tokens_per_part(num_left, measured))
        if num_rows == 0 or num_left == 0:
            return room
        rows_s = self._costs.seconds(num_rows)
        if rows_s is None:
            return room
        fewest, limit_s, num_soon = MIN_CHUNK_TOKENS, self._max_step_s, num_rows + num_upcoming
        if limit_s is None:
            fewest = max(fewest, int(MAX_STEP_RATIO * num_soon) - num_rows)
            limit_s = MAX_STEP_RATIO * max(rows_s, self._costs.seconds(num_soon) or 0.0)
        return min(room, max(fewest, self._costs.prompt_tokens_in(limit_s - rows_s, num_rows, room)))

    def end_prompts(self) -> None:
        """Begin a new division with the next prompts, because no prompt token is left."""
        self._num_after_part = 0

    def _tokens_per_part(self, num_left: int, cost: StepCost) -> int:
        """Return the tokens of each step when `num_left` tokens are divided into steps that keep all pipeline stages
        busy.

        The result stays constant until other prompts come. With m steps, each takes (fixed + token x num_left / m) /
        stages in each stage, and the last step leaves the last stage after m + stages - 1 of these times. The minimum
        is at m = sqrt((stages - 1) x token x num_left / fixed).
        """
        if num_left > self._num_after_part:
            fixed_s = cost.fixed_s + cost.experts_s  # parts are long enough to use all experts
            best = math.sqrt((self._num_stages - 1) * cost.token_s * num_left / fixed_s)
            self._part = -(-num_left // max(1, round(min(best, num_left / MIN_CHUNK_TOKENS))))
        self._num_after_part = max(0, num_left - self._part)
        return max(1, self._part)
