"""Decode state of the running sequences as arrays by row, kept from step to step, and the choice of rows to decode.

A step takes a few operations on whole arrays. It handles a sequence individually only if it needs more than computing
and appending one token: a new block, a full block to cache, a stop token, the end, a grammar. Two positions per row
mark the limits: before `plain_until` the row is scheduled, and before `inspect_at` its token is appended, without
inspecting its sequence.

If ranks form a pipeline, a step passes from stage to stage. There are then as many steps in flight as stages, each with
other sequences: a token is embedded on the first stage and known when the last stage has sampled it. Prompts continue
while their earlier chunks are in flight, since stages run steps in the order in which they were sent.

Knows sequences and positions. Does not know free blocks, policy or tensors.
"""

from array import array
from typing import NamedTuple

import numpy as np

from oarlock.engine.scheduler.sequence import NOT_KNOWN, Decodes, Sequence
from oarlock.engine.spec_decode.drafter import Candidate, Drafter

_STOP_IDS = 8  # stop ids of a row; each token of a sequence with more is inspected
_NEVER = -1  # position that precedes every token
_NO_STOP = -1
_RECENT = 128  # exceeds the tokens of a block: caching a full block settles its row, each row at another step


Drafts = dict[int, list[int]]  # row of the engine's tables -> drafts


class MicroBatch(NamedTuple):
    """Sequences for one of several steps in flight.

    `rows`, int64 [R], may run now, in the order of admission. `share` is the maximum number of sequences that
    decode in a step.
    """

    rows: np.ndarray
    share: int


class DecodeState:
    """Arrays with one entry for each row of the engine's tables; only the rows in `order` are valid.

    While a sequence runs, `num_computed` and `last_token_s` are stored only here. All other arrays repeat attributes of
    the sequence: `refresh` must be called after a change of the sequence, and `audit` compares them.
    """

    def __init__(self, max_num_seqs: int, block_size: int, *, caches_blocks: bool) -> None:
        self._block_size = block_size
        self._caches_blocks = caches_blocks
        self.order = np.empty(0, np.int64)  # rows in use, in the order of admission; replaced, never changed
        self.seqs: list[Sequence | None] = [None] * max_num_seqs
        self._token_ids: list[list[int]] = [[]] * max_num_seqs  # the same lists as in the sequences
        # Newest tokens of each row, not yet in its list: appending to a thousand lists would cost more than the step.
        self._recent = np.zeros((_RECENT, max_num_seqs), np.int32)
        self.num_recent = np.zeros(max_num_seqs, np.int64)
        # Number of releases so far, and its value at each row's last release. They prevent a result for one use of a
        # row from being applied to the next use.
        self.num_released = 0
        self._released_at = np.zeros(max_num_seqs, np.int64)
        self.num_computed = np.zeros(max_num_seqs, np.int64)
        self.last_token_s = np.zeros(max_num_seqs)  # nan: no token yet
        self.num_tokens = np.zeros(max_num_seqs, np.int64)
        self.newest = np.zeros(max_num_seqs, np.int32)  # last known token
        self.plain_until = np.zeros(max_num_seqs, np.int64)  # position, exclusive
        self.inspect_at = np.zeros(max_num_seqs, np.int64)  # position
        self.mask_s = np.zeros(max_num_seqs)  # seconds that the next mask is expected to take; 0.0 if it is fast
        self.may_be_slow = False  # whether any of them was above 0 since the last check
        self._sent_of: np.ndarray | None = None  # rows of the last events; `_sent` is valid while they are the same
        self._sent = array("q"), array("i")
        self.request_ids = np.zeros(max_num_seqs, np.int64)
        self.num_cached_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_top = np.full(max_num_seqs, -1, np.int32)  # number of alternatives sent with a token; -1: no logprobs
        self.num_with_logprobs = 0  # running sequences with logprobs
        self.num_adapted = 0  # running sequences with an adapter
        self.clients = np.zeros(max_num_seqs, np.int64)  # index into `client_names`
        self.client_names: list[str] = []
        self._client_index: dict[str, int] = {}
        self._stop_ids = np.full((_STOP_IDS, max_num_seqs), _NO_STOP, np.int32)
        self._most_stop_ids = 0  # maximum over all rows so far

    # -- rows

    def take(self, seq: Sequence) -> None:
        """Fill the row of `seq`, which has just got its row and first blocks."""
        row, stop_ids, client = seq.row, sorted(seq.stop_ids), seq.request.client
        self.order = np.append(self.order, row)
        self.seqs[row], self._token_ids[row], self.num_recent[row] = seq, seq.token_ids, 0
        self.last_token_s[row] = np.nan if seq.last_token_s is None else seq.last_token_s
        self.num_computed[row] = seq.num_computed_tokens
        seq.decode_state = self
        self.request_ids[row], self.num_cached_tokens[row] = seq.request_id, seq.timeline.cached_tokens
        if (num_top := seq.request.params.logprobs) is not None:
            self.num_top[row] = num_top
            self.num_with_logprobs += 1
        self.num_adapted += seq.adapter is not None
        if client not in self._client_index:
            self._client_index[client] = len(self.client_names)
            self.client_names.append(client)
        self.clients[row] = self._client_index[client]
        self.refresh_mask(seq)
        self._stop_ids[:, row] = _NO_STOP
        if len(stop_ids) <= _STOP_IDS:
            self._stop_ids[: len(stop_ids), row] = stop_ids
            self._most_stop_ids = max(self._most_stop_ids, len(stop_ids))
        self.refresh(seq)

    def release(self, seq: Sequence) -> None:
        """Empty the row of `seq`, which stops running and still has its row."""
        row, last_s = seq.row, seq.last_token_s
        self.settle(row)
        self.order = self.order[self.order != row]
        self.seqs[row], self._token_ids[row] = None, []
        if self.num_top[row] >= 0:
            self.num_top[row] = -1
            self.num_with_logprobs -= 1
        self.num_adapted -= seq.adapter is not None
        self.num_released += 1
        self._released_at[row] = self.num_released
        seq.decode_state = None
        seq.num_computed_tokens, seq.last_token_s = 0, last_s

    def refresh_mask(self, seq: Sequence) -> None:
        """Refresh `seq` if only the cost of its masks may have changed."""
        seconds = 0.0 if seq.grammar_matcher is None else seq.grammar_matcher.expected_s
        self.mask_s[seq.row] = seconds
        self.may_be_slow |= seconds > 0

    def settle(self, row: int) -> None:
        """Append the newest tokens of a row to the list of its sequence."""
        if count := self.num_recent.item(row):
            self._token_ids[row] += self._recent[:count, row].tolist()
            self.num_recent[row] = 0

    def refresh(self, seq: Sequence) -> None:
        """Write all values derived from the state of `seq`, which runs."""
        self.num_tokens[seq.row], self.newest[seq.row] = len(seq.token_ids), seq.token_ids[-1]
        self.refresh_plain(seq)
        self.refresh_inspect_at(seq)
        if seq.inspects_each_token:
            self.refresh_mask(seq)

    def refresh_tokens(self, seq: Sequence) -> None:
        """Refresh `seq` if only the token that a decode sampled was appended."""
        self.num_tokens[seq.row], self.newest[seq.row] = len(seq.token_ids), seq.token_ids[-1]
        if seq.inspects_each_token:
            self.refresh_mask(seq)
        else:
            self.refresh_inspect_at(seq)  # it may be the first token

    def refresh_plain(self, seq: Sequence) -> None:
        """Refresh `seq` if only its computed tokens or blocks have changed."""
        row = seq.row
        if seq.decodes_individually or self.num_tokens.item(row) > self.num_computed.item(row) + 1:
            self.plain_until[row] = _NEVER
        else:
            self.plain_until[row] = min(len(seq.block_ids) * self._block_size, seq.num_to_compute)

    def refresh_inspect_at(self, seq: Sequence) -> None:
        """Refresh `seq` if only its blocks were offered to the prefix cache."""
        if seq.timeline.first_token_s is None or seq.inspects_each_token or len(seq.stop_ids) > _STOP_IDS:
            self.inspect_at[seq.row] = _NEVER
        elif self._caches_blocks:
            full_at = (seq.num_cached_blocks + 1) * self._block_size - 1
            self.inspect_at[seq.row] = min(full_at, seq.final_len - 2)
        else:
            self.inspect_at[seq.row] = seq.final_len - 2

    # -- decodes

    def with_oldest(self, most: int) -> np.ndarray:
        """Return the rows of `order` with unfinished prompts, and with the `most` oldest sequences that decode."""
        decodes = self.num_tokens[self.order] <= self.num_computed[self.order] + 1  # bool [R]
        if len(decodes.nonzero()[0]) <= most:
            return self.order
        by_age = sorted(self.order[decodes].tolist(), key=lambda row: self.seqs[row].key)
        return self.order[~decodes | np.isin(self.order, by_age[:most])]

    def schedule(self, rows: np.ndarray, positions: np.ndarray) -> Decodes:
        """Schedule one token at `positions`, int64 [D], for each of the sequences in `rows`, int64 [D]."""
        self.num_computed[rows] = positions + 1
        token_ids = self.newest[rows]
        token_ids[self.num_tokens[rows] <= positions] = NOT_KNOWN
        return Decodes(rows, positions, token_ids, self.num_released, self.seqs)

    def needs_inspection(self, rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
        """Return which rows need more than appending `token_ids`, which the step at `positions` sampled; bool [D]."""
        found = positions >= self.inspect_at[rows]
        for stop_ids in self._stop_ids[: self._most_stop_ids]:
            found |= stop_ids[rows] == token_ids
        return found

    def still_run(self, rows: np.ndarray, num_released: int) -> np.ndarray:
        """Return which of `rows` were not released since the release number `num_released`; bool [D]."""
        return self._released_at[rows] <= num_released

    def append(self, rows: np.ndarray, positions: np.ndarray, token_ids: np.ndarray, now: float) -> np.ndarray:
        """Append `token_ids`, which the step at `positions` sampled; return the seconds since each row's previous
        token."""
        self.num_tokens[rows] = positions + 2
        self.newest[rows] = token_ids
        since_s = now - self.last_token_s[rows]
        self.last_token_s[rows] = now
        num_recent = self.num_recent[rows]
        self._recent[num_recent, rows] = token_ids
        self.num_recent[rows] = num_recent + 1
        for row in rows[num_recent == _RECENT - 1].tolist():
            self.settle(row)
        return since_s

    def event_fields(self, rows: np.ndarray) -> tuple[array, array]:
        """Return the request ids and numbers of cached tokens sent with the tokens of `rows`. They must not be
        changed."""
        if rows is not self._sent_of:
            self._sent_of = rows
            self._sent = (
                array("q", self.request_ids[rows].tobytes()),
                array("i", self.num_cached_tokens[rows].tobytes()),
            )
        return self._sent

    # -- choices

    def next_micro_batch(self, num_parts: int) -> MicroBatch:
        """Choose all unfinished prompts, and the sequences with a known newest token that have waited longest.

        At most a `num_parts`-th of all decoding sequences is chosen, so that the steps in flight are equally long and
        no stage waits for another.
        """
        rows = self.order
        num_behind = self.num_tokens[rows] - self.num_computed[rows]  # 0 or less: its token is being sampled
        share = -(-len((num_behind <= 1).nonzero()[0]) // num_parts)
        is_chosen, ready = num_behind > 1, (num_behind == 1).nonzero()[0]
        if len(ready) > share:
            since_s = np.nan_to_num(self.last_token_s[rows[ready]], nan=-np.inf)  # no token yet: it is first
            ready = ready[np.argsort(since_s, kind="stable")[:share]]
        is_chosen[ready] = True
        return MicroBatch(rows[is_chosen], share)

    def may_preempt(self, rows: np.ndarray, num_available_blocks: int) -> bool:
        """Return whether there may be too few blocks for one more token of each of `rows` that decodes.

        If so, the results of the steps in flight must come first: they might contain the token of the sequence to
        preempt.
        """
        positions = self.num_computed[rows]
        may_need = (self.num_tokens[rows] <= positions + 1) & (positions >= self.plain_until[rows])
        return len(may_need.nonzero()[0]) > num_available_blocks

    def any_unfinished(self) -> bool:
        """Return whether a prompt is unfinished: some running sequence has more than its newest token to compute."""
        return bool(len((self.num_tokens[self.order] > self.num_computed[self.order] + 1).nonzero()[0]))

    def choose_drafts(self, rows: np.ndarray, drafter: Drafter, most: int) -> Drafts:
        """Choose drafts for the sequences of `rows`, int64 [R], that decode next, at most `most` in all.

        A sequence gets no more drafts than it may still generate before the token that the model samples after them.
        """
        if not len(rows) or most <= 0 or not drafter.may_pay(len(rows)):
            return {}
        drafted: list[int] = []
        candidates: list[Candidate] = []
        for row in rows.tolist():
            seq = self.seqs[row]
            assert seq is not None
            token_ids = seq.token_ids
            room = seq.final_len - len(token_ids) - 1
            is_decoding = room > 0 and seq.timeline.first_token_s is not None and not self.mask_s[row]
            if is_decoding and len(token_ids) <= self.num_computed[row] + 1:
                seq.draft_state = seq.draft_state or drafter.new_state()
                candidates.append(Candidate(seq.draft_state, token_ids, room))
                drafted.append(row)
        chosen = drafter.choose(candidates, len(rows), most)
        return {row: some for row, some in zip(drafted, chosen, strict=True) if some}

    def drafts_wait(self, drafter: Drafter, most: int) -> bool:
        """Return whether the next step must wait for the step in flight because of drafts.

        It must if the step in flight has drafts, because only its result shows the number of tokens, or if the next
        step has drafts, which must follow a known token. A sequence without drafts after its known tokens does not
        delay the others.
        """
        is_drafting = self.num_computed[self.order] > self.num_tokens[self.order]
        return bool(len(is_drafting.nonzero()[0]) or self.choose_drafts(self.order, drafter, most))

    # -- state

    def audit(self, running: list[Sequence]) -> None:
        """Raise AssertionError if arrays and sequences disagree; `running` must be in the order of admission."""
        assert self.order.tolist() == [seq.row for seq in running], "rows in another order"
        assert int((self.num_top >= 0).sum()) == self.num_with_logprobs
        assert self.num_adapted == sum(seq.adapter is not None for seq in running)
        held = [row for row, seq in enumerate(self.seqs) if seq is not None]
        assert held == sorted(self.order.tolist()), "a row is held by a sequence that does not run"
        for seq in running:
            row, names = seq.row, ("num_tokens", "newest", "plain_until", "inspect_at")
            assert self.seqs[row] is seq and self._token_ids[row] is seq.token_ids and seq.decode_state is self
            before = [int(getattr(self, name)[row]) for name in names]
            self.refresh(seq)
            assert before == [int(getattr(self, name)[row]) for name in names], f"row {row} was not updated"
            assert self.request_ids[row] == seq.request_id and self.num_cached_tokens[row] == seq.timeline.cached_tokens
            assert self.client_names[self.clients[row]] == seq.request.client
            wanted = seq.request.params.logprobs
            assert self.num_top[row] == (-1 if wanted is None else wanted)
            stop_ids = {int(stop) for stop in self._stop_ids[:, row] if stop != _NO_STOP}
            assert stop_ids == (seq.stop_ids if len(seq.stop_ids) <= _STOP_IDS else set())
