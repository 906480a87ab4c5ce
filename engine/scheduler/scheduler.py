"""Who runs next: one token budget per step, shared by decodes, prefills under way and waiting sequences.

A sequence has known tokens and computed tokens; each step gives it some number of tokens to catch up. Chunked prefill,
decoding, prefix hits and recomputation after preemption are then the same case, and there are no phases.

Pure: the time is an argument, nothing is random, no set is iterated; the same calls give the same steps. Does not know
arrays, devices, processes or text.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from engine.config import EngineConfig
from engine.errors import INTERNAL, NO_TOKEN, NOT_FINITE, QueueFullError, RequestError
from engine.scheduler import request_stats
from engine.scheduler.admission import Limits, check
from engine.scheduler.ahead import must_wait
from engine.scheduler.decodes import schedule_decodes
from engine.scheduler.kv_cache_manager import KVCacheManager
from engine.scheduler.output import ModelRunnerOutput, ScheduledTokens, SchedulerOutput, Scores
from engine.scheduler.preemption import choose_over_share, choose_victim, may_be_passed, reserved_blocks
from engine.scheduler.prefill_order import admit_in_order, share_among_prompts
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.sequence import GrammarMatcherProtocol, Sequence, Status
from engine.scheduler.window_blocks import allocate_within_window, free_out_of_window
from engine.stats import EngineStats
from engine.types import FinishReason, Request, TokenEvent
from workers.config import WorkerInfo
from workers.protocol import FINITE, NONFINITE

logger = logging.getLogger("oarlock.engine")

# Seconds of waiting that one level of priority is worth: a request is overtaken only by more urgent ones that arrive
# within this time per level, so none starves. There are 21 levels: nothing that arrives ten minutes later overtakes it.
PRIORITY_STEP_S = 30.0


class Scheduler:
    """Every accepted request ends in exactly one terminal event and holds no block after it."""

    def __init__(self, config: EngineConfig, info: WorkerInfo) -> None:
        worker = config.worker
        self.limits = Limits.of(info)
        self.stats = EngineStats()
        self.kv_cache_manager = KVCacheManager(
            info.num_blocks,
            info.block_size,
            enable_prefix_caching=config.enable_prefix_caching,
            sliding_window=info.sliding_window,
            max_step_tokens=worker.max_num_batched_tokens,
        )
        self.max_num_batched_tokens = worker.max_num_batched_tokens
        # Every running sequence must be able to get its one token, or decodes would starve each other.
        self.max_num_seqs = min(worker.max_num_seqs, worker.max_num_batched_tokens)
        self._waiting = RequestQueue(config.max_waiting_requests, config.max_waiting_tokens)
        self._running: list[Sequence] = []  # in the order in which they were admitted
        self._open: dict[int, Sequence] = {}
        self._free_rows = list(range(self.max_num_seqs - 1, -1, -1))
        self._events: list[TokenEvent] = []  # terminal events that `update_from_output` did not return
        self._num_tokens_after: dict[float, int] = {}  # of this step, by seconds since the sequence's last token
        self._num_arrivals = 0
        self._step_id = 0

    # -- requests

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, now: float, grammar_matcher: GrammarMatcherProtocol | None = None) -> None:
        """Queue a request. Raises `RequestError` when it can never run, `QueueFullError` when the queue is full."""
        assert (request.params.grammar is None) == (grammar_matcher is None), "a grammar and its matcher come together"
        self.check(request, now)
        self._num_arrivals += 1
        key = (now + request.priority * PRIORITY_STEP_S, self._num_arrivals)
        seq = Sequence(request, key=key, max_len=self.limits.max_len, arrival_s=now, grammar_matcher=grammar_matcher)
        self._open[request.request_id] = seq
        self._waiting.push(seq)
        request_stats.record_arrival(self.stats, seq)

    def set_pending(self, num_requests: int, num_tokens: int) -> None:
        """How many accepted requests, with how many prompt tokens, are not added yet: they count as waiting."""
        self._waiting.num_pending, self._waiting.num_pending_tokens = num_requests, num_tokens

    def check(self, request: Request, now: float) -> None:
        """Raise what `add` raises."""
        try:
            if request.request_id in self._open:
                raise RequestError(f"Request id {request.request_id} is in use.", "request_id")
            check(request, self.limits)
            if not request.has_place:
                self._waiting.check(len(request.prompt_token_ids), len(self._free_rows), now, request.client)
        except (RequestError, QueueFullError):
            self.stats.num_rejected += 1
            raise

    def abort(self, request_id: int, now: float) -> TokenEvent | None:
        """End a request whose caller has left, even with a step in flight for it. None when it is not known."""
        seq = self._open.get(request_id)
        return None if seq is None else self._finish(seq, FinishReason.ABORT, now)

    def fail(self, request_id: int, message: str, now: float, param: str | None = None) -> TokenEvent | None:
        """End one request by the engine's fault, or by that of its own field `param`. None when it is not known."""
        seq = self._open.get(request_id)
        if seq is None:
            return None
        self.stats.num_errors += param is None
        return replace(self._finish(seq, FinishReason.ERROR, now), error=message, error_param=param)

    def fail_all(self, message: str, now: float) -> list[TokenEvent]:
        """End every open request."""
        events = [self.fail(request_id, message, now) for request_id in list(self._open)]
        return self.take_events() + [event for event in events if event is not None]

    def take_events(self) -> list[TokenEvent]:
        """Terminal events of requests that failed outside `update_from_output`."""
        events, self._events = self._events, []
        return events

    # -- one step

    def schedule(
        self, now: float, *, ahead: bool = False, most_prompt_tokens: Callable[[int, int], int] | None = None
    ) -> SchedulerOutput | None:
        """Decide the next step: decodes first, then prefills under way, then the queue. None when nothing can run, or
        when with `ahead`, which says that the answer to the step before is still to come, it must come first.
        `most_prompt_tokens(decodes, budget)` may lower the tokens that are left beside so many decodes."""
        if ahead and must_wait(self._running, len(self._running), self.kv_cache_manager.num_available):
            return None
        while (victim := self._over_share()) is not None:
            if ahead:
                return None
            self._preempt(victim, is_short=False)
        output = SchedulerOutput(self._step_id + 1, [])
        block_size, fail = self.kv_cache_manager.block_size, partial(self._fail_scheduling, now)
        behind = schedule_decodes(self._running, output, block_size, self._allocate_next_block, fail)
        output.num_decodes = len(output.scheduled)
        whole = self.max_num_batched_tokens - output.num_decodes  # tokens
        if most_prompt_tokens is not None:
            whole = most_prompt_tokens(output.num_decodes, whole)
        run = partial(self._schedule_prompt, output, now)
        budget = share_among_prompts(behind, self._waiting, whole, run)
        # A sequence that was just preempted must not get back at once the blocks that it gave up.
        if not output.num_preempted:
            budget = admit_in_order(self._waiting, budget, run, self._may_be_passed)
        output.num_prompt_tokens = whole - budget
        if not output.scheduled:
            return None
        self._step_id += 1
        self.stats.step_id = self._step_id
        self.stats.iteration_tokens.observe(output.num_decodes + output.num_prompt_tokens)
        return output

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> list[TokenEvent]:
        """Append tokens, cache full blocks, end what is complete; return the events.

        Sequences that have ended since the step was scheduled are ignored, and so are those that were preempted, which
        cannot run again before this: their token is sampled again.
        """
        events = []
        row = 0
        for item in output.scheduled:
            seq, first = item.seq, row
            row += item.num_scored + item.wants_logits
            if seq.status is not Status.RUNNING:
                continue
            try:
                event = self._update_sequence(item, result, first, now)
            except Exception:
                event = self._fail_after_exception(seq, "commit", now)
            if event is not None:
                events.append(event)
        request_stats.record_tokens(self.stats, self._num_tokens_after)
        self._num_tokens_after.clear()
        self._waiting.count_generated(item.seq for item in output.scheduled if item.wants_logits)
        return events

    def withdraw(self, output: SchedulerOutput, unfit: list[ScheduledTokens], now: float) -> None:
        """Take `unfit` out of a step that was not submitted yet; their sequences end by the engine's fault.

        Blocks they would have filled leave the prefix cache, and sequences that share those in this step wait again.
        """
        kept: list[ScheduledTokens] = []
        missing: set[int] = set()  # block ids
        for item in output.scheduled:
            seq, column = item.seq, item.start // self.kv_cache_manager.block_size
            is_unfit = item in unfit
            if not is_unfit and missing.isdisjoint(seq.block_ids[:column]):
                kept.append(item)
                continue
            missing.update(seq.block_ids[column:])
            self.kv_cache_manager.evict_blocks(seq, column)
            if is_unfit:
                event = self.fail(seq.request_id, INTERNAL, now)
                assert event is not None
                self._events.append(event)
            else:
                self._preempt(seq)
        output.scheduled = kept

    def _allocate_next_block(self, seq: Sequence, output: SchedulerOutput) -> bool:
        """One more block for `seq`, by preemption if need be. False when `seq` was itself preempted."""
        free_out_of_window(self.kv_cache_manager, seq, output)
        while (new := self.kv_cache_manager.allocate_slots(seq, seq.num_computed_tokens + 1)) is None:
            victim = choose_victim(self._running)
            self._preempt(victim)
            output.num_preempted += 1
            if victim is seq:
                return False
        output.add_blocks(seq, len(seq.block_ids) - len(new))
        return True

    def _preempt(self, seq: Sequence, *, is_short: bool = True) -> None:
        """Free all its blocks and queue it again; generated tokens are kept and recomputed like a prompt. `is_short`:
        there were too few blocks, so it comes back only when more are free than before."""
        self._stop_running(seq)
        seq.num_computed_tokens = 0
        seq.num_preemptions += is_short
        seq.num_passed = 0
        self.stats.num_preemptions += 1
        self._waiting.push(seq)

    def _schedule_tokens(self, seq: Sequence, output: SchedulerOutput, budget: int) -> int:
        """As many tokens of `seq` as the budget allows; return their number."""
        start = seq.num_computed_tokens
        num_tokens = min(seq.num_tokens - start, budget)
        if self.kv_cache_manager.sliding_window is not None:
            num_tokens = allocate_within_window(self.kv_cache_manager, seq, num_tokens, len(self._running), output)
        score_from, num_scored = seq.tokens_to_score(start, num_tokens)
        if num_tokens <= 0:
            return 0
        self.kv_cache_manager.cache_blocks(seq, start + num_tokens)
        wants_logits = start + num_tokens == seq.num_tokens and seq.samples
        output.scheduled.append(ScheduledTokens(seq, start, num_tokens, wants_logits, score_from, num_scored))
        seq.num_computed_tokens = start + num_tokens
        return num_tokens

    def _schedule_prompt(self, output: SchedulerOutput, now: float, seq: Sequence, budget: int) -> int:
        """As `_schedule_tokens`, of a sequence that is admitted first if it waits; it fails alone."""
        try:
            if seq.status is Status.WAITING and (output.num_preempted or not self._start_running(seq, output, now)):
                return 0
            return self._schedule_tokens(seq, output, budget)
        except Exception:
            self._fail_scheduling(now, seq)
            return 0

    def _over_share(self) -> Sequence | None:
        """The sequence to preempt so that the next in turn can run, of a client that has less than its share."""
        if not self._waiting.has_several_clients(self._running):
            return None
        head = self._waiting[0]
        reserve = reserved_blocks(len(self._running), head.num_preemptions)
        if self._free_rows and self.kv_cache_manager.can_allocate(head, reserve):
            return None
        return choose_over_share(head, self._running, self._waiting, self.max_num_seqs, self.kv_cache_manager)

    def _may_be_passed(self, seq: Sequence) -> bool:
        return may_be_passed(seq, len(self._running), self.kv_cache_manager)

    def _start_running(self, seq: Sequence, output: SchedulerOutput, now: float) -> bool:
        """Give a waiting sequence its row, and blocks for all its tokens. False when there are too few."""
        if not self._free_rows:
            return False
        reserve = reserved_blocks(len(self._running), seq.num_preemptions)
        num_cached = self.kv_cache_manager.allocate(seq, seq.num_skippable_tokens, reserve)
        if num_cached is None:
            return False
        self._waiting.admit(seq, now)
        self._running.append(seq)
        seq.status = Status.RUNNING
        seq.row = self._free_rows.pop()
        seq.num_computed_tokens = num_cached
        if seq.first_scheduled_s is None:
            seq.first_scheduled_s = now
            seq.num_cached_tokens = num_cached
            request_stats.record_first_scheduled(self.stats, seq, now)
        output.new_rows.append(seq)
        output.add_blocks(seq, 0)
        return True

    # -- the answer to a step

    def _update_sequence(
        self, item: ScheduledTokens, result: ModelRunnerOutput, first: int, now: float
    ) -> TokenEvent | None:
        """`first` is the first row of logits of `item`."""
        seq, last = item.seq, first + item.num_scored
        if not result.all_finite:
            states = result.finite[first : last + item.wants_logits]
            if states.count(FINITE) < len(states):
                return self._fail_without_token(seq, states, now)
        num_computed = item.start + item.num_tokens
        if num_computed // self.kv_cache_manager.block_size > seq.num_cached_blocks:
            self.kv_cache_manager.cache_blocks(seq, num_computed)
        scored: Scores = ()
        if item.num_scored:
            seq.num_scored_tokens += item.num_scored
            scored = result.scored(first, last, seq.request.params.prompt_logprobs or 0)
        if item.wants_logits:
            return self._append_token(seq, result, last, now, scored)
        is_complete = not seq.samples and num_computed == seq.num_tokens
        if not scored and not is_complete:
            return None
        event = TokenEvent(seq.request_id, prompt_logprobs=scored, num_cached_tokens=seq.num_cached_tokens)
        return self._finish(seq, FinishReason.LENGTH, now, event) if is_complete else event

    def _fail_without_token(self, seq: Sequence, states: list[int], now: float) -> TokenEvent | None:
        """No token could be chosen: the model's logits are not finite, or the request's fields ban every token."""
        if NONFINITE not in states:
            return self.fail(seq.request_id, NO_TOKEN, now, seq.masked_by)
        self.stats.num_nonfinite += 1
        self.kv_cache_manager.evict_blocks(seq)  # its keys and values may not be finite either
        return self.fail(seq.request_id, NOT_FINITE, now)

    def _append_token(
        self, seq: Sequence, result: ModelRunnerOutput, row: int, now: float, scored: Scores
    ) -> TokenEvent:
        """Append the token sampled in `row`, and end the sequence if it was the last."""
        params, token = seq.request.params, result.token_ids[row]
        seq.token_ids.append(token)
        if seq.last_token_s is None:
            request_stats.record_first_token(self.stats, seq, now)
        else:
            gap_s = now - seq.last_token_s
            self._num_tokens_after[gap_s] = self._num_tokens_after.get(gap_s, 0) + 1
        seq.last_token_s = now
        logprobs = () if params.logprobs is None else (result.token_logprobs(row, params.logprobs),)
        event = TokenEvent(seq.request_id, (token,), logprobs, scored, None, None, seq.num_cached_tokens)
        matcher = seq.grammar_matcher
        if token in seq.stop_ids:  # none is sampled before `min_tokens`: they were banned
            return self._finish(seq, FinishReason.STOP, now, replace(event, stop_token_id=token))
        if matcher is not None and matcher.accept((token,)):
            return self._finish(seq, FinishReason.STOP, now, event)
        if len(seq.token_ids) >= seq.final_len:
            return self._finish(seq, FinishReason.LENGTH, now, event)
        return event

    # -- ends

    def _finish(self, seq: Sequence, reason: FinishReason, now: float, event: TokenEvent | None = None) -> TokenEvent:
        """End a sequence; its blocks and row are free when this returns. The result is `event` made terminal."""
        if seq.status is Status.RUNNING:
            self._stop_running(seq)
        else:
            self._waiting.remove(seq)
            self.kv_cache_manager.free(seq)  # it holds none, unless it failed while it was admitted
        seq.status = Status.FINISHED
        del self._open[seq.request_id]
        request_stats.record_finish(self.stats, seq, reason, now)
        event = event or TokenEvent(seq.request_id, num_cached_tokens=seq.num_cached_tokens)
        return replace(event, finish_reason=reason)

    def _fail_after_exception(self, seq: Sequence, stage: str, now: float) -> TokenEvent:
        """End one sequence, and not the engine, after an exception at work on it. Call it from an `except` block."""
        logger.exception("event=request_failed request_id=%d stage=%s", seq.request_id, stage)
        self.kv_cache_manager.evict_blocks(seq)  # it may have cached blocks that are not computed now
        event = self.fail(seq.request_id, INTERNAL, now)
        return event or TokenEvent(seq.request_id, finish_reason=FinishReason.ERROR, error=INTERNAL)

    def _fail_scheduling(self, now: float, seq: Sequence) -> None:
        self._events.append(self._fail_after_exception(seq, "schedule", now))

    def _stop_running(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self.kv_cache_manager.free(seq)
        self._free_rows.append(seq.row)
        seq.row = -1
        seq.status = Status.WAITING

    # -- state

    def refresh_gauges(self) -> EngineStats:
        """The stats with their gauges brought up to date."""
        request_stats.set_gauges(self.stats, len(self._running), self._waiting, self.kv_cache_manager)
        return self.stats

    def audit(self) -> None:
        """Raise AssertionError unless rows, blocks, queue and open requests agree."""
        self.kv_cache_manager.audit(self._open.values())
        rows = sorted([seq.row for seq in self._running] + self._free_rows)
        assert rows == list(range(self.max_num_seqs)), "rows are lost or shared"
        assert sorted(self._open) == sorted(seq.request_id for seq in [*self._running, *self._waiting])
        for seq in self._waiting:
            assert not seq.block_ids and not seq.num_computed_tokens, "a waiting sequence holds something"
        assert self._waiting.num_tokens == sum(seq.num_prompt_tokens for seq in self._waiting)
