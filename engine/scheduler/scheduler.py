"""Who runs next: one token budget per step, one list, no phases. The whole policy, and nothing else.

A sequence has tokens known and tokens computed; each step gives it some number of tokens to catch up. Chunked prefill,
decoding, prefix hits and recomputation after preemption are then the same case.

Pure: the time is an argument, nothing is random, no set is iterated; the same calls give the same steps. Does not know
arrays, devices, processes or text.
"""

import logging
from dataclasses import dataclass, replace

from engine.config import EngineConfig
from engine.errors import INTERNAL, NO_TOKEN, NOT_FINITE, QueueFullError, RequestError
from engine.scheduler.admission import Limits, check
from engine.scheduler.kv_cache_manager import NULL_BLOCK, KVCacheManager
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.request_stats import record_arrival, record_finish, record_first_scheduled, record_token
from engine.scheduler.sequence import (
    GrammarState,
    ModelRunnerOutput,
    ScheduledTokens,
    SchedulerOutput,
    Sequence,
    Status,
)
from engine.stats import EngineStats
from engine.types import FinishReason, Request, ScoredTokens, TokenEvent, TokenLogprobs
from workers.config import WorkerInfo
from workers.protocol import FINITE, NONFINITE

logger = logging.getLogger("oarlock.engine")

# One level of priority is worth so much waiting: a request is overtaken only by more urgent ones that come within this
# time per level, so none starves. There are 21 levels: after ten minutes whoever comes is behind it.
PRIORITY_STEP_S = 30.0
# So many others may be let in before a sequence that waits only because it was preempted.
MAX_PASSED = 4

Scores = ScoredTokens | tuple[()]  # of prompt tokens in one step


@dataclass(slots=True)
class _Budget:
    """What is left of one step."""

    tokens: int


class Scheduler:
    """Every accepted request leaves with exactly one terminal event and holds no block after it."""

    def __init__(self, config: EngineConfig, info: WorkerInfo) -> None:
        worker = config.worker
        self.limits = Limits.of(info)
        self.stats = EngineStats()
        self.blocks = KVCacheManager(
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
        self._running: list[Sequence] = []  # in the order they came in
        self._open: dict[int, Sequence] = {}
        self._free_rows = list(range(self.max_num_seqs - 1, -1, -1))
        self._events: list[TokenEvent] = []  # terminal events that no commit returned
        self._num_arrivals = 0
        self._step_id = 0

    # -- the door

    @property
    def has_work(self) -> bool:
        return bool(self._open)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, now: float, grammar_state: GrammarState | None = None) -> None:
        """Let a request wait. Raises `RequestError` when it can never run, `QueueFullError` when it cannot wait."""
        assert (request.params.grammar is None) == (grammar_state is None), "a grammar and its state come together"
        self.check(request, now)
        self._num_arrivals += 1
        key = (now + request.priority * PRIORITY_STEP_S, self._num_arrivals)
        seq = Sequence(request, key=key, max_len=self.limits.max_len, arrival_s=now, grammar_state=grammar_state)
        self._open[request.request_id] = seq
        self._waiting.push(seq)
        record_arrival(self.stats, seq)

    def expect(self, num_requests: int, num_tokens: int) -> None:
        """So many requests, with so many prompt tokens, wait for something else first: they count as waiting."""
        self._waiting.num_elsewhere, self._waiting.num_tokens_elsewhere = num_requests, num_tokens

    def check(self, request: Request, now: float) -> None:
        """Raise what `add` raises."""
        try:
            if request.request_id in self._open:
                raise RequestError(f"Request id {request.request_id} is in use.", "request_id")
            check(request, self.limits)
            if not request.has_place:
                self._waiting.check(len(request.prompt_token_ids), len(self._free_rows), now)
        except (RequestError, QueueFullError):
            self.stats.num_rejected += 1
            raise

    def abort(self, request_id: int, now: float) -> TokenEvent | None:
        """End a request whose caller went away.

        Safe at any time: `update_from_output` ignores a step in flight for it.
        """
        seq = self._open.get(request_id)
        return None if seq is None else self._finish(seq, FinishReason.ABORT, now)

    def fail(self, request_id: int, message: str, now: float, param: str | None = None) -> TokenEvent | None:
        """End one request by the engine's fault, or by that of its own field `param`."""
        seq = self._open.get(request_id)
        if seq is None:
            return None
        self.stats.num_errors += param is None
        return replace(self._finish(seq, FinishReason.ERROR, now, error=message), error_param=param)

    def fail_all(self, message: str, now: float) -> list[TokenEvent]:
        """End every open request: nothing can be computed any more."""
        events = [self.fail(request_id, message, now) for request_id in list(self._open)]
        return self.take_events() + [event for event in events if event is not None]

    def take_events(self) -> list[TokenEvent]:
        """Terminal events of requests that failed outside `update_from_output`."""
        events, self._events = self._events, []
        return events

    # -- one step

    def schedule(self, now: float) -> SchedulerOutput | None:
        """Decide the next step: decodes first, then prefills under way, then the waiting room, all from one budget."""
        output = SchedulerOutput(self._step_id + 1, [])
        behind = self._schedule_decodes(output, now)
        budget = _Budget(self.max_num_batched_tokens - len(output.work))
        for seq in behind:
            if seq.status is Status.RUNNING:
                try:
                    self._give(seq, output, budget)
                except Exception:
                    self._events.append(self._contain(seq, "schedule", now))
        # Who has just been preempted must not come straight back for the blocks it gave up.
        if not output.num_preempted:
            self._admit(output, budget, now)
        if not output.work:
            return None
        self._step_id += 1
        self.stats.step_id = self._step_id
        self.stats.iteration_tokens.observe(self.max_num_batched_tokens - budget.tokens)
        return output

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> list[TokenEvent]:
        """Take a step's answer in: append tokens, share full blocks, decide ends. Whoever left meanwhile is ignored."""
        events = []
        row = 0
        for work in output.work:
            seq, first = work.seq, row
            row += work.num_rows
            if seq.status is not Status.RUNNING:
                continue
            try:
                event = self._advance(work, result, first, now)
            except Exception:
                event = self._contain(seq, "commit", now)
            if event is not None:
                events.append(event)
        return events

    def withdraw(self, output: SchedulerOutput, unfit: list[ScheduledTokens], now: float) -> None:
        """Take `unfit` work out of a step that no rank has seen yet; its sequences end by the engine's fault.

        What it would have computed can be found no more, and who has found it already, in this very step, waits again.
        """
        kept: list[ScheduledTokens] = []
        missing: set[int] = set()  # blocks
        for work in output.work:
            seq, column = work.seq, work.start // self.blocks.block_size
            is_unfit = work in unfit
            if not is_unfit and missing.isdisjoint(seq.block_ids[:column]):
                kept.append(work)
                continue
            missing.update(seq.block_ids[column:])
            self.blocks.forget(seq, column)
            if is_unfit:
                event = self.fail(seq.request_id, INTERNAL, now)
                assert event is not None
                self._events.append(event)
            else:
                self._preempt(seq)
        output.work = kept

    def _schedule_decodes(self, output: SchedulerOutput, now: float) -> list[Sequence]:
        """One token for each sequence that is only one behind; the others are returned."""
        behind = []
        work, block_size = output.work, self.blocks.block_size
        for seq in list(self._running):
            if seq.status is not Status.RUNNING:
                continue  # preempted a moment ago, for the sake of an older one
            start = seq.num_computed_tokens
            if len(seq.token_ids) - start > 1:
                behind.append(seq)
                continue
            try:
                if start < len(seq.block_ids) * block_size or self._grow(seq, output):
                    work.append(ScheduledTokens(seq, start, 1, seq.samples))
            except Exception:
                self._events.append(self._contain(seq, "schedule", now))
        if output.num_preempted:
            output.work = [item for item in work if item.seq.status is Status.RUNNING]
        return behind

    def _grow(self, seq: Sequence, output: SchedulerOutput) -> bool:
        """One more block for `seq`, taken from the youngest if need be. False when `seq` was itself the youngest."""
        self._free_unread(seq, output)
        while (new := self.blocks.allocate_slots(seq, seq.num_computed_tokens + 1)) is None:
            victim = max(self._running, key=lambda other: other.key)
            self._preempt(victim)
            output.num_preempted += 1
            if victim is seq:
                return False
        _add_blocks(output, seq, len(seq.block_ids) - len(new))
        return True

    def _free_unread(self, seq: Sequence, output: SchedulerOutput) -> None:
        output.new_blocks += [(seq.row, column, NULL_BLOCK) for column in self.blocks.free_unread(seq)]

    def _grow_within_window(self, seq: Sequence, num_tokens: int, output: SchedulerOutput) -> int:
        """Blocks for the next `num_tokens` tokens, or for as many as there is room for; return that number.

        Nobody is preempted for them, and a block is left for each other running sequence.
        """
        self._free_unread(seq, output)
        start, column, size = seq.num_computed_tokens, len(seq.block_ids), self.blocks.block_size
        room = max(0, self.blocks.num_available - (len(self._running) - 1))
        num_tokens = min(num_tokens, (column + room) * size - start)
        self.blocks.allocate_slots(seq, start + num_tokens)
        _add_blocks(output, seq, column)
        return num_tokens

    def _preempt(self, seq: Sequence) -> None:
        """Give everything back and wait again; what was generated is kept and will be recomputed like a prompt."""
        self._leave_running(seq)
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        seq.num_passed = 0
        self.stats.num_preemptions += 1
        self._waiting.push(seq)

    def _give(self, seq: Sequence, output: SchedulerOutput, budget: _Budget) -> None:
        """As many tokens of `seq` as the budget allows."""
        start = seq.num_computed_tokens
        num_tokens = min(seq.num_tokens - start, budget.tokens)
        if self.blocks.sliding_window is not None:
            num_tokens = self._grow_within_window(seq, num_tokens, output)
        score_from = num_scored = 0
        if seq.request.params.prompt_logprobs is not None:
            score_from = max(start, seq.num_scored_tokens)
            score_to = seq.num_prompt_tokens - 1  # the prompt's last token predicts a sampled one
            num_scored = max(0, min(start + num_tokens, score_to) - score_from)
        if num_tokens <= 0:
            return
        self.blocks.cache_blocks(seq, start + num_tokens)
        wants_logits = start + num_tokens == seq.num_tokens and seq.samples
        output.work.append(ScheduledTokens(seq, start, num_tokens, wants_logits, score_from, num_scored))
        budget.tokens -= num_tokens

    def _admit(self, output: SchedulerOutput, budget: _Budget, now: float) -> None:
        """Let waiting sequences in, in order: a long prompt at the head is not overtaken for ever.

        Only who was preempted, and would fit but for the larger reserve that he needs therefore, is passed by a few.
        """
        passed: list[Sequence] = []
        while len(passed) < len(self._waiting) and self._free_rows and budget.tokens > 0:
            seq = self._waiting[len(passed)]
            try:
                if self._enter(seq, output, now):
                    self._give(seq, output, budget)
                    for other in passed:
                        other.num_passed += 1
                else:
                    passed.append(seq)
            except Exception:
                self._events.append(self._contain(seq, "admit", now))
            if not all(self._may_be_passed(other) for other in passed):
                break

    def _enter(self, seq: Sequence, output: SchedulerOutput, now: float) -> bool:
        """Give a waiting sequence its row and blocks for all it knows. False when they are not to be had now."""
        num_cached = self.blocks.enter(seq, seq.num_skippable_tokens, self._reserve(seq.num_preemptions))
        if num_cached is None:
            return False
        self._waiting.let_in(seq, now)
        self._running.append(seq)
        seq.status = Status.RUNNING
        seq.row = self._free_rows.pop()
        seq.num_computed_tokens = num_cached
        if seq.first_scheduled_s is None:
            seq.first_scheduled_s = now
            seq.num_cached_tokens = num_cached
            record_first_scheduled(self.stats, seq, now)
        output.new_rows.append(seq)
        _add_blocks(output, seq, 0)
        return True

    def _reserve(self, num_preemptions: int) -> int:
        """Blocks to leave for those who run: one each, so that who enters is not at once preempted by their growth.

        Nobody knows how long answers will be; that a sequence was preempted shows that one was too few. Twice as many
        each time bound the preemptions of one sequence by the logarithm of the pool, whatever `max_tokens` allows.
        """
        return len(self._running) << num_preemptions

    def _may_be_passed(self, seq: Sequence) -> bool:
        return seq.num_passed < MAX_PASSED and seq.num_preemptions > 0 and self.blocks.may_enter(seq, self._reserve(0))

    # -- the answer to a step

    def _advance(self, work: ScheduledTokens, result: ModelRunnerOutput, first: int, now: float) -> TokenEvent | None:
        seq, params = work.seq, work.seq.request.params
        last = first + work.num_scored
        states = result.finite[first : last + work.wants_logits]
        if states.count(FINITE) < len(states):
            return self._end_broken(seq, states, now)
        seq.num_computed_tokens = work.start + work.num_tokens
        if seq.num_computed_tokens // self.blocks.block_size > seq.num_published_blocks:
            self.blocks.cache_blocks(seq, seq.num_computed_tokens)
        scored: Scores = ()
        if work.num_scored:
            seq.num_scored_tokens += work.num_scored
            scored = result.scored(first, last, params.prompt_logprobs or 0)
        if work.wants_logits:
            return self._accept(seq, result, last, now, scored)
        if not seq.samples and seq.num_computed_tokens == seq.num_tokens:
            return self._finish(seq, FinishReason.LENGTH, now, prompt_logprobs=scored)
        if not scored:
            return None
        return TokenEvent(seq.request_id, prompt_logprobs=scored, num_cached_tokens=seq.num_cached_tokens)

    def _end_broken(self, seq: Sequence, states: list[int], now: float) -> TokenEvent | None:
        """The model's numbers are at fault, or else the fields of the request, which ban every token."""
        if NONFINITE not in states:
            return self.fail(seq.request_id, NO_TOKEN, now, seq.masked_by)
        self.stats.num_nonfinite += 1
        self.blocks.forget(seq)  # its KV may be spoilt: nobody else shall find it
        return self.fail(seq.request_id, NOT_FINITE, now)

    def _accept(self, seq: Sequence, result: ModelRunnerOutput, row: int, now: float, scored: Scores) -> TokenEvent:
        """The sampled token becomes the sequence's; it may be its last."""
        params, token = seq.request.params, result.token_ids[row]
        is_stop = token in seq.stop_ids  # none is sampled before `min_tokens`: they were banned
        seq.token_ids.append(token)
        num_generated = len(seq.token_ids) - seq.num_prompt_tokens
        record_token(self.stats, seq, now)
        logprobs = () if params.logprobs is None else (_logprobs(result, row, params.logprobs),)
        state = seq.grammar_state
        if is_stop or (state is not None and state.accept((token,))):
            reason = FinishReason.STOP
        elif num_generated >= params.max_tokens or len(seq.token_ids) >= seq.max_len:
            reason = FinishReason.LENGTH
        else:
            return TokenEvent(seq.request_id, (token,), logprobs, scored, num_cached_tokens=seq.num_cached_tokens)
        return self._finish(
            seq,
            reason,
            now,
            token_ids=(token,),
            logprobs=logprobs,
            prompt_logprobs=scored,
            stop_token_id=token if is_stop else None,
        )

    # -- ends

    def _finish(
        self,
        seq: Sequence,
        reason: FinishReason,
        now: float,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprobs, ...] = (),
        prompt_logprobs: Scores = (),
        stop_token_id: int | None = None,
        error: str | None = None,
    ) -> TokenEvent:
        """The one way out. Blocks and row are free again when this returns."""
        if seq.status is Status.RUNNING:
            self._leave_running(seq)
        else:
            self._waiting.remove(seq)
            self.blocks.free(seq)  # it holds none, unless it failed on its way in
        seq.status = Status.FINISHED
        del self._open[seq.request_id]
        record_finish(self.stats, seq, reason, now)
        return TokenEvent(
            seq.request_id,
            token_ids,
            logprobs,
            prompt_logprobs,
            finish_reason=reason,
            stop_token_id=stop_token_id,
            num_cached_tokens=seq.num_cached_tokens,
            error=error,
        )

    def _contain(self, seq: Sequence, stage: str, now: float) -> TokenEvent:
        """Our own mistake with one sequence ends that sequence, not the engine. Call it from an `except` block."""
        logger.exception("event=request_failed request_id=%d stage=%s", seq.request_id, stage)
        self.blocks.forget(seq)  # it may have published what nobody will compute
        event = self.fail(seq.request_id, INTERNAL, now)
        return event or TokenEvent(seq.request_id, finish_reason=FinishReason.ERROR, error=INTERNAL)

    def _leave_running(self, seq: Sequence) -> None:
        self._running.remove(seq)
        self.blocks.free(seq)
        self._free_rows.append(seq.row)
        seq.row = -1
        seq.status = Status.WAITING

    # -- what can be asked at any time

    def refresh_gauges(self) -> EngineStats:
        """The stats with today's gauges."""
        stats, blocks = self.stats, self.blocks
        stats.num_requests_running = len(self._running)
        waiting = self._waiting
        stats.num_requests_waiting = len(waiting) + waiting.num_elsewhere
        stats.num_waiting_tokens = waiting.num_tokens + waiting.num_tokens_elsewhere
        stats.num_blocks_total = blocks.num_total
        stats.num_blocks_free = blocks.num_free
        stats.num_blocks_cached = blocks.num_cached
        stats.num_blocks_held = blocks.num_held
        stats.kv_cache_usage = blocks.num_held / blocks.num_total
        return stats

    def audit(self) -> None:
        """Raise AssertionError unless all books balance."""
        self.blocks.audit(self._open.values())
        rows = sorted([seq.row for seq in self._running] + self._free_rows)
        assert rows == list(range(self.max_num_seqs)), "rows are lost or shared"
        assert sorted(self._open) == sorted(seq.request_id for seq in [*self._running, *self._waiting])
        for seq in self._waiting:
            assert not seq.block_ids and not seq.num_computed_tokens, "a waiting sequence holds something"
        assert self._waiting.num_tokens == sum(seq.num_prompt_tokens for seq in self._waiting)


def _logprobs(result: ModelRunnerOutput, row: int, num_top: int) -> TokenLogprobs:
    assert result.logprobs is not None and result.ranks is not None
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        assert result.top_ids is not None and result.top_logprobs is not None
        top = tuple(zip(result.top_ids[row][:num_top], result.top_logprobs[row][:num_top], strict=True))
    return TokenLogprobs(result.token_ids[row], result.logprobs[row], result.ranks[row], top)


def _add_blocks(output: SchedulerOutput, seq: Sequence, first_column: int) -> None:
    """The row of `seq` has new blocks from `first_column` on."""
    output.new_blocks += [
        (seq.row, column, block) for column, block in enumerate(seq.block_ids[first_column:], first_column)
    ]
