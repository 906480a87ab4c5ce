"""Schedules decodes: one token for each running sequence, most rows of most steps, and the drafts that follow some.

Where ranks form a pipeline, a step passes from stage to stage, and as many are in flight as there are stages, each with
other sequences: a token is embedded on the first stage, and known when the last one has sampled it. Prompts continue
while their earlier chunks are in flight: stages run steps in the order in which they were sent.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from oarlock.engine.scheduler.columns import RunningColumns
from oarlock.engine.scheduler.kv_cache_manager import KVCacheManager
from oarlock.engine.scheduler.output import ScheduledTokens, SchedulerOutput
from oarlock.engine.scheduler.sequence import Sequence, Status
from oarlock.engine.spec_decode.drafter import Candidate, Drafter

Drafts = dict[int, list[int]]  # by row of the engine's tables


def must_wait(num_running: int, num_available_blocks: int) -> bool:
    """Whether the next step can only be scheduled when the answer to the one in flight is there. Then the whole step
    waits: a step without some of its sequences, and another one for them, would read all weights twice.

    All wait when a sequence might be preempted: each may need a block, and the token that is being sampled would be
    lost, or the sequence to preempt might just end. A sequence that ends by its length is known to, and gets no further
    row; one that ends by a stop token gets one, whose token is dropped.
    """
    return num_available_blocks < num_running


class MicroBatch(NamedTuple):
    """Sequences for one of several steps in flight. `rows`, int64 [R]: those that may run now, in the order of
    admission. `share`: most sequences that decode in one step."""

    rows: np.ndarray
    share: int


def next_micro_batch(columns: RunningColumns, num_parts: int) -> MicroBatch:
    """Choose all prompts under way, and those sequences with a known newest token that have waited longest: at most a
    `num_parts`-th of all that decode, so that steps in flight are equally long and no stage waits for another."""
    rows = columns.order
    num_behind = columns.num_tokens[rows] - columns.num_computed[rows]  # 0 or less: its token is being sampled
    share = -(-int((num_behind <= 1).sum()) // num_parts)
    is_chosen, ready = num_behind > 1, (num_behind == 1).nonzero()[0]
    if len(ready) > share:
        since_s = np.nan_to_num(columns.last_token_s[rows[ready]], nan=-np.inf)  # no token yet: its turn comes first
        ready = ready[np.argsort(since_s, kind="stable")[:share]]
    is_chosen[ready] = True
    return MicroBatch(rows[is_chosen], share)


def may_preempt(columns: RunningColumns, rows: np.ndarray, num_available_blocks: int) -> bool:
    """Whether there may be too few blocks for one more token of each of `rows` that decodes. Then the steps in flight
    must be answered first: the token of the sequence to preempt might be among them."""
    positions = columns.num_computed[rows]
    may_need = (columns.num_tokens[rows] <= positions + 1) & (positions >= columns.plain_until[rows])
    return int(may_need.sum()) > num_available_blocks


def any_behind(columns: RunningColumns) -> bool:
    """Whether a prompt is under way: some running sequence has more than its newest token to compute."""
    rows = columns.order
    return bool((columns.num_tokens[rows] > columns.num_computed[rows] + 1).any())


def schedule_decodes(
    columns: RunningColumns,
    rows: np.ndarray,
    output: SchedulerOutput,
    block_size: int,
    allocate_next_block: Callable[[Sequence, SchedulerOutput], bool],
    fail: Callable[[Sequence], None],
    drafts: Drafts,
    allocate_for_drafts: Callable[[Sequence, int, SchedulerOutput], int],
) -> list[Sequence]:
    """Schedule one token for each sequence of `rows`, int64 [R], that is at most one behind; return those more behind.

    `allocate_next_block` may preempt, and returns whether its sequence got one. `fail` is called from an `except`
    block. `allocate_for_drafts` returns for how many of a sequence's `drafts` there are blocks, and does not preempt.
    """
    positions = columns.num_computed[rows]
    needs_look = positions >= columns.plain_until[rows]
    if drafts:
        needs_look |= np.isin(rows, list(drafts))
    to_look_at = needs_look.nonzero()[0]
    if not len(to_look_at):
        output.decodes = columns.schedule(rows, positions)
        return []
    is_plain, behind = np.ones(len(rows), bool), []
    num_released = columns.num_released
    for index in to_look_at.tolist():
        seq = columns.seqs[rows[index]]
        if seq is None:
            continue  # preempted earlier in this loop
        try:
            if not _may_decode(seq, output, block_size, allocate_next_block, behind):
                is_plain[index] = False
                continue
            drafted = drafts.get(seq.row, [])
            drafted = drafted[: allocate_for_drafts(seq, len(drafted), output)] if drafted else drafted
            if seq.decodes_alone or drafted:
                is_plain[index] = False
                start, count = seq.num_computed_tokens, 1 + len(drafted)
                output.scheduled.append(ScheduledTokens(seq, start, count, seq.samples, drafts=tuple(drafted)))
                seq.num_computed_tokens = start + count
            columns.refresh_plain(seq)
        except Exception:
            fail(seq)
    if columns.num_released > num_released:
        is_plain &= columns.still_run(rows, num_released)
    if not is_plain.all():
        rows, positions = rows[is_plain], positions[is_plain]
    output.decodes = columns.schedule(rows, positions)
    output.scheduled = [item for item in output.scheduled if item.seq.status is Status.RUNNING]
    return [seq for seq in behind if seq.status is Status.RUNNING]


def _may_decode(
    seq: Sequence,
    output: SchedulerOutput,
    block_size: int,
    allocate_next_block: Callable[[Sequence, SchedulerOutput], bool],
    behind: list[Sequence],
) -> bool:
    """Whether `seq` gets a token now; if so, it has a block for it."""
    start = seq.num_computed_tokens
    if len(seq.token_ids) > start + 1:
        behind.append(seq)
        return False
    if start >= seq.num_to_compute:
        return False  # it ends with the answer to the step before
    return start < len(seq.block_ids) * block_size or allocate_next_block(seq, output)


def choose_drafts(columns: RunningColumns, rows: np.ndarray, drafter: Drafter, most: int) -> Drafts:
    """Choose drafts for those of `rows`, int64 [R], that decode next, at most `most` in all. No sequence gets more than
    it may still generate before the token that the model samples after them."""
    if not len(rows) or most <= 0 or not drafter.may_pay(len(rows)):
        return {}
    drafted: list[int] = []
    candidates: list[Candidate] = []
    for row in rows.tolist():
        seq = columns.seqs[row]
        assert seq is not None
        room = seq.final_len - len(seq.token_ids) - 1
        if room > 0 and seq.first_token_s is not None and len(seq.token_ids) <= columns.num_computed[row] + 1:
            seq.draft_state = seq.draft_state or drafter.new_state()
            candidates.append(Candidate(seq.draft_state, seq.token_ids, room))
            drafted.append(row)
    chosen = drafter.choose(candidates, len(rows), most)
    return {row: some for row, some in zip(drafted, chosen, strict=True) if some}


def allocate_for_drafts(
    manager: KVCacheManager, num_running: int, seq: Sequence, most: int, output: SchedulerOutput
) -> int:
    """Allocate blocks for up to `most` tokens after the next one of `seq`; return for how many. Leaves a block for each
    running sequence where there are so many, so that nothing is preempted for drafts."""
    if output.num_preempted:
        return 0
    num_columns, spare = len(seq.block_ids), max(0, manager.num_available - num_running)
    num_tokens = min(seq.num_computed_tokens + 1 + most, (num_columns + spare) * manager.block_size)
    if manager.allocate_slots(seq, num_tokens):
        output.add_blocks(seq, num_columns)
    return num_tokens - seq.num_computed_tokens - 1


def drafts_wait(columns: RunningColumns, drafter: Drafter, most: int) -> bool:
    """Whether the next step must wait for the one in flight because of drafts: those in flight, whose answer tells how
    many tokens there are, or those of the next step, which must follow a known token.

    A sequence that has no drafts after its known tokens does not delay the others.
    """
    rows = columns.order
    is_drafting = columns.num_computed[rows] > columns.num_tokens[rows]
    return bool(is_drafting.any()) or bool(choose_drafts(columns, rows, drafter, most))
