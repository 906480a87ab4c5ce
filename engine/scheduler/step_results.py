"""Application of a step's result: tokens are appended, full blocks cached, and complete sequences ended.

Decodes whose tokens need only be appended and sent are handled together, in `DecodeState`; all others individually.
Both paths have the same effect for such a token: `tests/unit/engine/scheduler/test_decode_state.py` compares them.
"""

from array import array
from dataclasses import replace

import numpy as np

from oarlock.engine.errors import NO_TOKEN, NOT_FINITE
from oarlock.engine.scheduler.open_requests import OpenRequests
from oarlock.engine.scheduler.sequence import (
    Decodes,
    ModelRunnerOutput,
    ScheduledTokens,
    SchedulerOutput,
    Scores,
    Sequence,
    Status,
)
from oarlock.engine.types import FinishReason, TokenEvent, TokenEvents
from oarlock.workers.protocol import FINITE, NONFINITE


class StepResults:
    """Application of step results to the sequences of one scheduler."""

    def __init__(self, requests: OpenRequests) -> None:
        self._requests = requests
        self._stats = requests.stats
        self._state = requests.decode_state
        self._memory = requests.memory
        self._queue = requests.waiting

    def apply(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> TokenEvents:
        """Apply `result`, the result of `output`, and return its events.

        Full blocks are cached before any sequence ends, because an end may free blocks that others would find.
        """
        events, decodes = TokenEvents(), output.decodes
        if output.states is not None and self._requests.states is not None:
            self._requests.states.name_saves(output, result)
        is_plain, others = self._split_decodes(decodes, result, now, events)
        if output.scheduled:
            for item, first, end in output.with_rows():
                if item.seq.status is Status.RUNNING and not item.drafts and result.are_finite(first, end):
                    self._cache_blocks(item.seq, item.start + item.num_tokens, now, events)
        self._append_plain(decodes, is_plain, result, now, events)
        for item, first in others:
            self._apply_one(item, result, first, 0, now, events)
            if item.seq.status is Status.RUNNING:
                self._state.refresh_tokens(item.seq)
        if output.scheduled:
            self._apply_scheduled(output, result, now, events)
        return events

    def _apply_scheduled(
        self, output: SchedulerOutput, result: ModelRunnerOutput, now: float, events: TokenEvents
    ) -> None:
        """Apply the results of all tokens that are not decodes."""
        pooled = result.pooled()
        for index, (item, first, _) in enumerate(output.with_rows(), len(output.decodes.rows)):
            if item.seq.pooling is not None:
                values = next(pooled)
                if item.seq.status is Status.RUNNING:
                    self._apply_pooled(item, values, now, events)
                continue
            num_accepted = result.num_accepted(index, first) if item.drafts else 0
            if item.drafts:
                self._record_drafts(item, num_accepted)
            if item.seq.status is Status.RUNNING:
                self._apply_one(item, result, first, num_accepted, now, events)
            if item.seq.status is Status.RUNNING:
                self._state.refresh(item.seq)

    def _cache_blocks(self, seq: Sequence, num_computed: int, now: float, events: TokenEvents) -> None:
        """Cache the full blocks of `seq`; an exception fails only this sequence."""
        if num_computed // self._memory.block_size <= seq.num_cached_blocks:
            return
        try:
            self._memory.cache_blocks(seq, num_computed)
            self._state.refresh_inspect_at(seq)
        except Exception:
            events.others.append(self._requests.fail_after_exception(seq, "commit", now))

    # -- together

    def _split_decodes(
        self, decodes: Decodes, result: ModelRunnerOutput, now: float, events: TokenEvents
    ) -> tuple[np.ndarray | None, list[tuple[ScheduledTokens, int]]]:
        """Cache full blocks of decodes.

        Return a mask of the tokens that need only be appended, bool [D], or None if all do, and the decodes that need
        more work, with their rows of logits. Sequences that no longer run are in neither.
        """
        state, rows, positions = self._state, decodes.rows, decodes.positions
        token_ids = result.step_output.token_ids[: len(rows)]
        needs_inspection = state.needs_inspection(rows, positions, token_ids)
        if not result.all_finite:
            needs_inspection |= ~result.is_finite[: len(needs_inspection)]
        if state.num_released == decodes.num_released:
            if not len(needs_inspection.nonzero()[0]):
                return None, []
            is_plain = ~needs_inspection
        else:
            runs = state.still_run(rows, decodes.num_released)
            is_plain = runs & ~needs_inspection
            needs_inspection &= runs
        others, block_size = [], self._memory.block_size
        indices = needs_inspection.nonzero()[0]
        entries = (some.tolist() for some in (indices, rows[indices], positions[indices], token_ids[indices]))
        for index, row, position, token in zip(*entries, strict=True):
            seq = state.seqs[row]
            assert seq is not None
            is_finite = result.all_finite or result.are_finite(index, index + 1)
            if (position + 1) // block_size > seq.num_cached_blocks and is_finite:
                self._cache_blocks(seq, position + 1, now, events)
                if seq.status is not Status.RUNNING:
                    continue
                if position < state.inspect_at[row] and token not in seq.stop_ids:
                    is_plain[index] = True
                    continue
            others.append((ScheduledTokens(seq, position, 1, True), index))
        return is_plain, others

    def _append_plain(
        self, decodes: Decodes, is_plain: np.ndarray | None, result: ModelRunnerOutput, now: float, events: TokenEvents
    ) -> None:
        """Append the tokens of the decodes in `is_plain` (None: all decodes), which come first in `events`."""
        state, rows, positions = self._state, decodes.rows, decodes.positions
        token_ids = result.step_output.token_ids[: len(rows)]
        if is_plain is not None:
            rows, positions, token_ids = rows[is_plain], positions[is_plain], token_ids[is_plain]
        if len(rows):
            if state.num_with_logprobs:
                self._add_logprobs(state.num_top[rows], is_plain, result, events)
            self._record_tokens(state.append(rows, positions, token_ids, now))
            if self._queue.has_had_several_clients:
                self._count_generated(rows)
            events.token_ids = array("i", token_ids.tobytes())
            events.request_ids, events.num_cached_tokens = state.event_fields(rows)

    def _add_logprobs(
        self, num_top: np.ndarray, is_plain: np.ndarray | None, result: ModelRunnerOutput, events: TokenEvents
    ) -> None:
        """Add the logprobs of appended tokens, with `num_top`, int32 [n], alternatives each; -1: no logprobs."""
        wanted = (num_top >= 0).nonzero()[0]
        if len(wanted):
            events.num_top = array("i", num_top.tobytes())
            of_logits = wanted if is_plain is None else is_plain.nonzero()[0][wanted]
            events.logprobs = result.scored(of_logits, int(num_top.max()))

    def _record_tokens(self, since_s: np.ndarray) -> None:
        """Count the tokens that a step sampled for n sequences that already had a token.

        `since_s`, float64 [n], is the time since that token. Most of these were sampled in the same earlier step, so
        there are few different times.
        """
        self._stats.generation_tokens += len(since_s)
        if not len((since_s != since_s[0]).nonzero()[0]):
            self._stats.inter_token_latency_s.observe(float(since_s[0]), len(since_s))
            return
        for seconds, num_tokens in zip(*np.unique(since_s, return_counts=True), strict=True):
            self._stats.inter_token_latency_s.observe(float(seconds), int(num_tokens))

    def _count_generated(self, rows: np.ndarray) -> None:
        for client, num_tokens in enumerate(np.bincount(self._state.clients[rows]).tolist()):
            if num_tokens:
                self._queue.count_generated(self._state.client_names[client], num_tokens)

    # -- one by one

    def _apply_one(
        self,
        item: ScheduledTokens,
        result: ModelRunnerOutput,
        first: int,
        num_accepted: int,
        now: float,
        events: TokenEvents,
    ) -> None:
        """Apply the result of `item`, whose sequence runs, and add its event; an exception fails only this sequence."""
        try:
            event = self._update_sequence(item, result, first, num_accepted, now, events)
        except Exception:
            event = self._requests.fail_after_exception(item.seq, "commit", now)
        if event is not None:
            events.others.append(event)

    def _apply_pooled(
        self, item: ScheduledTokens, values: "array[float] | None", now: float, events: TokenEvents
    ) -> None:
        """Send the vectors that the step computed for `item`, whose sequence runs, and end it with the last vectors."""
        seq, event = item.seq, None
        try:
            if values is None:
                event = self._fail_nonfinite(seq, now)
            else:
                if values and seq.pooling is not None and seq.pooling.kind in ("cls", "token"):
                    # Whole blocks are computed again after a preemption, so some vectors may have been sent.
                    size = len(values) // (item.num_tokens if seq.pooling.kind == "token" else 1)
                    values = values[max(0, seq.num_returned_vectors - item.start) * size :]
                    seq.num_returned_vectors += len(values) // size
                if values:
                    event = TokenEvent(seq.request_id, num_cached_tokens=seq.timeline.cached_tokens, pooled=values)
                if item.start + item.num_tokens == seq.num_tokens:
                    event = self._requests.finish(seq, FinishReason.STOP, now, event)
        except Exception:
            event = self._requests.fail_after_exception(seq, "commit", now)
        if event is not None:
            events.others.append(event)
        if seq.status is Status.RUNNING:
            self._state.refresh(seq)

    def _update_sequence(
        self,
        item: ScheduledTokens,
        result: ModelRunnerOutput,
        first: int,
        num_accepted: int,
        now: float,
        events: TokenEvents,
    ) -> TokenEvent | None:
        """Update the sequence of `item`; `first`: its first row of logits, `num_accepted`: its accepted drafts."""
        seq, last = item.seq, first + item.num_scored
        if not result.all_finite:
            states = result.finite[first : last + item.wants_logits]
            if states.count(FINITE) < len(states):
                return self._fail_without_token(seq, states, now)
        scored: Scores = ()
        if item.num_scored:
            seq.num_scored_tokens += item.num_scored
            scored = result.scored(slice(first, last), seq.request.params.prompt_logprobs or 0)
        if item.wants_logits:
            return self._append_tokens(item, result, last, num_accepted, now, scored, events)
        is_complete = not seq.samples and item.start + item.num_tokens == seq.num_tokens
        if not scored and not is_complete:
            return None
        event = TokenEvent(seq.request_id, prompt_logprobs=scored, num_cached_tokens=seq.timeline.cached_tokens)
        return self._requests.finish(seq, FinishReason.LENGTH, now, event) if is_complete else event

    def _fail_without_token(self, seq: Sequence, states: list[int], now: float) -> TokenEvent | None:
        """Fail a sequence without a token to choose: its logits are not finite, or its fields ban every token."""
        if NONFINITE not in states:
            return self._requests.fail(seq, NO_TOKEN, now, seq.masking_param)
        return self._fail_nonfinite(seq, now)

    def _fail_nonfinite(self, seq: Sequence, now: float) -> TokenEvent | None:
        self._stats.num_nonfinite += 1
        self._memory.evict_blocks(seq)  # its keys and values may not be finite either
        return self._requests.fail(seq, NOT_FINITE, now)

    def _append_tokens(
        self,
        item: ScheduledTokens,
        result: ModelRunnerOutput,
        row: int,
        num_accepted: int,
        now: float,
        scored: Scores,
        events: TokenEvents,
    ) -> TokenEvent:
        """Append the token sampled in `row` and the tokens after accepted drafts, until a token ends the sequence.

        If a token makes the sequence fail, the tokens before it are sent first.
        """
        seq, token_ids, count = item.seq, result.token_ids[row : row + 1 + num_accepted], 0
        reason = None
        while reason is None and count < len(token_ids):
            seq.token_ids.append(token_ids[count])
            try:
                reason = self._end_after(seq, token_ids[count])
            except Exception:
                if count:
                    seq.token_ids.pop()
                    events.others.append(self._count_tokens(item, result, row, token_ids[:count], now, scored))
                raise
            count += 1
        event = self._count_tokens(item, result, row, token_ids[:count], now, scored)
        if reason is None:
            return event
        if token_ids[count - 1] in seq.stop_ids:
            event = replace(event, stop_token_id=token_ids[count - 1])
        return self._requests.finish(seq, reason, now, event)

    def _count_tokens(
        self,
        item: ScheduledTokens,
        result: ModelRunnerOutput,
        row: int,
        token_ids: list[int],
        now: float,
        scored: Scores,
    ) -> TokenEvent:
        """Count `token_ids`, sampled from `row` on and appended, and return their event."""
        seq, num_logprobs = item.seq, item.seq.request.params.logprobs
        if item.drafts:
            seq.num_computed_tokens = item.start + len(token_ids)  # all but the newest
            self._memory.cache_blocks(seq, seq.num_computed_tokens)
        last_s = seq.last_token_s
        if last_s is None:
            assert len(token_ids) == 1
            seq.timeline.got_first_token(now)
        else:  # the tokens of one step share the time since the previous token
            self._stats.generation_tokens += len(token_ids)
            self._stats.inter_token_latency_s.observe((now - last_s) / len(token_ids), len(token_ids))
        self._queue.count_generated(seq.request.client, len(token_ids))
        seq.last_token_s = now
        logprobs = () if num_logprobs is None else result.scored(slice(row, row + len(token_ids)), num_logprobs)
        return TokenEvent(seq.request_id, tuple(token_ids), logprobs, scored, None, None, seq.timeline.cached_tokens)

    def _end_after(self, seq: Sequence, token: int) -> FinishReason | None:
        """Return the reason for which `seq` ends with `token`, its newest token, or None if it does not end."""
        if token in seq.stop_ids:  # none is sampled before `min_tokens`: they were banned
            return FinishReason.STOP
        matcher = seq.grammar_matcher
        if matcher is not None and matcher.accept((token,)):
            return FinishReason.STOP
        if len(seq.token_ids) < seq.final_len:
            return None
        is_complete = matcher is not None and matcher.only_end_is_left()
        return FinishReason.STOP if is_complete else FinishReason.LENGTH

    def _record_drafts(self, item: ScheduledTokens, num_accepted: int) -> None:
        """Record that `num_accepted` drafts of `item` were accepted."""
        state = item.seq.draft_state
        assert state is not None
        state.record(item.start + 1, len(item.drafts), num_accepted)
        self._stats.num_drafts += 1
        self._stats.num_draft_tokens += len(item.drafts)
        self._stats.num_accepted_draft_tokens += num_accepted
