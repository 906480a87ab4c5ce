"""Decides which sequences run next: one token budget a step for decodes, drafts, prefills under way and the queue.

A sequence has known tokens and computed tokens; each step gives it some number of tokens to catch up. Chunked prefill,
decoding, prefix hits and recomputation after preemption are then the same case, and there are no phases.

Pure: the time is an argument, nothing is random, no set is iterated; the same calls give the same steps. Does not know
tensors, devices, processes or text.
"""

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from oarlock.engine.config import EngineConfig
from oarlock.engine.errors import INTERNAL, OUT_OF_MEMORY, QueueFullError, RequestError
from oarlock.engine.kv_cache.loading import LoadingSequences
from oarlock.engine.kv_cache.offload import KVOffload
from oarlock.engine.scheduler import decode_state, policy, request_stats
from oarlock.engine.scheduler.admission import Limits, check
from oarlock.engine.scheduler.answers import Answers, RefusedSteps, undo, withdraw
from oarlock.engine.scheduler.decode_state import RunningColumns
from oarlock.engine.scheduler.kv_cache_manager import KVCacheManager
from oarlock.engine.scheduler.output import ModelRunnerOutput, ScheduledTokens, SchedulerOutput
from oarlock.engine.scheduler.policy import choose_over_share, choose_victim, may_be_passed, reserved_blocks
from oarlock.engine.scheduler.request_queue import Pending, RequestQueue
from oarlock.engine.scheduler.sequence import GrammarMatcherProtocol, Sequence, Status
from oarlock.engine.scheduler.step_cost import StepBudget, StepCosts
from oarlock.engine.scheduler.tracing.request_traces import RequestTraces
from oarlock.engine.scheduler.window_blocks import allocate_within_window, free_out_of_window
from oarlock.engine.spec_decode.drafter import Drafter
from oarlock.engine.stats import EngineStats
from oarlock.engine.types import FinishReason, Request, TokenEvent, TokenEvents
from oarlock.workers.config import WorkerInfo, max_token_vectors

logger = logging.getLogger("oarlock.engine")

# Seconds of waiting that one level of priority is worth: a request is overtaken only by more urgent ones that arrive
# within this time per level, so none starves. There are 21 levels: nothing that arrives ten minutes later overtakes it.
PRIORITY_STEP_S = 30.0


class Scheduler:
    """Schedules one engine. Every accepted request ends in exactly one terminal event and holds no block after it."""

    def __init__(self, config: EngineConfig, info: WorkerInfo) -> None:
        worker, caches_blocks = config.worker, config.enable_prefix_caching and not info.whole_texts
        self.limits = Limits.of(info)
        self.stats = EngineStats()
        self.kv_cache_manager = KVCacheManager(
            info.num_blocks,
            info.block_size,
            enable_prefix_caching=caches_blocks,
            sliding_window=info.sliding_window,
            max_step_tokens=worker.max_num_batched_tokens,
        )
        self.max_num_batched_tokens = worker.max_num_batched_tokens
        self._max_vectors = max_token_vectors(info.hidden_size, info.max_model_len if info.whole_texts else 0)
        # Every running sequence must be able to get its one token, or decodes would starve each other.
        self.max_num_seqs = min(worker.max_num_seqs, worker.max_num_batched_tokens)
        self._num_parts = config.num_micro_batches  # steps in flight among which decoding sequences are divided
        self.refused_steps = RefusedSteps(self.max_num_batched_tokens)
        self._waiting = RequestQueue(config.max_waiting_requests, config.max_waiting_tokens)
        self._running: list[Sequence] = []  # in the order in which they were admitted
        self._open: dict[int, Sequence] = {}
        self._free_rows = list(range(self.max_num_seqs - 1, -1, -1))
        tiers = info.kv_offload if caches_blocks else None
        self.kv_offload = KVOffload(tiers, info.block_size, info.step_cost, self.stats)
        self.kv_cache_manager.offload = self.kv_offload if self.kv_offload.is_on else None
        self._loading = LoadingSequences(self.kv_offload, self._waiting, self.kv_cache_manager.missing_hashes)
        self._columns = RunningColumns(self.max_num_seqs, info.block_size, caches_blocks=caches_blocks)
        self.step_costs = StepCosts(info.step_cost)
        self._budget = StepBudget(self.step_costs, config.max_step_s, config.num_micro_batches)
        self.drafter = None if config.speculative is None else Drafter(config.speculative, self.step_costs)
        ends = self._finish, self.fail, self._fail_after_exception
        self._answers = Answers(self._columns, self.kv_cache_manager, self._waiting, self.stats, *ends)
        self._events: list[TokenEvent] = []  # terminal events that `update_from_output` did not return
        self._num_arrivals = 0
        self._step_id = 0
        self.traces = RequestTraces()

    # -- requests

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    @property
    def num_loading(self) -> int:
        """Sequences that wait for files to be read."""
        return len(self._loading)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def open_requests(self) -> Mapping[int, Sequence]:
        """Open requests by id, in the order in which they were added."""
        return self._open

    def add(self, request: Request, now: float, grammar_matcher: GrammarMatcherProtocol | None = None) -> None:
        """Queue a request. Raises `RequestError` when it can never run, `QueueFullError` when the queue is full."""
        assert (request.params.grammar is None) == (grammar_matcher is None), "a grammar and its matcher come together"
        self.check(request, now)
        self._num_arrivals += 1
        key = (now + request.priority * PRIORITY_STEP_S, self._num_arrivals)
        seq = Sequence(request, key=key, max_len=self.limits.max_len, arrival_s=now, grammar_matcher=grammar_matcher)
        self.traces.open(seq.trace, self._running, self._waiting)
        self._open[request.request_id] = seq
        self._waiting.push(seq)
        request_stats.record_arrival(self.stats, seq)

    def set_pending(self, pending: Mapping[str, tuple[int, int]]) -> None:
        """Set the numbers of accepted requests of each client, and of their prompt tokens, that are not added yet."""
        self._waiting.pending = {client: Pending(*counts) for client, counts in pending.items()}

    def check(self, request: Request, now: float) -> None:
        """Raise the errors of `add`, without adding."""
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
        """End one request by the engine's fault, or by that of its field `param`. None when it is not known."""
        seq = self._open.get(request_id)
        if seq is None:
            return None
        self.stats.num_errors += param is None
        return replace(self._finish(seq, FinishReason.ERROR, now), error=message, error_param=param)

    def complete(self, seq: Sequence, now: float) -> TokenEvent:
        """End a running sequence whose grammar allows nothing but the end."""
        return self._finish(seq, FinishReason.STOP, now)

    def fail_all(self, message: str, now: float) -> list[TokenEvent]:
        """End every open request."""
        events = [self.fail(request_id, message, now) for request_id in list(self._open)]
        return self.take_events() + [event for event in events if event is not None]

    def take_events(self) -> list[TokenEvent]:
        """Terminal events of requests that failed outside `update_from_output`."""
        events, self._events = self._events, []
        return events

    # -- one step

    def schedule(self, now: float, *, ahead: bool = False) -> SchedulerOutput | None:
        """Decide the next step: decodes first, then prefills under way, then the queue. None when nothing can run, or
        when with `ahead`, which says that the answer to the step before is still to come, it must come first."""
        self.traces.now_s = now
        self._loading.follow(now)
        most = self.refused_steps.most_tokens or self.max_num_batched_tokens
        is_short = most < self.max_num_batched_tokens  # of memory: then nothing is drafted, and no step sent ahead
        drafter, most_drafts = None if is_short else self.drafter, self._most_drafts(most - len(self._running))
        if ahead and (is_short or (self._num_parts == 1 and self._must_wait(most_drafts))):
            return None
        shared = self._running, self._waiting, self.max_num_seqs, self.kv_cache_manager
        while (victim := choose_over_share(*shared)) is not None:
            if ahead:
                return None
            self._preempt(victim, is_short=False)
        rows, share = self._columns.order, 0
        if is_short:
            rows = self._columns.with_oldest(most)
        elif self._num_parts > 1:
            rows, share = decode_state.next_micro_batch(self._columns, self._num_parts)
            if decode_state.may_preempt(self._columns, rows, self.kv_cache_manager.num_available):
                if ahead:
                    return None
                rows = self._columns.with_oldest(share)  # of which one at least stays
        output = SchedulerOutput(self._step_id + 1, [], is_ahead=ahead)
        block_size, fail = self.kv_cache_manager.block_size, partial(self._fail_scheduling, now)
        may_draft = drafter is not None and (not ahead or self._num_parts > 1)
        drafts = decode_state.choose_drafts(self._columns, rows, drafter, most_drafts) if may_draft else {}
        for_drafts = partial(decode_state.allocate_for_drafts, self.kv_cache_manager, len(self._running))
        allocate = self._allocate_next_block, fail, drafts, for_drafts
        behind = decode_state.schedule_decodes(self._columns, rows, output, block_size, *allocate)
        output.num_decodes = output.num_seqs
        output.num_drafts = sum(len(item.drafts) for item in output.scheduled)
        num_rows = output.num_decodes + output.num_drafts
        num_left = policy.num_tokens_left(behind, self._waiting)
        whole = self._budget.prompt_tokens(max(num_rows, share), most - num_rows, num_left)
        run = partial(self._schedule_prompt, output, now)
        behind, last, is_urgent = policy.give_way(behind, self._waiting)
        budget = policy.share_among_prompts(behind, self._waiting, whole, run)
        # A sequence that was just preempted must not get back at once the blocks that it gave up.
        if not output.num_preempted:
            may_pass = partial(may_be_passed, running=self._running, kv_cache_manager=self.kv_cache_manager)
            budget = policy.admit_in_order(self._waiting, budget, run, may_pass, is_urgent=is_urgent)
        if budget == whole:  # else the step stays as short as it can be for those that wait
            budget = policy.share_among_prompts(last, self._waiting, budget, run)
        output.num_prompt_tokens = whole - budget
        if not output.num_seqs:
            self.refused_steps.drop(output)
            if ahead or not self.kv_offload.has_copies:
                return None
            output = SchedulerOutput(output.step_id, [])  # a step of copies alone
        else:
            self.refused_steps.begin(output)
            self.stats.iteration_tokens.observe(num_rows + output.num_prompt_tokens)
        output.kv_copies = self.kv_offload.take_copies()
        self.stats.step_id = self._step_id = output.step_id
        return output

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> TokenEvents:
        """Append tokens, cache full blocks, end complete sequences; return the events.

        Sequences that have ended since the step was scheduled are ignored, and so are those that were preempted, which
        cannot run again before this: their token is sampled again.
        """
        self.kv_offload.answered(output.kv_copies)
        if not output.num_seqs:
            return TokenEvents()
        self.refused_steps.ran(output)
        return self._answers.apply(output, result, now)

    def take_back(self, outputs: list[SchedulerOutput], now: float) -> list[TokenEvent]:
        """Undo `outputs`, all steps in flight: the ranks refused the first for lack of memory, and with it those
        scheduled ahead. The next step is smaller. Returns the events of requests that fail."""
        self.stats.num_refused_steps += 1
        self.traces.now_s = now
        self.traces.steps.refused(now)
        in_first, give_up = undo(outputs, self._columns, self.kv_cache_manager)
        for output in outputs:
            self.kv_offload.answered(output.kv_copies)
        unfit = self.refused_steps.shrink(outputs, in_first, self._running)
        for seq in give_up:
            self._preempt(seq, is_short=False)
        if unfit is None:
            return []
        event = self.fail(unfit.request_id, OUT_OF_MEMORY, now)
        assert event is not None
        return [replace(event, error_code="out_of_memory")]

    def withdraw(self, output: SchedulerOutput, unfit: list[ScheduledTokens], now: float) -> None:
        """Take `unfit` out of a step that was not submitted yet; their sequences end by the engine's fault.

        Blocks they would have filled leave the prefix cache, and sequences that share those in this step wait again.
        """
        failed, again = withdraw(output, unfit, self.kv_cache_manager)
        for seq in failed:
            event = self.fail(seq.request_id, INTERNAL, now)
            assert event is not None
            self._events.append(event)
        for seq in again:
            self._preempt(seq)
        if not output.num_seqs:
            self.refused_steps.drop(output)
            self.kv_offload.give_back(output.kv_copies)

    def _most_drafts(self, room: int) -> int:
        """Most drafts of a step that has `room` tokens beside those of running sequences."""
        if self.drafter is None:
            return 0
        beside_prompts = bool(self._free_rows and len(self._waiting)) or decode_state.any_behind(self._columns)
        return self._budget.drafts(len(self._running), room, beside_prompts=beside_prompts)

    def _must_wait(self, most_drafts: int) -> bool:
        """Whether a step can be scheduled only when the tokens of the one in flight are known."""
        is_short = decode_state.may_preempt_next(len(self._running), self.kv_cache_manager.num_available)
        return is_short or (
            self.drafter is not None and decode_state.drafts_wait(self._columns, self.drafter, most_drafts)
        )

    def _allocate_next_block(self, seq: Sequence, output: SchedulerOutput) -> bool:
        """Allocate one more block for `seq`, by preemption if need be. False when `seq` was itself preempted."""
        if self.kv_cache_manager.sliding_window is not None:
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
        seq.trace.preempted(self.traces.now_s, is_short=is_short)
        seq.num_preemptions += is_short
        seq.num_passed = 0
        seq.has_asked_files = False
        self.stats.num_preemptions += 1
        self._waiting.push(seq)

    def _schedule_tokens(self, seq: Sequence, output: SchedulerOutput, budget: int) -> int:
        """Schedule as many tokens of `seq` as the budget allows; return their number."""
        start = seq.num_computed_tokens
        num_tokens = seq.num_tokens - start
        if not self.limits.whole_texts:
            num_tokens = min(num_tokens, budget)
        if seq.returns_all_tokens:
            num_tokens = min(num_tokens, self._max_vectors - output.num_token_vectors)
        if self.kv_cache_manager.sliding_window is not None:
            num_tokens = allocate_within_window(self.kv_cache_manager, seq, num_tokens, len(self._running), output)
        score_from, num_scored = seq.tokens_to_score(start, num_tokens)
        if num_tokens <= 0:
            return 0
        self.kv_cache_manager.cache_blocks(seq, start + num_tokens)
        wants_logits = start + num_tokens == seq.num_tokens and seq.samples
        output.scheduled.append(ScheduledTokens(seq, start, num_tokens, wants_logits, score_from, num_scored))
        output.num_token_vectors += seq.returns_all_tokens * num_tokens
        seq.num_computed_tokens = start + num_tokens
        seq.trace.computed(self.traces.now_s, output.step_id, num_tokens, output.num_decodes)
        self._columns.refresh_plain(seq)
        self._columns.refresh_look(seq)
        return num_tokens

    def _schedule_prompt(self, output: SchedulerOutput, now: float, seq: Sequence, budget: int) -> int:
        """Schedule tokens of a prompt, admitting it first if it waits; an exception fails this sequence alone."""
        if self.limits.whole_texts and not policy.has_room_for_text(seq, output, budget, self._max_vectors):
            return 0
        try:
            if seq.status is Status.WAITING and (output.num_preempted or not self._start_running(seq, output, now)):
                return 0
            return self._schedule_tokens(seq, output, budget)
        except Exception:
            self._fail_scheduling(now, seq)
            return 0

    def _start_running(self, seq: Sequence, output: SchedulerOutput, now: float) -> bool:
        """Give a waiting sequence its row, and blocks for all its tokens. False when there are too few."""
        if not self._free_rows:
            self.traces.steps.without_row += 1
            return False
        reserve = reserved_blocks(len(self._running), seq.num_preemptions)
        num_cached = self.kv_cache_manager.allocate(seq, seq.num_skippable_tokens, reserve)
        if num_cached is None:
            self.traces.steps.without_blocks += 1
            return False
        seq.trace.admitted(now, num_cached)
        self.kv_offload.release(seq.request_id)
        self._waiting.admit(seq, now)
        self._running.append(seq)
        seq.status = Status.RUNNING
        seq.row = self._free_rows.pop()
        seq.num_computed_tokens = num_cached
        if seq.first_scheduled_s is None:
            seq.first_scheduled_s = now
            seq.num_cached_tokens = num_cached
            request_stats.record_first_scheduled(self.stats, seq, now)
        self._columns.take(seq)
        output.new_rows.append(seq)
        output.add_blocks(seq, 0)
        return True

    # -- ends

    def _finish(self, seq: Sequence, reason: FinishReason, now: float, event: TokenEvent | None = None) -> TokenEvent:
        """End a sequence; its blocks and row are free when this returns. The result is `event` made terminal."""
        if seq.status is Status.RUNNING:
            self._stop_running(seq)
        else:
            self._loading.remove(seq)
            self.kv_cache_manager.free(seq)  # it holds none, unless it failed while it was admitted
        seq.status = Status.FINISHED
        del self._open[seq.request_id]
        self.traces.close(seq.trace, now, reason, seq.num_generated_tokens)
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
        self._columns.release(seq)
        self.kv_cache_manager.free(seq)
        self._free_rows.append(seq.row)
        seq.row = -1
        seq.status = Status.WAITING

    # -- state

    def refresh_gauges(self) -> EngineStats:
        """The stats with their gauges brought up to date."""
        request_stats.set_gauges(self.stats, len(self._running), self._waiting, self.kv_cache_manager)
        request_stats.set_loading(self.stats, list(self._loading))
        self.kv_offload.set_gauges()
        return self.stats

    def audit(self) -> None:
        """Raise AssertionError unless rows, columns, blocks, queue and open requests agree."""
        self._columns.audit(self._running)
        self.kv_cache_manager.audit(self._open.values())
        rows = sorted([seq.row for seq in self._running] + self._free_rows)
        assert rows == list(range(self.max_num_seqs)), "rows are lost or shared"
        waiting = [*self._waiting, *self._loading]
        assert sorted(self._open) == sorted(seq.request_id for seq in [*self._running, *waiting])
        for seq in waiting:
            assert not seq.block_ids and not seq.num_computed_tokens, "a waiting sequence holds something"
        assert self._waiting.num_tokens == sum(seq.num_prompt_tokens for seq in self._waiting)
