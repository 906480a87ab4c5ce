"""One step of the engine: scheduler, input batch and executor together.

Used by the engine process and by the simulator. Does not know sockets, signals or the frontend.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import chain, groupby, islice
from typing import TYPE_CHECKING

from oarlock.engine.config import EngineConfig
from oarlock.engine.input_batch.input_batch import InputBatch
from oarlock.engine.input_batch.sampling_metadata import FillMasks, GrammarBitmask, fill_one_by_one
from oarlock.engine.kv_cache.sequence_memory import SequenceMemory
from oarlock.engine.scheduler.adapter_queue import AdapterQueue
from oarlock.engine.scheduler.open_requests import OpenRequests
from oarlock.engine.scheduler.scheduler import Scheduler
from oarlock.engine.scheduler.sequence import ModelRunnerOutput, ScheduledTokens, SchedulerOutput, Sequence, Status
from oarlock.engine.stats import (
    MAX_ADAPTER_LABELS,
    AdaptersState,
    AdapterUse,
    EngineState,
    KvState,
    OpenRequest,
    RequestHistory,
)
from oarlock.engine.types import TokenEvent, TokenEvents
from oarlock.workers.errors import WorkerError

if TYPE_CHECKING:
    from oarlock.workers.executor import Executor

logger = logging.getLogger("oarlock.engine")


class EngineCore:
    """Runs steps: `begin` schedules and submits a step, `finish` collects and applies the output of the oldest step.

    At a pipeline depth of 1 they alternate. At a depth of 2, a step is begun while the previous step runs, so that
    ranks need not wait for the engine. Tokens that are not sampled yet are references in the step, and masks that
    depend on them are sent later by `send_masks`. With pipeline stages, one step is in flight for each stage. Their
    sequences differ, so all tokens are known.
    """

    def __init__(
        self,
        config: EngineConfig,
        executor: "Executor",
        clock: Callable[[], float],
        fill_masks: FillMasks = fill_one_by_one,
    ) -> None:
        info = executor.info
        self.executor = executor
        self.scheduler = Scheduler(config, info)
        self._input_batch = InputBatch(max_num_seqs=self.scheduler.max_num_seqs, vocab_size=info.vocab_size)
        self._clock = clock
        # Terminal events of requests that failed outside `finish`, until they are taken.
        self.ended = self.scheduler.requests.ended
        depth = config.pipeline_depth or executor.best_in_flight
        if config.num_micro_batches > 1:
            depth = config.num_micro_batches
        self.depth = min(depth, executor.max_in_flight)  # most steps in flight; at this number, `finish` must come next
        # output, number of rows of logits, start time
        self._submitted: deque[tuple[SchedulerOutput, int, float]] = deque()
        self.masks: GrammarBitmask | None = None  # masks of the last submitted step that the ranks still need
        self._fill_masks = fill_masks
        self._must_drain = False  # whether the steps in flight must be finished before another is scheduled
        self._mask_s = 0.0  # seconds spent on masks since the last output of the ranks
        self._finished_s = 0.0  # time of the last output of the ranks

    @property
    def num_in_flight(self) -> int:
        """Number of steps that were begun and not finished."""
        return len(self._submitted)

    @property
    def is_full(self) -> bool:
        """Whether `finish` must come next."""
        return len(self._submitted) >= self.depth

    def receive_reports(self) -> None:
        """Receive the ranks' reports of blocks that they read from files or wrote to files, if there are any."""
        for report in [] if self.executor.kv_reports is None else self.executor.kv_reports.receive():
            if self.scheduler.kv_offload is not None:
                self.scheduler.kv_offload.report(report)

    def begin(self) -> SchedulerOutput | None:
        """Schedule and submit a step. If it has masks, `send_masks` must follow before the ranks sample.

        Returns None if there is nothing to do, or if nothing can be done before the next output: then the oldest step
        in flight must be finished before the next call. Raises `WorkerError` if the ranks are lost.
        """
        assert len(self._submitted) < self.depth
        if self.masks is not None:
            self.send_masks()
        if self._must_drain and self._submitted:
            return None  # a postponed sequence must not run again before the output of its step
        self._must_drain = False
        now = self._clock()
        output = self.scheduler.schedule(now, ahead=bool(self._submitted))
        if output is None:
            return None
        try:
            step, masks = self._input_batch.build(output)
        except Exception:
            logger.exception("event=step_build_failed step=%d", output.step_id)
            if not self._withdraw_unfit(output, now):
                return None
            step, masks = self._input_batch.build(output)
        self._submitted.append((output, len(step.logits_indices), now))
        self.masks = masks
        self.executor.submit(step, masks_follow=masks is not None)
        return output

    def finish(self) -> TokenEvents:
        """Collect and apply the next output, and return its events. Raises `WorkerError` if the ranks are lost.

        Masks that waited for this output should be sent next. If the ranks had too little memory for the step, it is
        rolled back together with all later steps in flight.
        """
        if self.masks is not None:
            self.send_masks()
        output, num_rows, begun_s = self._submitted.popleft()
        step_output = self.executor.collect()
        if len(step_output.adapter_failures):
            self.scheduler.requests.report_adapters(step_output, self._clock())
        if step_output.out_of_memory:
            return self._roll_back(output)
        num_pooled = sum([item.seq.pooling is not None for item in output.scheduled]) if output.scheduled else 0
        rows, wanted = (len(step_output.token_ids), len(step_output.pooled_lens)), (num_rows, num_pooled)
        if step_output.step_id != output.step_id or rows != wanted:
            raise WorkerError(
                0, output.step_id, f"it returned step {step_output.step_id} with {rows} rows instead of {wanted}"
            )
        now, scheduler, num_prompt_tokens = self._clock(), self.scheduler, output.num_prompt_tokens
        if num_seqs := len(output.decodes.rows) + len(output.scheduled):
            seconds, stats = now - max(begun_s, self._finished_s), scheduler.stats
            num_before, rank_ns = stats.generation_tokens, self.executor.step_times_ns
            stats.step_time_s.observe(seconds)
            scheduler.requests.log.steps.observe(begun_s, seconds, num_seqs, num_prompt_tokens, num_before, rank_ns)
            scheduler.mask_budget.observe(seconds, self._mask_s)
            self._mask_s = 0.0
            scheduler.step_costs.observe(output.num_decodes + output.num_drafts, num_prompt_tokens, seconds)
        self._finished_s = now
        return scheduler.update_from_output(output, ModelRunnerOutput(step_output), now)

    def _roll_back(self, output: SchedulerOutput) -> TokenEvents:
        """Roll back `output`, which the ranks have refused, and the later steps that were already submitted."""
        if self.masks is not None:  # masks of the last step, which depend on a token of `output`
            self.executor.send_masks(self.masks.allow_all)
            self.masks = None
        outputs = [output]
        while self._submitted:
            later, _, _ = self._submitted.popleft()
            step_output = self.executor.collect()
            if step_output.step_id != later.step_id or not step_output.out_of_memory:
                raise WorkerError(0, later.step_id, f"it ran this step after it had refused step {output.step_id}")
            if len(step_output.adapter_failures):
                self.scheduler.requests.report_adapters(step_output, self._clock())
            outputs.append(later)
        self._finished_s = now = self._clock()
        failed = self.scheduler.roll_back(outputs, now)
        self._input_batch.forget_histories()
        refused = self.scheduler.refused_steps
        assert refused is not None, "a refusal is remembered"
        fields = output.step_id, refused.max_tokens, len(failed)
        logger.warning("event=step_out_of_memory step=%d max_tokens=%d num_failed=%d", *fields)
        return TokenEvents(others=failed)

    def send_masks(self) -> None:
        """Send the ranks the masks that they lack, if all tokens that decide them are known.

        `begin` and `finish` call this first if it was not done. A sequence ends here if its grammar allows only the end
        or raises, and is preempted if there is no time for its mask. In both cases its sampled token is dropped.
        """
        masks = self.masks
        if masks is None or (self.num_in_flight > 1 and masks.must_wait):
            return
        self.masks = None
        begun_s = self._clock()
        self.executor.send_masks(masks.compute(self._fill_masks))
        now = self._clock()
        self._mask_s += now - begun_s
        for seq, error in masks.failed.items():
            event = self.scheduler.end_without_mask(seq, error, now)
            self._must_drain |= event is None
            self.ended += [] if event is None else [event]
        self.ended += [self.scheduler.complete(seq, now) for seq in masks.complete]

    def take_events(self) -> list[TokenEvent]:
        """Return terminal events of requests that failed outside `finish`."""
        return self.scheduler.take_events()

    def _withdraw_unfit(self, output: SchedulerOutput, now: float) -> bool:
        """Remove unbuildable requests from `output`, so that only they fail. Return whether any request is left.

        Raises the exception that is being handled if each request can be built on its own.
        """
        unfit = [item for item in output.items() if not self._fits(item, output)]
        if not unfit:
            raise
        self.scheduler.withdraw(output, unfit, now)
        return output.num_seqs > 0

    def _fits(self, item: ScheduledTokens, output: SchedulerOutput) -> bool:
        """Return whether `item` can be built on its own."""
        row = item.seq.row
        single = SchedulerOutput(
            output.step_id,
            [item],
            new_blocks=[entry for entry in output.new_blocks if entry[1] == row],
            new_rows=[seq for seq in output.new_rows if seq is item.seq],
        )
        try:
            self._input_batch.build(single)
        except Exception:
            logger.exception("event=request_failed request_id=%d stage=build", item.seq.request_id)
            return False
        return True


MAX_CELLS = 4096
MAX_SLOWEST = 20


def live_state(scheduler: Scheduler, now: float) -> EngineState:
    """Return the state between two steps. `now`: the engine's clock."""
    stats, steps = scheduler.refresh_gauges(), scheduler.requests.log.steps
    return EngineState(
        running=stats.num_requests_running,
        waiting=stats.num_requests_waiting,
        kv=_kv_state(scheduler.memory),
        step=steps.times(),
        tokens_per_second=steps.token_rates(now, stats.generation_tokens),
        adapters=None if scheduler.adapters is None else _adapters_state(scheduler.adapters, scheduler.requests),
        slowest=[_open_request(seq, now) for seq in islice(scheduler.requests.by_id.values(), MAX_SLOWEST)],
    )


def _adapters_state(adapters: AdapterQueue, requests: OpenRequests) -> AdaptersState:
    running, open_ones = [
        Counter(seq.request.adapter for seq in sequences) for sequences in (requests.running, requests.by_id.values())
    ]
    named = sorted(
        adapters.registry.by_name.items(),
        key=lambda item: (not item[1].slot, item[1].slot, -open_ones[item[0]], -item[1].last_used),
    )
    return AdaptersState(
        slots=adapters.slots.num_slots,
        in_slots=adapters.slots.num_slots - adapters.slots.num_free,
        host_limit=adapters.registry.max_in_host_memory,
        in_host_memory=adapters.registry.num_ready,
        names=len(named),
        waiting=adapters.num_parked,
        shown=[
            AdapterUse(
                name=name,
                state=adapter.state.value,
                slot=adapter.slot,
                running=running[name],
                waiting=open_ones[name] - running[name],
            )
            for name, adapter in named[:MAX_ADAPTER_LABELS]
        ],
    )


def history(scheduler: Scheduler, request_id: int) -> RequestHistory | None:
    """Return the history of a request that is open or ended recently, or None."""
    seq = scheduler.requests.by_id.get(request_id)
    if seq is not None:
        queue = scheduler.requests.waiting if seq.status is Status.WAITING else ()
        position = next((index for index, waiting in enumerate(queue) if waiting is seq), None)
        return seq.timeline.history(seq.num_generated_tokens, position)
    timeline = scheduler.requests.log.ended.get(request_id)
    return None if timeline is None else timeline.history(timeline.output_tokens)


def _kv_state(memory: SequenceMemory) -> KvState:
    per_cell = -(-memory.num_total // MAX_CELLS)
    return KvState(
        block_size=memory.block_size,
        total=memory.num_total,
        held=memory.num_held,
        cached=memory.num_cached,
        free=memory.num_free,
        cells_of=per_cell,
        map=run_lengths(memory.states(per_cell)),
    )


def run_lengths(letters: Iterable[str]) -> str:
    """Return the run-length encoding: `hhhcc` becomes `h3c2`."""
    return "".join(chain.from_iterable((letter, str(sum(1 for _ in run))) for letter, run in groupby(letters)))


def _open_request(seq: Sequence, now: float) -> OpenRequest:
    return OpenRequest(
        request_id=seq.request_id,
        state="running" if seq.status is Status.RUNNING else "waiting",
        adapter=seq.request.adapter,
        age_s=round(now - seq.timeline.arrival_s, 3),
        prompt_tokens=seq.num_prompt_tokens,
        cached_tokens=seq.timeline.cached_tokens,
        output_tokens=seq.num_generated_tokens,
    )
