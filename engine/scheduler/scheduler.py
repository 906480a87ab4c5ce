"""Scheduler that decides which sequences run next, with one token budget per step.

Decodes come first, then drafts, unfinished prefills and the queue.

A sequence has known tokens and computed tokens; each step computes some more of its known tokens. Chunked prefill,
decoding, prefix hits and recomputation after preemption are then the same case, and there are no phases.

Pure: the time is an argument, nothing is random, no set is iterated; the same calls give the same steps. Does not know
tensors, devices, processes or text.
"""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from oarlock.engine.config import EngineConfig
from oarlock.engine.errors import INTERNAL, OUT_OF_MEMORY, QueueFullError, RequestError
from oarlock.engine.scheduler import policy
from oarlock.engine.scheduler.admission import Limits, check
from oarlock.engine.scheduler.decode_state import Drafts
from oarlock.engine.scheduler.mask_budget import MaskBudget
from oarlock.engine.scheduler.open_requests import OpenRequests
from oarlock.engine.scheduler.refused_steps import RefusedSteps, undo, withdraw
from oarlock.engine.scheduler.request_queue import Pending
from oarlock.engine.scheduler.sequence import (
    GrammarMatcherProtocol,
    ModelRunnerOutput,
    ScheduledTokens,
    SchedulerOutput,
    Sequence,
    Status,
)
from oarlock.engine.scheduler.step_cost import StepCosts
from oarlock.engine.scheduler.step_results import StepResults
from oarlock.engine.spec_decode.drafter import Drafter
from oarlock.engine.stats import EngineStats
from oarlock.engine.types import FinishReason, Request, TokenEvent, TokenEvents
from oarlock.workers.config import WorkerInfo, max_token_vectors

# Seconds of waiting that one level of priority is worth. Only more urgent requests that arrive within this time per
# level overtake a request, so no request starves. There are 21 levels, so nothing that arrives ten minutes later can
# overtake it.
PRIORITY_STEP_S = 30.0


class Scheduler:
    """Scheduler of one engine: takes requests, produces steps, and turns the results of steps into events."""

    def __init__(self, config: EngineConfig, info: WorkerInfo) -> None:
        self.requests = requests = OpenRequests(config, info)
        self.limits = Limits.of(info, requests.memory.max_tokens)
        self.stats, self.kv_offload = requests.stats, requests.kv_offload
        self.memory, self.adapters = requests.memory, requests.adapters
        self._pools = requests.memory.pools
        self.max_num_seqs = requests.num_rows
        self.max_num_batched_tokens = config.worker.max_num_batched_tokens
        self._waiting, self._running, self._state = requests.waiting, requests.running, requests.decode_state
        self._states = requests.states
        self._max_vectors = max_token_vectors(info.hidden_size, info.max_model_len if info.whole_texts else 0)
        self._num_micro_batches = config.num_micro_batches  # steps in flight among which decoding sequences are divided
        self.refused_steps: RefusedSteps | None = None  # None: memory suffices, and the ranks have all table entries
        self.step_costs = StepCosts(info.step_cost)
        self._budget = policy.StepBudget(self.step_costs, config.max_step_s, config.num_micro_batches)
        self.drafter = None if config.speculative is None else Drafter(config.speculative, self.step_costs)
        self.mask_budget = MaskBudget()
        self._results = StepResults(requests)
        self._num_arrivals = 0
        self._step_id = 0

    # -- requests

    @property
    def has_work(self) -> bool:
        return bool(self.requests.by_id)

    @property
    def awaits_files(self) -> bool:
        """Whether the ranks read files of KV blocks or of adapters, after which sequences may run that wait now."""
        return bool(self.requests.loading) or (self.adapters is not None and self.adapters.is_loading)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request, now: float, grammar_matcher: GrammarMatcherProtocol | None = None) -> None:
        """Queue a request. Raise `RequestError` if it can never run, `QueueFullError` if the queue is full."""
        assert (request.params.grammar is None) == (grammar_matcher is None), "a grammar and its matcher come together"
        self.check(request, now)
        request, adapter = self.requests.resolve(request)
        self._num_arrivals += 1
        key = (now + request.priority * PRIORITY_STEP_S, self._num_arrivals)
        self.requests.add(
            Sequence(
                request,
                key=key,
                max_len=self.limits.max_len,
                arrival_s=now,
                grammar_matcher=grammar_matcher,
                tables=self.memory.new_tables(),
                adapter=adapter,
            )
        )

    def set_pending(self, pending: Mapping[str, tuple[int, int]]) -> None:
        """Set the numbers of requests and of prompt tokens, by client, that are accepted but not yet added."""
        self._waiting.pending = {client: Pending(*counts) for client, counts in pending.items()}

    def check(self, request: Request, now: float) -> None:
        """Raise the errors of `add` without adding the request."""
        try:
            if request.request_id in self.requests.by_id:
                raise RequestError(f"Request id {request.request_id} is in use.", "request_id")
            check(request, self.limits)
            self.requests.resolve(request)
            if not request.is_admitted:
                num_free = len(self.requests.free_rows)
                self._waiting.check(len(request.prompt_token_ids), num_free, now, request.client)
        except (RequestError, QueueFullError):
            self.stats.num_rejected += 1
            raise

    def abort(self, request_id: int, now: float) -> TokenEvent | None:
        """End a request whose caller has left, even with a step in flight for it. Return None if it is not known."""
        seq = self.requests.by_id.get(request_id)
        return None if seq is None else self.requests.finish(seq, FinishReason.ABORT, now)

    def fail(self, request_id: int, message: str, now: float) -> TokenEvent | None:
        """Fail one request because of a fault of the engine. Return None if it is not known."""
        seq = self.requests.by_id.get(request_id)
        return None if seq is None else self.requests.fail(seq, message, now)

    def end_without_mask(self, seq: Sequence, error: Exception, now: float) -> TokenEvent | None:
        """End a running sequence whose mask could not be computed, or preempt it after a `MaskPostponedError`.

        Then no step may be scheduled until the results of all steps in flight have been applied.
        """
        return self.requests.end_without_mask(seq, error, now)

    def complete(self, seq: Sequence, now: float) -> TokenEvent:
        """End a running sequence whose grammar allows nothing but the end."""
        return self.requests.finish(seq, FinishReason.STOP, now)

    def fail_all(self, message: str, now: float) -> list[TokenEvent]:
        """Fail every open request."""
        events = [self.requests.fail(seq, message, now) for seq in list(self.requests.by_id.values())]
        return self.take_events() + events

    def take_events(self) -> list[TokenEvent]:
        """Return the terminal events of requests that failed outside `update_from_output`."""
        return self.requests.take_events()

    def refresh_gauges(self) -> EngineStats:
        """Update the gauges and return the stats."""
        return self.requests.refresh_gauges()

    # -- one step

    def schedule(self, now: float, *, ahead: bool = False) -> SchedulerOutput | None:
        """Decide the next step: decodes with their drafts first, then unfinished prefills, then the queue.

        `ahead`: the result of the previous step is still missing. Return None if nothing can run, or if that result
        must come first.
        """
        if not self.requests.update_queue(now, ahead=ahead):
            return None
        # If the ranks lack memory, steps are smaller, have no drafts and are not sent ahead.
        max_tokens, max_drafts = self.max_num_batched_tokens, 0
        if self.refused_steps is not None:
            max_tokens = self.refused_steps.max_tokens or max_tokens
        is_short = max_tokens < self.max_num_batched_tokens
        if self.drafter is not None and not is_short:
            max_drafts = self._max_drafts(max_tokens)
        if ahead and (is_short or self._must_wait(max_drafts)):
            return None
        if self._waiting.lines and not self._preempt_over_share(now, ahead=ahead):
            return None
        rows, max_decodes = self._state.order, 0  # usually every running sequence takes part
        if is_short or self._num_micro_batches > 1 or self._state.may_be_slow:
            chosen = self._choose_rows(max_tokens, ahead=ahead)
            if chosen is None:
                return None
            rows, max_decodes = chosen
        output = SchedulerOutput(self._step_id + 1, [], is_ahead=ahead)
        drafts = self._choose_drafts(rows, max_drafts, ahead=ahead) if max_drafts > 0 else {}
        if self._states is not None:
            self._states.slots.begin_step()
        unfinished = self._schedule_decodes(output, rows, drafts, now)
        if unfinished or self._waiting.lines:
            self._schedule_prompts(output, unfinished, max_decodes, max_tokens, now)
        elif self._num_micro_batches > 1:
            self._budget.end_prompts()
        if self._states is not None:
            self._states.schedule(output)
        if output.num_decodes or output.scheduled:
            if self.refused_steps is not None:
                self.refused_steps.begin(output)
            self.stats.iteration_tokens.observe(output.num_decodes + output.num_drafts + output.num_prompt_tokens)
        elif (output := self._commands_only(output, now)) is None:
            return None
        if self.kv_offload is not None:
            output.kv_copies = self.kv_offload.take_copies()
        if self.adapters is not None:
            output.adapter_commands = self.adapters.take_commands(output.step_id, now)
            output.has_adapters = self._state.num_adapted > 0
        self.stats.step_id = self._step_id = output.step_id
        return output

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput, now: float) -> TokenEvents:
        """Append tokens, cache full blocks and end complete sequences; return the events.

        Sequences that have ended since the step was scheduled are ignored. So are preempted sequences, which cannot run
        again before this call: their token is sampled again.
        """
        if output.kv_copies is not None and self.kv_offload is not None:
            self.kv_offload.finish_copies(output.kv_copies)
        if self.refused_steps is not None and output.num_seqs:
            self.refused_steps.ran(output)
            if self.refused_steps.is_over:
                self.refused_steps = None
        return self._results.apply(output, result, now)

    def roll_back(self, outputs: list[SchedulerOutput], now: float) -> list[TokenEvent]:
        """Undo `outputs`, which are all steps in flight. Return the events of requests that fail.

        The ranks refused the first step for lack of memory, and with it all steps sent ahead. The next step is smaller.
        """
        self.stats.num_refused_steps += 1
        self.requests.log.steps.refused(now)
        in_first, to_preempt = undo(outputs, self._state, self.memory, self._states)
        for output in outputs:
            if output.kv_copies is not None and self.kv_offload is not None:
                self.kv_offload.finish_copies(output.kv_copies)
        self.refused_steps = self.refused_steps or RefusedSteps(self.max_num_batched_tokens)
        unfit = self.refused_steps.shrink(outputs, in_first, self._running)
        for seq in to_preempt:
            self.requests.preempt(seq, now, is_short=False)
        if unfit is None:
            return []
        return [replace(self.requests.fail(unfit, OUT_OF_MEMORY, now), error_code="out_of_memory")]

    def withdraw(self, output: SchedulerOutput, unfit: list[ScheduledTokens], now: float) -> None:
        """Remove `unfit` from a step that was not submitted yet, and fail their sequences because of a fault of the
        engine.

        Blocks they would have filled leave the prefix cache, and sequences that share these blocks in this step wait
        again.
        """
        failed, requeued, kept = withdraw(output, unfit, self.memory)
        if self._states is not None:
            self._states.keep(output, kept)
        for seq in failed:
            self.requests.ended.append(self.requests.fail(seq, INTERNAL, now))
        for seq in requeued:
            self.requests.preempt(seq, now)
        if not output.num_seqs:
            if output.new_blocks:
                self._keep_table_entries(output)
            if output.kv_copies is not None and self.kv_offload is not None:
                self.kv_offload.restore_copies(output.kv_copies)
            if self.adapters is not None:
                self.adapters.restore_commands(output.adapter_commands)
                output.adapter_commands = None

    # -- the sequences of a step

    def _max_drafts(self, max_tokens: int) -> int:
        """Return the maximum number of drafts in a step of `max_tokens` tokens, one for each running sequence."""
        has_prompts = bool(self.requests.free_rows and self._waiting.lines) or self._state.any_unfinished()
        num_left = max_tokens - len(self._running)
        return self._budget.drafts(len(self._running), num_left, beside_prompts=has_prompts)

    def _must_wait(self, max_drafts: int) -> bool:
        """Return whether the next step can be scheduled only after the result of the step in flight.

        If so, the whole step waits: a step without some of its sequences, followed by another step for them, would read
        all weights twice. Micro-batches do not wait, because their sequences differ.

        All sequences wait if a sequence might be preempted. Each may need a block, and either the token that is being
        sampled would be lost, or the sequence to preempt might just end. The end of a sequence by its length is known
        ahead, so it gets no further row. A sequence that ends by a stop token gets another row, whose token is dropped.
        """
        if self._num_micro_batches > 1:
            return False
        for pool in self._pools:
            if pool.num_available < len(self._running):
                return True
        return self.drafter is not None and self._state.drafts_wait(self.drafter, max_drafts)

    def _preempt_over_share(self, now: float, *, ahead: bool) -> bool:
        """Preempt sequences for the head of the queue according to the policy. Return False if the result of the
        previous step must come first."""
        shared = self._running, self._waiting, self.max_num_seqs, self.memory
        while (victim := policy.choose_victim_for_head(*shared)) is not None:
            if ahead:
                return False
            self.requests.preempt(victim, now, is_short=False)
        return True

    def _choose_rows(self, max_tokens: int, *, ahead: bool) -> tuple[np.ndarray, int] | None:
        """Choose the sequences of a step in which some may pause: memory is short, micro-batches, or slow masks.

        Return their rows, int64 [R], and for micro-batches the maximum number of sequences that decode in one. Return
        None if the results of the steps in flight must come first.
        """
        state, max_decodes = self._state, 0
        if max_tokens < self.max_num_batched_tokens:
            rows = state.with_oldest(max_tokens)
        elif self._num_micro_batches > 1:
            rows, max_decodes = state.next_micro_batch(self._num_micro_batches)
            if state.may_preempt(rows, self.memory.num_available):
                if ahead:
                    return None
                rows = state.with_oldest(max_decodes)  # keep at least one row
        else:
            rows = state.order
        if state.may_be_slow:
            rows = self.mask_budget.choose(state, rows, any_waiting=bool(self._waiting.lines))
            state.may_be_slow = bool(len(state.mask_s.nonzero()[0]))
        return rows, max_decodes

    def _choose_drafts(self, rows: np.ndarray, max_drafts: int, *, ahead: bool) -> Drafts:
        """Choose up to `max_drafts` drafts for the sequences of `rows`, int64 [R].

        A step sent ahead has none, because drafts must follow a known token. In micro-batches all tokens are known.
        """
        if self.drafter is None or (ahead and self._num_micro_batches == 1):
            return {}
        return self._state.choose_drafts(rows, self.drafter, max_drafts)

    def _commands_only(self, output: SchedulerOutput, now: float) -> SchedulerOutput | None:
        """Return a step with only KV copies and commands for adapters instead of `output`, which computes nothing; None
        if there are none.

        Such a step is not sent ahead. The next step gets the table entries of `output`.
        """
        if output.new_blocks:
            self._keep_table_entries(output)
        has_copies = self.kv_offload is not None and self.kv_offload.has_copies
        has_commands = self.adapters is not None and self.adapters.has_commands(now)
        return None if output.is_ahead or not (has_copies or has_commands) else SchedulerOutput(output.step_id, [])

    def _keep_table_entries(self, output: SchedulerOutput) -> None:
        """Keep the table entries of `output`, which is not sent, for the next step."""
        self.refused_steps = self.refused_steps or RefusedSteps(self.max_num_batched_tokens)
        self.refused_steps.drop(output)

    # -- decodes and their drafts

    def _schedule_decodes(
        self, output: SchedulerOutput, rows: np.ndarray, drafts: Drafts, now: float
    ) -> list[Sequence]:
        """Schedule one token, and its drafts, for each sequence of `rows`, int64 [R], with at most one token to
        compute.

        Return the sequences with more tokens to compute.
        """
        state = self._state
        positions = state.num_computed[rows]
        needs_inspection = positions >= state.plain_until[rows]
        if drafts:
            needs_inspection |= np.isin(rows, list(drafts))
        inspected = needs_inspection.nonzero()[0]
        if not len(inspected):
            output.decodes, output.num_decodes = state.schedule(rows, positions), len(rows)
            return []
        is_plain, unfinished, num_released = np.ones(len(rows), bool), [], state.num_released
        memory = self.memory
        block_size, is_simple = memory.block_size, not drafts and not memory.has_spans
        entries = (some.tolist() for some in (inspected, rows[inspected], positions[inspected]))
        for index, row, start in zip(*entries, strict=True):
            seq = state.seqs[row]
            if seq is None:
                continue  # preempted earlier in this loop
            try:
                only_grows = is_simple and start == len(seq.block_ids) * block_size and start < seq.num_to_compute
                only_grows &= not seq.decodes_individually and state.num_tokens.item(row) <= start + 1
                if only_grows and memory.grow_by_one(seq, output.new_blocks):
                    state.plain_until[row] = min(start + block_size, seq.num_to_compute)
                    continue
                if not self._may_decode(seq, output, unfinished, now):
                    is_plain[index] = False
                    continue
                drafted = drafts.get(seq.row, [])
                drafted = drafted[: self._allocate_for_drafts(seq, len(drafted), output)] if drafted else drafted
                if seq.decodes_individually or drafted:
                    is_plain[index] = False
                    count = 1 + len(drafted)
                    output.scheduled.append(ScheduledTokens(seq, start, count, seq.samples, drafts=tuple(drafted)))
                    seq.num_computed_tokens = start + count
                state.refresh_plain(seq)
            except Exception:
                self._fail_scheduling(seq, now)
        if state.num_released > num_released:
            is_plain &= state.still_run(rows, num_released)
        if not is_plain.all():
            rows, positions = rows[is_plain], positions[is_plain]
        output.decodes, output.num_decodes = state.schedule(rows, positions), len(rows)
        output.scheduled = [item for item in output.scheduled if item.seq.status is Status.RUNNING]
        if output.scheduled:
            output.num_decodes += len(output.scheduled)
            output.num_drafts = sum(len(item.drafts) for item in output.scheduled)
        return [seq for seq in unfinished if seq.status is Status.RUNNING]

    def _may_decode(self, seq: Sequence, output: SchedulerOutput, unfinished: list[Sequence], now: float) -> bool:
        """Return whether `seq` gets a token now; if so, it has a block for it. Append it to `unfinished` if it has
        more to compute."""
        start = seq.num_computed_tokens
        if self._state.num_tokens.item(seq.row) > start + 1:
            unfinished.append(seq)
            return False
        if start >= seq.num_to_compute:
            return False  # it ends with the result of the previous step
        has_block = start < len(seq.block_ids) * self.memory.block_size
        return has_block or self._allocate_next_block(seq, output, now)

    def _allocate_next_block(self, seq: Sequence, output: SchedulerOutput, now: float) -> bool:
        """Allocate one more block for `seq`, preempting sequences if needed. Return False if `seq` was itself
        preempted."""
        if self.memory.has_spans:
            self.memory.free_unread(seq, output.new_blocks)
        while not self.memory.grow(seq, seq.num_computed_tokens + 1, output.new_blocks):
            victim = policy.choose_victim(self._running)
            self.requests.preempt(victim, now)
            output.num_preempted += 1
            if victim is seq:
                return False
        return True

    def _allocate_for_drafts(self, seq: Sequence, most: int, output: SchedulerOutput) -> int:
        """Allocate blocks for up to `most` tokens after the next token of `seq`; return their number.

        If possible, leave a block for each running sequence, so that nothing is preempted for drafts.
        """
        if output.num_preempted:
            return 0
        num_known = seq.num_computed_tokens + 1
        num_tokens = self.memory.grow_up_to(seq, num_known + most, len(self._running), output.new_blocks)
        return num_tokens - num_known

    # -- prompts

    def _schedule_prompts(
        self, output: SchedulerOutput, unfinished: list[Sequence], max_decodes: int, max_tokens: int, now: float
    ) -> None:
        """Divide the remaining tokens of a step of `max_tokens` tokens among `unfinished` prefills and waiting prompts.

        `max_decodes`: maximum number of sequences that decode in a micro-batch; 0 without micro-batches.
        """
        num_rows = output.num_decodes + output.num_drafts
        num_left = policy.num_tokens_left(unfinished, self._waiting)
        num_upcoming = policy.num_upcoming(self._running, unfinished, self._waiting, len(self.requests.free_rows))
        whole = self._budget.prompt_tokens(
            max(num_rows, max_decodes), max_tokens - num_rows, num_left, num_upcoming // self._num_micro_batches
        )
        first, last, normal_only = policy.split_by_priority(unfinished, self._waiting)
        budget = self._share_among_prompts(output, first, whole, now)
        # A sequence that was just preempted must not get the blocks that it gave up back at once.
        if not output.num_preempted:
            budget = self._admit_in_order(output, budget, now, normal_only=normal_only)
        if budget == whole:  # otherwise keep the step short for the waiting sequences
            budget = self._share_among_prompts(output, last, budget, now)
        if self.memory.has_spans and unfinished and not output.num_seqs and not output.is_ahead:
            budget = self._make_room(output, first + last, budget, now)
        output.num_prompt_tokens = whole - budget

    def _share_among_prompts(self, output: SchedulerOutput, under_way: list[Sequence], budget: int, now: float) -> int:
        """Give a step's token budget to the prompts `under_way`, oldest first; return the rest of the budget.

        Up to half goes to prompts other than the oldest: first to those under way, fewest remaining tokens first, then
        to waiting prompts shorter than half of it. A short prompt behind a long prompt is therefore served soon, and
        the long prompt takes at most twice as long. Prompts of about equal length follow one another, which serves them
        sooner on average.
        """
        if not under_way:
            return budget
        oldest, *others = under_way
        share = budget // 2
        for seq in sorted(others, key=policy.num_left):
            share -= self._schedule_prompt(seq, output, share, now)
        for seq in policy.waiting_of_half_length(oldest, self._waiting):
            taken = self._schedule_prompt(seq, output, share, now) if share else 0
            if taken == 0 and seq.awaited_checkpoint is None:
                break
            share -= taken
        budget -= budget // 2 - share
        return budget - self._schedule_prompt(oldest, output, budget, now)

    def _admit_in_order(self, output: SchedulerOutput, budget: int, now: float, *, normal_only: bool) -> int:
        """Admit waiting sequences in order and schedule them; return the rest of the budget.

        A sequence that cannot be admitted blocks the sequences behind it, so that long prompts are served, unless it
        may be passed. `normal_only`: admit only sequences of normal priority.
        """
        passed: list[Sequence] = []
        while len(passed) < min(len(self._waiting), policy.MAX_CONSIDERED) and budget > 0:
            seq = self._waiting[len(passed)]
            if normal_only and seq.request.is_low_priority:
                break
            budget -= self._schedule_prompt(seq, output, budget, now)
            if seq.status is Status.RUNNING:
                for other in passed:
                    other.num_passed += 1
            elif seq.status is Status.WAITING:
                if not self.requests.free_rows:
                    break
                passed.append(seq)
            if not all(policy.may_be_passed(other, self._running, self.memory) for other in passed):
                break
        return budget

    def _schedule_prompt(self, seq: Sequence, output: SchedulerOutput, budget: int, now: float) -> int:
        """Schedule tokens of a prompt, admitting it first if it waits; return their number. An exception fails only
        this sequence."""
        if self.limits.is_encoder and not policy.has_room_for_text(seq, output, budget, self._max_vectors):
            return 0
        try:
            if seq.status is Status.WAITING and (output.num_preempted or not self.requests.start(seq, output, now)):
                return 0
            return self._schedule_tokens(seq, output, budget, now)
        except Exception:
            self._fail_scheduling(seq, now)
            return 0

    def _schedule_tokens(self, seq: Sequence, output: SchedulerOutput, budget: int, now: float) -> int:
        """Schedule as many tokens of `seq` as the budget allows; return their number."""
        start = seq.num_computed_tokens
        num_tokens = seq.num_tokens - start
        if not self.limits.is_encoder:
            num_tokens = min(num_tokens, budget)
        is_last = num_tokens == seq.num_tokens - start
        if is_last and seq.grammar_matcher is not None and seq.samples and seq.grammar_matcher.expected_s:
            # The last token of the prompt takes its turn among the slow masks, like later tokens.
            num_tokens -= num_tokens > 1 or bool(output.num_decodes or output.scheduled)
        if seq.returns_token_vectors:
            num_tokens = min(num_tokens, self._max_vectors - output.num_token_vectors)
        if self.memory.has_spans:
            num_tokens = self._allocate_within_span(seq, num_tokens, output)
        score_from, num_scored = seq.tokens_to_score(start, num_tokens)
        if num_tokens <= 0:
            return 0
        self.memory.cache_blocks(seq, start + num_tokens)
        wants_logits = start + num_tokens == seq.num_tokens and seq.samples
        output.scheduled.append(ScheduledTokens(seq, start, num_tokens, wants_logits, score_from, num_scored))
        output.num_token_vectors += seq.returns_token_vectors * num_tokens
        seq.num_computed_tokens = start + num_tokens
        seq.timeline.computed(now, output.step_id, num_tokens, output.num_decodes)
        self._state.refresh_plain(seq)
        self._state.refresh_inspect_at(seq)
        return num_tokens

    def _allocate_within_span(self, seq: Sequence, num_tokens: int, output: SchedulerOutput) -> int:
        """Allocate blocks for up to `num_tokens` next tokens; return the number of tokens with blocks.

        Leave a block for each of the other running sequences.
        """
        self.memory.free_unread(seq, output.new_blocks)
        start = seq.num_computed_tokens
        return self.memory.grow_up_to(seq, start + num_tokens, len(self._running) - 1, output.new_blocks) - start

    def _make_room(self, output: SchedulerOutput, under_way: list[Sequence], budget: int, now: float) -> int:
        """Preempt the newest sequences until a prompt `under_way` gets blocks, since each waits for blocks of the
        others; return the rest of the budget.

        Sequences that were admitted in this step come first, so that they do not get the blocks of others.
        """
        while not output.num_seqs and len(self._running) > 1:
            new = [seq for seq in output.new_rows if seq.status is Status.RUNNING]
            self.requests.preempt(policy.choose_victim(new or self._running), now)
            output.num_preempted += 1
            for seq in under_way:
                if seq.status is Status.RUNNING and not output.num_seqs:
                    budget -= self._schedule_prompt(seq, output, budget, now)
        return budget

    def _fail_scheduling(self, seq: Sequence, now: float) -> None:
        """End one sequence after an exception while handling it. Must be called in an `except` block."""
        self.requests.ended.append(self.requests.fail_after_exception(seq, "schedule", now))

    def audit(self) -> None:
        """Raise AssertionError if rows, decode state, blocks, queue and open requests disagree."""
        self.requests.audit()
