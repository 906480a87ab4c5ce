"""Decode state of the running sequences as arrays by row, kept from step to step.

A step takes a few operations on whole arrays, and work by sequence only where more is to be done than to compute one
token and to append one: a new block, a full block to cache, a stop token, the end, logprobs, a grammar. Positions tell
when: before `plain_until` a row is scheduled, before `look_at` its token is appended, without a look at its sequence.

Knows sequences and positions. Does not know free blocks, policy or tensors.
"""

from array import array
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from oarlock.engine.scheduler.kv_cache_manager import KVCacheManager
from oarlock.engine.scheduler.output import NOT_KNOWN, Decodes, ScheduledTokens, SchedulerOutput
from oarlock.engine.scheduler.sequence import Sequence, Status
from oarlock.engine.spec_decode.drafter import Candidate, Drafter

_STOP_IDS = 8  # of one row; a sequence with more needs a look at each of its tokens
_NEVER = -1  # a position that no token is before
_NO_STOP = -1


class RunningColumns:
    """Columns with one entry for each row of the engine's tables; only the rows in `order` are valid.

    `num_computed` and `last_token_s` are kept here alone while a sequence runs. All other columns repeat attributes of
    the sequence: a change of the sequence is followed by a call of `refresh`, and `audit` compares.
    """

    def __init__(self, max_num_seqs: int, block_size: int, *, caches_blocks: bool) -> None:
        self._block_size = block_size
        self._caches_blocks = caches_blocks
        self.order = np.empty(0, np.int64)  # the rows in use, in the order of admission; replaced, never changed
        self.seqs: list[Sequence | None] = [None] * max_num_seqs
        self._token_ids: list[list[int]] = [[]] * max_num_seqs  # the same lists as in the sequences
        # Number of releases so far, and that number when each row was last released: an answer for one use of a row is
        # not taken for the next use.
        self.num_released = 0
        self._released_at = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.last_token_s = np.zeros(max_num_seqs)  # nan: none yet
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.newest = np.zeros(max_num_seqs, np.int32)  # the last known token
        self.plain_until = np.zeros(max_num_seqs, np.int64)  # position, exclusive
        self.look_at = np.zeros(max_num_seqs, np.int64)  # position
        self._sent_of: np.ndarray | None = None  # rows of the last events; `_sent` holds while they are the same
        self._sent = array("q"), array("i")
        self.request_ids = np.zeros(max_num_seqs, np.int64)
        self.num_cached_tokens = np.zeros(max_num_seqs, np.int32)
        self.clients = np.zeros(max_num_seqs, np.int64)  # index into `client_names`
        self.client_names: list[str] = []
        self._client_index: dict[str, int] = {}
        self._stop_ids = np.full((_STOP_IDS, max_num_seqs), _NO_STOP, np.int32)
        self._most_stop_ids = 0  # of any row, ever

    # -- rows

    def take(self, seq: Sequence) -> None:
        """Fill the columns of `seq`, which has got its row and its first blocks."""
        row, stop_ids, client = seq.row, sorted(seq.stop_ids), seq.request.client
        self.order = np.append(self.order, row)
        self.seqs[row], self._token_ids[row] = seq, seq.token_ids
        self.last_token_s[row] = np.nan if seq.last_token_s is None else seq.last_token_s
        self.num_computed[row] = seq.num_computed_tokens
        seq.columns = self
        self.request_ids[row], self.num_cached_tokens[row] = seq.request_id, seq.num_cached_tokens
        if client not in self._client_index:
            self._client_index[client] = len(self.client_names)
            self.client_names.append(client)
        self.clients[row] = self._client_index[client]
        self._stop_ids[:, row] = _NO_STOP
        if len(stop_ids) <= _STOP_IDS:
            self._stop_ids[: len(stop_ids), row] = stop_ids
            self._most_stop_ids = max(self._most_stop_ids, len(stop_ids))
        self.refresh(seq)

    def release(self, seq: Sequence) -> None:
        """Empty the columns of `seq`, which stops running and still has its row."""
        row, last_s = seq.row, seq.last_token_s
        self.order = self.order[self.order != row]
        self.seqs[row], self._token_ids[row] = None, []
        self.num_released += 1
        self._released_at[row] = self.num_released
        seq.columns = None
        seq.num_computed_tokens, seq.last_token_s = 0, last_s

    def refresh(self, seq: Sequence) -> None:
        """Write the columns that follow from the state of `seq`, which runs."""
        self.num_tokens[seq.row], self.newest[seq.row] = len(seq.token_ids), seq.token_ids[-1]
        self.refresh_plain(seq)
        self.refresh_look(seq)

    def refresh_tokens(self, seq: Sequence) -> None:
        """Refresh `seq` when only the token that a decode sampled was appended."""
        self.num_tokens[seq.row], self.newest[seq.row] = len(seq.token_ids), seq.token_ids[-1]
        if not seq.is_watched:
            self.refresh_look(seq)  # it may be the first

    def refresh_plain(self, seq: Sequence) -> None:
        """Refresh `seq` when only its computed tokens or blocks have changed."""
        row = seq.row
        if seq.decodes_alone or len(seq.token_ids) > self.num_computed.item(row) + 1:
            self.plain_until[row] = _NEVER
        else:
            self.plain_until[row] = min(len(seq.block_ids) * self._block_size, seq.num_to_compute)

    def refresh_look(self, seq: Sequence) -> None:
        """Refresh `seq` when only its blocks were offered to the prefix cache."""
        if seq.first_token_s is None or seq.is_watched or len(seq.stop_ids) > _STOP_IDS:
            self.look_at[seq.row] = _NEVER
        elif self._caches_blocks:
            full_at = (seq.num_cached_blocks + 1) * self._block_size - 1
            self.look_at[seq.row] = min(full_at, seq.final_len - 2)
        else:
            self.look_at[seq.row] = seq.final_len - 2

    # -- decodes

    def with_oldest(self, most: int) -> np.ndarray:
        """Rows of `order` with the prompts under way, and the `most` oldest sequences that decode."""
        decodes = self.num_tokens[self.order] <= self.num_computed[self.order] + 1  # bool [R]
        by_age = sorted(self.order[decodes].tolist(), key=lambda row: self.seqs[row].key)
        return self.order[~decodes | np.isin(self.order, by_age[:most])]

    def schedule(self, rows: np.ndarray, positions: np.ndarray) -> Decodes:
        """Schedule one token at `positions`, int64 [D], for each of the sequences in `rows`, int64 [D]."""
        self.num_computed[rows] = positions + 1
        token_ids = self.newest[rows]
        token_ids[self.num_tokens[rows] <= positions] = NOT_KNOWN
        return Decodes(rows, positions, token_ids, self.num_released, self.seqs)

    def needs_look(self, rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """bool [D]: where more must be done than to append `token_ids`, which the step at `positions` sampled."""
        found = positions >= self.look_at[rows]
        for stop_ids in self._stop_ids[: self._most_stop_ids]:
            found |= stop_ids[rows] == token_ids
        return found

    def still_run(self, rows: np.ndarray, num_released: int) -> np.ndarray:
        """bool [D]: which of `rows` were not given back since the releases numbered `num_released`."""
        return self._released_at[rows] <= num_released

    def append(self, rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray, now: float) -> np.ndarray:
        """Append `token_ids`, which the step at `positions` sampled; return the seconds since the tokens before."""
        self.num_tokens[rows] = positions + 2
        self.newest[rows] = token_ids
        since_s = now - self.last_token_s[rows]
        self.last_token_s[rows] = now
        lists = self._token_ids
        for row, token in zip(rows.tolist(), token_ids.tolist(), strict=True):
            lists[row].append(token)
        return since_s

    def sent_with(self, rows: np.ndarray) -> tuple[array, array]:
        """Request ids and numbers of cached tokens that are sent with the tokens of `rows`. Not to be changed."""
        if rows is not self._sent_of:
            self._sent_of = rows
            self._sent = (
                array("q", self.request_ids[rows].tobytes()),
                array("i", self.num_cached_tokens[rows].tobytes()),
            )
        return self._sent

    # -- state

    def audit(self, running: list[Sequence]) -> None:
        """Raise AssertionError unless columns and sequences agree; `running` in the order of admission."""
        assert self.order.tolist() == [seq.row for seq in running], "rows in another order"
        held = [row for row, seq in enumerate(self.seqs) if seq is not None]
        assert held == sorted(self.order.tolist()), "a row is held by a sequence that does not run"
        for seq in running:
            row, names = seq.row, ("num_tokens", "newest", "plain_until", "look_at")
            assert self.seqs[row] is seq and self._token_ids[row] is seq.token_ids and seq.columns is self
            told = [int(getattr(self, name)[row]) for name in names]
            self.refresh(seq)
            assert told == [int(getattr(self, name)[row]) for name in names], f"row {row} was not kept up to date"
            assert self.request_ids[row] == seq.request_id and self.num_cached_tokens[row] == seq.num_cached_tokens
            assert self.client_names[self.clients[row]] == seq.request.client
            stop_ids = {int(stop) for stop in self._stop_ids[:, row] if stop != _NO_STOP}
            assert stop_ids == (seq.stop_ids if len(seq.stop_ids) <= _STOP_IDS else set())


Drafts = dict[int, list[int]]  # by row of the engine's tables


def may_preempt_next(num_running: int, num_available_blocks: int) -> bool:
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
