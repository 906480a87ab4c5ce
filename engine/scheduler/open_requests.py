"""Open requests of one engine: their state (waiting, loading or running), their rows and blocks, and their ends.

Every request ends in exactly one terminal event and holds no block or row after it. Does not decide what runs next.
"""

import logging
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import islice

from oarlock.engine.config import EngineConfig
from oarlock.engine.errors import INTERNAL, BrokenGrammarError, MaskPostponedError, RequestError
from oarlock.engine.kv_cache.block_events import salt_with_adapter
from oarlock.engine.kv_cache.offload import KVOffload
from oarlock.engine.kv_cache.sequence_memory import SequenceMemory, num_state_slots, page_groups
from oarlock.engine.kv_cache.state_slots import StateSlots
from oarlock.engine.lora.registry import UNKNOWN, Adapter
from oarlock.engine.scheduler.adapter_queue import AdapterQueue
from oarlock.engine.scheduler.decode_state import DecodeState
from oarlock.engine.scheduler.policy import reserved_blocks
from oarlock.engine.scheduler.request_queue import LoadingSequences, RequestQueue
from oarlock.engine.scheduler.sequence import SchedulerOutput, Sequence, Status
from oarlock.engine.scheduler.state_steps import StateRows
from oarlock.engine.scheduler.timeline import MAX_AHEAD, RequestLog
from oarlock.engine.stats import EngineStats
from oarlock.engine.types import FinishReason, Request, TokenEvent
from oarlock.workers.adapters import read_reports
from oarlock.workers.config import WorkerInfo
from oarlock.workers.protocol import StepOutput

logger = logging.getLogger("oarlock.engine")

GRAMMAR_FAILED = "grammar_failed"


class OpenRequests:
    """Sequences of all open requests, with the queue, the blocks and the rows that they share."""

    def __init__(self, config: EngineConfig, info: WorkerInfo) -> None:
        worker, caches_blocks = config.worker, config.enable_prefix_caching and not info.whole_texts
        self.stats = EngineStats()
        self.log = RequestLog(self.stats)
        if any(group.is_recurrent for group in info.groups):
            assert config.speculative is None and info.kv_offload is None, "preflight refuses them for recurrent layers"
        # Every running sequence must be able to get its one token, or decodes would starve each other.
        self.num_rows = min(worker.max_num_seqs, worker.max_num_batched_tokens)
        self.memory = SequenceMemory(
            page_groups(info, self.num_rows),
            info.block_size,
            enable_prefix_caching=caches_blocks,
            max_step_tokens=worker.max_num_batched_tokens,
        )
        self.waiting = RequestQueue(config.max_waiting_requests, config.max_waiting_tokens)
        self.running: list[Sequence] = []  # ordered by admission
        self.free_rows = list(range(self.num_rows - 1, -1, -1))
        tiers = info.kv_offload if caches_blocks else None
        offload = None if tiers is None else KVOffload(tiers, info.block_size, info.step_cost, self.stats)
        self.kv_offload = offload
        if offload is not None:
            self.memory.attach(offload)
        self.adapters: AdapterQueue | None = None  # None: no LoRA adapters are served
        if worker.max_loras:
            self.adapters = AdapterQueue(worker, self.waiting, self.running, self.stats, self.fail)
        self.loading: LoadingSequences | None = None  # None: no KV is kept in files
        if offload is not None and offload.has_disk:
            self.loading = LoadingSequences(offload, self.waiting, self.memory, self._enqueue)
            if self.adapters is not None:
                self.adapters.loading, self.adapters.on_park = self.loading, self.loading.forget
        self.decode_state = DecodeState(self.num_rows, info.block_size, caches_blocks=caches_blocks)
        self.states: StateRows | None = None  # None: the model has no recurrent layers
        if (num_slots := num_state_slots(info)) is not None:
            self.memory.slots = StateSlots(num_slots)
            self.states = StateRows(
                self.memory.slots,
                self.num_rows,
                info.block_size,
                saves_checkpoints=caches_blocks,
                has_stages=worker.pipeline_parallel_size > 1,
            )
        self._by_id: dict[int, Sequence] = {}
        self.ended: list[TokenEvent] = []  # pending terminal events of requests that failed outside a result

    @property
    def by_id(self) -> Mapping[int, Sequence]:
        """Open requests by id, in the order in which they were added."""
        return self._by_id

    def resolve(self, request: Request) -> tuple[Request, Adapter | None]:
        """Return `request` with the salt of its adapter, and the adapter; None: it has none.

        Raises `RequestError` if the name of its adapter is not known.
        """
        if request.adapter is None:
            return request, None
        if self.adapters is None:
            raise RequestError("This server serves no LoRA adapters.", "model", UNKNOWN)
        adapter = self.adapters.registry.resolve(request.adapter)
        return replace(request, cache_salt=salt_with_adapter(request.cache_salt, adapter.digest)), adapter

    def update_queue(self, now: float, *, ahead: bool) -> bool:
        """Queue requests whose adapters have got slots, or whose blocks were read. Return False if the result of the
        previous step must come first."""
        adapters, loading = self.adapters, self.loading
        if adapters is not None and not self._assign(adapters, now, ahead=ahead):
            return False
        if loading is None:
            return True
        loading.update(now)
        return adapters is None or self._assign(adapters, now, ahead=ahead)  # it may have parked requests

    def _assign(self, adapters: AdapterQueue, now: float, *, ahead: bool) -> bool:
        """Give slots to adapters, and preempt requests that must yield theirs."""
        adapters.assign(now)
        if adapters.to_preempt:
            if ahead:
                return False
            for seq in adapters.to_preempt:
                self.preempt(seq, now, is_short=False)
            adapters.assign(now)
        return True

    def report_adapters(self, output: StepOutput, now: float) -> None:
        """Process the reports in `output` about adapters that were loaded, or could not be."""
        if self.adapters is not None:
            reports = read_reports(output.adapter_digests, output.adapter_failures, output.adapter_reasons)
            self.ended += self.adapters.report(reports, output.step_id, now)

    def add(self, seq: Sequence) -> None:
        """Queue a request that was accepted."""
        running, waiting = self.running, self.waiting
        ahead = islice(waiting if waiting.lines else running, MAX_AHEAD)
        num_waiting = len(waiting) + (0 if self.adapters is None else self.adapters.num_parked)
        seq.timeline.arrived(self.log, len(running), num_waiting, tuple(other.request_id for other in ahead))
        self._by_id[seq.request_id] = seq
        self._enqueue(seq, seq.timeline.arrival_s)

    def _enqueue(self, seq: Sequence, now: float) -> None:
        if seq.adapter is None or self.adapters is None:
            self.waiting.push(seq)
        else:
            self.adapters.enqueue(seq, now)

    def start(self, seq: Sequence, output: SchedulerOutput, now: float) -> bool:
        """Give a waiting sequence its row, and blocks for all its tokens. Return False if there are too few."""
        if not self.free_rows:
            self.log.steps.without_row += 1
            return False
        reserve = reserved_blocks(len(self.running), seq.num_preemptions)
        num_cached = self.memory.allocate(seq, seq.num_skippable_tokens, reserve)
        if num_cached is None:
            self.log.steps.without_blocks += seq.awaited_checkpoint is None
            return False
        if self.loading is not None:
            self.loading.release(seq)
        self.waiting.admit(seq, now)
        seq.timeline.admitted(now, num_cached)
        self.running.append(seq)
        seq.status = Status.RUNNING
        seq.row = self.free_rows.pop()
        seq.num_computed_tokens = num_cached
        self.decode_state.take(seq)
        if self.states is not None:
            self.states.take(seq)
        if seq.adapter is not None and self.adapters is not None:
            self.adapters.started(seq)
        output.new_rows.append(seq)
        output.new_blocks += self.memory.all_entries(seq)
        return True

    def preempt(self, seq: Sequence, now: float, *, is_short: bool = True) -> None:
        """Free all blocks of `seq` and queue it again; generated tokens are kept and recomputed like a prompt.

        `is_short`: there were too few blocks, so `seq` returns only when more blocks are free than before.
        """
        self._stop(seq)
        seq.timeline.preempted(now, is_short=is_short)
        seq.num_preemptions += is_short
        seq.num_passed = 0
        seq.has_searched_files = False
        self._enqueue(seq, now)

    # -- ends

    def finish(self, seq: Sequence, reason: FinishReason, now: float, event: TokenEvent | None = None) -> TokenEvent:
        """End a sequence, free its blocks and row, and return `event` made terminal."""
        if seq.status is Status.RUNNING:
            self._stop(seq)
        else:
            self._remove_waiting(seq)
            self.memory.free(seq)  # it holds none, unless it failed while it was admitted
        seq.status = Status.FINISHED
        del self._by_id[seq.request_id]
        if seq.adapter is not None and self.adapters is not None:
            self.adapters.ended(seq)
        seq.timeline.ended(now, reason, seq.num_generated_tokens, is_pooled=seq.pooling is not None)
        event = event or TokenEvent(seq.request_id, num_cached_tokens=seq.timeline.cached_tokens)
        return replace(event, finish_reason=reason)

    def _remove_waiting(self, seq: Sequence) -> None:
        """Remove a waiting sequence from the parked or loading ones, or from the queue."""
        if seq.adapter is not None and self.adapters is not None and self.adapters.discard(seq):
            return
        if self.loading is None:
            self.waiting.remove(seq)
        else:
            self.loading.remove(seq)

    def fail(
        self, seq: Sequence, message: str, now: float, param: str | None = None, code: str | None = None
    ) -> TokenEvent:
        """Fail a sequence because of a fault of the engine, or of its request's field `param`."""
        self.stats.num_errors += param is None
        event = self.finish(seq, FinishReason.ERROR, now)
        return replace(event, error=message, error_param=param, error_code=code)

    def fail_by_grammar(self, seq: Sequence, error: BrokenGrammarError, now: float) -> TokenEvent:
        """Fail a sequence because of its grammar."""
        logger.info("event=request_grammar_failed request_id=%d tokens=%d", seq.request_id, seq.num_generated_tokens)
        param = seq.masking_param
        return self.fail(seq, f"The grammar of '{param}' failed during generation: {error}", now, param, GRAMMAR_FAILED)

    def end_without_mask(self, seq: Sequence, error: Exception, now: float) -> TokenEvent | None:
        """End a running sequence whose mask could not be computed, or preempt it after a `MaskPostponedError`."""
        if isinstance(error, MaskPostponedError):
            self.preempt(seq, now, is_short=False)
            return None
        if isinstance(error, BrokenGrammarError):
            return self.fail_by_grammar(seq, error, now)
        logger.error("event=request_failed request_id=%d stage=mask", seq.request_id, exc_info=error)
        return self.fail(seq, INTERNAL, now)

    def fail_after_exception(self, seq: Sequence, stage: str, now: float) -> TokenEvent:
        """Fail one sequence, but not the engine, after an exception while handling it. Must be called in an `except`
        block."""
        error = sys.exception()
        is_broken = isinstance(error, BrokenGrammarError) and seq.request_id in self._by_id
        if not is_broken:
            logger.exception("event=request_failed request_id=%d stage=%s", seq.request_id, stage)
        self.memory.evict_blocks(seq)  # it may have cached blocks that are not computed now
        if isinstance(error, BrokenGrammarError) and is_broken:
            return self.fail_by_grammar(seq, error, now)
        if seq.request_id not in self._by_id:
            return TokenEvent(seq.request_id, finish_reason=FinishReason.ERROR, error=INTERNAL)
        return self.fail(seq, INTERNAL, now)

    def take_events(self) -> list[TokenEvent]:
        """Return the terminal events of requests that failed outside a result."""
        events = self.ended[:]
        self.ended.clear()
        return events

    def _stop(self, seq: Sequence) -> None:
        self.running.remove(seq)
        self.decode_state.release(seq)
        if self.states is not None:
            self.states.release(seq)
        self.memory.free(seq)
        if seq.adapter is not None and self.adapters is not None:
            self.adapters.may_assign = True
        self.free_rows.append(seq.row)
        seq.row = -1
        seq.status = Status.WAITING

    # -- state

    def refresh_gauges(self) -> EngineStats:
        """Update the gauges and return the stats."""
        stats, waiting, memory = self.stats, self.waiting, self.memory
        loading = [] if self.loading is None else list(self.loading)
        stats.num_requests_running = len(self.running)
        stats.num_requests_loading = len(loading)
        parked = [] if self.adapters is None else list(self.adapters.parked())
        stats.num_requests_waiting = len(waiting) + waiting.num_pending + len(loading) + len(parked)
        num_loading_tokens = sum(seq.num_prompt_tokens for seq in loading)
        num_parked_tokens = sum(seq.num_prompt_tokens for seq in parked)
        num_outside = waiting.num_pending_tokens + num_loading_tokens + num_parked_tokens
        stats.num_waiting_tokens = waiting.num_tokens + num_outside
        stats.num_blocks_total = memory.num_total
        stats.num_blocks_free = memory.num_free
        stats.num_blocks_cached = memory.num_cached
        stats.num_blocks_held = memory.num_held
        stats.kv_cache_usage = memory.usage
        if self.adapters is not None:
            self.adapters.refresh_gauges()
        if self.kv_offload is not None:
            stats.kv_offload_host_blocks = self.kv_offload.host.num_blocks
        if self.states is not None:
            slots = self.states.slots
            stats.num_state_slots_total = slots.num_total
            stats.num_state_slots_held = slots.num_held
            stats.num_state_checkpoints = slots.num_checkpoints
        return stats

    def audit(self) -> None:
        """Raise AssertionError if rows, decode state, blocks, queue and open requests disagree."""
        self.decode_state.audit(self.running)
        self.memory.audit(self._by_id.values())
        if self.states is not None:
            self.states.audit(self.running)
        rows = sorted([seq.row for seq in self.running] + self.free_rows)
        assert rows == list(range(self.num_rows)), "rows are lost or shared"
        waiting = [*self.waiting, *(self.loading or ())]
        if self.adapters is not None:
            self.adapters.audit()
            waiting += self.adapters.parked()
        assert sorted(self._by_id) == sorted(seq.request_id for seq in [*self.running, *waiting])
        for seq in waiting:
            assert not seq.num_computed_tokens and not any(table.block_ids for table in seq.tables), (
                "a waiting sequence holds something"
            )
        assert self.waiting.num_tokens == sum(seq.num_prompt_tokens for seq in self.waiting)
