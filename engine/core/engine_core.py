"""One step of the engine: scheduler, input batch and executor together.

Used by the engine process and by the simulator. Does not know sockets, signals or the frontend.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from oarlock.engine.config import EngineConfig
from oarlock.engine.errors import INTERNAL, WorkerError
from oarlock.engine.input_batch.grammar_bitmask import FillMasks, GrammarBitmask, fill_one_by_one
from oarlock.engine.input_batch.input_batch import BuiltStep, InputBatch
from oarlock.engine.scheduler.output import ModelRunnerOutput, ScheduledTokens, SchedulerOutput
from oarlock.engine.scheduler.scheduler import Scheduler
from oarlock.engine.types import TokenEvent, TokenEvents

if TYPE_CHECKING:
    from oarlock.workers.executor import Executor

logger = logging.getLogger("oarlock.engine")


class _Submitted(NamedTuple):
    """A step whose answer is still to come."""

    output: SchedulerOutput
    num_rows: int
    begun_s: float


class EngineCore:
    """`begin` schedules and submits a step, `finish` collects and applies the answer to the oldest one submitted.

    At a pipeline depth of 1 they alternate. At 2 a step is begun while the one before runs, so that ranks need not wait
    for the engine; tokens that are not sampled yet are references in the step, and masks that depend on them are sent
    after it: `send_masks`. With pipeline stages a step is in flight for each of them, and their sequences differ, so
    that all tokens are known.
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
        self._input_batch = InputBatch(
            max_num_seqs=self.scheduler.max_num_seqs,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            vocab_size=info.vocab_size,
        )
        self._clock = clock
        self._events: list[TokenEvent] = []
        depth = config.pipeline_depth or executor.best_in_flight
        if config.num_micro_batches > 1:
            depth = config.num_micro_batches
        self._depth = min(depth, executor.max_in_flight)
        self._submitted: deque[_Submitted] = deque()
        self._masks: GrammarBitmask | None = None  # of the step submitted last, as long as the ranks lack them
        self._fill_masks = fill_masks
        self._finished_s = 0.0  # when the last answer came

    @property
    def num_in_flight(self) -> int:
        """Steps that were begun and not finished."""
        return len(self._submitted)

    @property
    def is_full(self) -> bool:
        """Whether `finish` must come next."""
        return len(self._submitted) >= self._depth

    def receive_reports(self) -> None:
        """Receive the ranks' reports of blocks that they read from files or wrote to them."""
        if self.executor.kv_reports is not None:
            for report in self.executor.kv_reports.receive():
                self.scheduler.kv_offload.report(report)

    def begin(self) -> SchedulerOutput | None:
        """Schedule and submit a step. If it has masks, `send_masks` must follow before the ranks sample.

        None when there is nothing to do, or nothing before an answer is known: then the oldest step in flight must be
        finished before the next call. Raises `WorkerError` when the ranks are lost.
        """
        assert not self.is_full
        self.send_masks()
        now = self._clock()
        output = self.scheduler.schedule(now, ahead=self.num_in_flight > 0)
        built = None if output is None else self._build(output, now)
        if output is None or built is None:
            return None
        self._submitted.append(_Submitted(output, len(built.step.logits_indices), now))
        self._masks = built.masks
        self.executor.submit(built.step, masks_follow=built.masks is not None)
        return output

    def finish(self) -> TokenEvents:
        """Collect and apply the next answer; return its events. Raises `WorkerError` when the ranks are lost.

        Masks that waited for this answer should be sent next. When the ranks had too little memory for the step, it is
        taken back with all steps in flight behind it.
        """
        self.send_masks()
        output, num_rows, begun_s = self._submitted.popleft()
        answer = self.executor.collect()
        if answer.out_of_memory:
            return self._take_back(output)
        rows, wanted = (len(answer.token_ids), len(answer.pooled_lens)), (num_rows, output.num_pooled)
        if answer.step_id != output.step_id or rows != wanted:
            raise WorkerError(
                0, output.step_id, f"it answered step {answer.step_id} with {rows} rows instead of {wanted}"
            )
        now = self._clock()
        if output.num_seqs:
            self._observe(output, begun_s, now - max(begun_s, self._finished_s))
        self._finished_s = now
        return self.scheduler.update_from_output(output, ModelRunnerOutput(answer), now)

    def _observe(self, output: SchedulerOutput, begun_s: float, seconds: float) -> None:
        scheduler, num_prompt_tokens = self.scheduler, output.num_prompt_tokens
        num_before, rank_ns = scheduler.stats.generation_tokens, self.executor.step_times_ns
        scheduler.stats.step_time_s.observe(seconds)
        scheduler.requests.log.steps.observe(begun_s, seconds, output.num_seqs, num_prompt_tokens, num_before, rank_ns)
        scheduler.step_costs.observe(output.num_decodes + output.num_drafts, num_prompt_tokens, seconds)

    def _take_back(self, output: SchedulerOutput) -> TokenEvents:
        """Take back `output`, which the ranks have refused, and the steps that were sent ahead behind it."""
        if self._masks is not None:  # masks of the last step, which wait for a token of `output`
            self.executor.send_masks(self._masks.until_known)
            self._masks = None
        outputs = [output]
        while self._submitted:
            later = self._submitted.popleft().output
            answer = self.executor.collect()
            if answer.step_id != later.step_id or not answer.out_of_memory:
                raise WorkerError(0, later.step_id, f"it ran a step behind step {output.step_id}, which it had refused")
            outputs.append(later)
        self._finished_s = now = self._clock()
        failed = self.scheduler.take_back(outputs, now)
        self._input_batch.forget_histories()
        logger.warning(
            "event=step_out_of_memory step=%d most_tokens=%d num_failed=%d",
            output.step_id,
            self.scheduler.refused_steps.most_tokens,
            len(failed),
        )
        return TokenEvents(others=failed)

    def send_masks(self) -> None:
        """Send the ranks the masks that they lack, if all tokens that decide them are known. `begin` and `finish` do so
        first if it was not done.

        A sequence ends here if its grammar allows only the end or raises: the token sampled for it is dropped.
        """
        masks = self._masks
        if masks is None or (self.num_in_flight > 1 and masks.must_wait):
            return
        self._masks = None
        self.executor.send_masks(masks.compute(self._fill_masks))
        now = self._clock()
        failures = [self.scheduler.fail(seq.request_id, INTERNAL, now) for seq in masks.failed]
        self._events += [event for event in failures if event is not None]
        self._events += [self.scheduler.complete(seq, now) for seq in masks.complete]

    def take_events(self) -> list[TokenEvent]:
        """Terminal events of requests that failed outside `finish`."""
        events, self._events = self._events, []
        return self.scheduler.take_events() + events

    def _build(self, output: SchedulerOutput, now: float) -> BuiltStep | None:
        """Build the step's arrays; None if nothing is left of it. A request that cannot be built fails alone."""
        try:
            return self._input_batch.build(output)
        except Exception:
            logger.exception("event=build_failed step=%d", output.step_id)
            unfit = [item for item in output.items() if not self._fits(item, output)]
            if not unfit:
                raise
        self.scheduler.withdraw(output, unfit, now)
        return self._input_batch.build(output) if output.num_seqs else None

    def _fits(self, item: ScheduledTokens, output: SchedulerOutput) -> bool:
        """Whether `item` can be built on its own."""
        row = item.seq.row
        alone = SchedulerOutput(
            output.step_id,
            [item],
            new_blocks=[entry for entry in output.new_blocks if entry[0] == row],
            new_rows=[seq for seq in output.new_rows if seq is item.seq],
        )
        try:
            self._input_batch.build(alone)
        except Exception:
            logger.exception("event=request_failed request_id=%d stage=build", item.seq.request_id)
            return False
        return True
