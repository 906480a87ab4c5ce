"""One step of the engine: scheduler, input batch and executor together.

Used by the engine process and by the simulator. Does not know sockets, signals or the frontend.
"""

import logging
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from engine.config import EngineConfig
from engine.core.step_times import StepTimes
from engine.errors import INTERNAL, WorkerError
from engine.input_batch.input_batch import BuiltStep, InputBatch
from engine.scheduler.output import ModelRunnerOutput, ScheduledTokens, SchedulerOutput
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Sequence
from engine.types import TokenEvent
from workers.protocol import StepOutput

if TYPE_CHECKING:
    from workers.executor import Executor

logger = logging.getLogger("oarlock.engine")


class _Submitted(NamedTuple):
    """A step whose answer is still to come."""

    output: SchedulerOutput
    num_rows: int
    begun_s: float


class EngineCore:
    """`begin` schedules and submits a step, `finish` collects and applies the answer to the oldest one submitted.

    At a pipeline depth of 1 they alternate. At 2 a step is begun while the one before runs, so that ranks need not wait
    for the engine; tokens that only the answer to that one will tell are references in the step.
    """

    def __init__(self, config: EngineConfig, executor: "Executor", clock: Callable[[], float]) -> None:
        info = executor.info
        self.executor = executor
        self.scheduler = Scheduler(config, info)
        self._input_batch = InputBatch(
            max_num_seqs=self.scheduler.max_num_seqs,
            max_model_len=info.max_model_len,
            block_size=info.block_size,
            vocab_size=info.vocab_size,
        )
        self._step_times = StepTimes(info.step_cost, config.max_step_s)
        self._clock = clock
        self._events: list[TokenEvent] = []
        self._depth = min(config.pipeline_depth or executor.best_in_flight, executor.max_in_flight)
        self._submitted: deque[_Submitted] = deque()
        self._finished_s = 0.0  # when the last answer came

    @property
    def num_in_flight(self) -> int:
        """Steps that were begun and not finished."""
        return len(self._submitted)

    @property
    def is_full(self) -> bool:
        """Whether `finish` must come next."""
        return len(self._submitted) >= self._depth

    def begin(self) -> SchedulerOutput | None:
        """Schedule and submit a step; ranks begin before its masks are computed.

        None when there is nothing to do, or nothing before an answer is known: then all steps in flight must be
        finished before the next call. Raises `WorkerError` when the ranks are lost.
        """
        assert not self.is_full
        now = self._clock()
        output = self.scheduler.schedule(
            now, ahead=self.num_in_flight > 0, most_prompt_tokens=self._step_times.most_prompt_tokens
        )
        built = None if output is None else self._build(output, now)
        if output is None or built is None:
            return None
        self._submitted.append(_Submitted(output, len(built.step.logits_indices), now))
        if built.masks is None:
            self.executor.submit(built.step)
            return output
        self.executor.submit(built.step, built.masks.fill)
        for seq in built.masks.failed:  # the answer to the step in flight is ignored for them
            self._fail(seq, now)
        return output

    def finish(self) -> list[TokenEvent]:
        """Collect and apply the next answer; return its events. Raises `WorkerError` when the ranks are lost."""
        output, num_rows, begun_s = self._submitted.popleft()
        answer = self.executor.collect()
        if answer.step_id != output.step_id or len(answer.token_ids) != num_rows:
            raise WorkerError(
                0,
                output.step_id,
                f"it answered step {answer.step_id} with {len(answer.token_ids)} rows instead of {num_rows}",
            )
        now = self._clock()
        seconds = now - max(begun_s, self._finished_s)
        self.scheduler.stats.step_time_s.observe(seconds)
        self._step_times.observe(output.num_decodes, output.num_prompt_tokens, seconds)
        self._finished_s = now
        return self.scheduler.update_from_output(output, _as_lists(answer), now)

    def take_events(self) -> list[TokenEvent]:
        """Terminal events of requests that failed outside `finish`."""
        events, self._events = self._events, []
        return self.scheduler.take_events() + events

    def _build(self, output: SchedulerOutput, now: float) -> BuiltStep | None:
        """The step's arrays; None if nothing is left of it. A request that cannot be built fails alone."""
        try:
            return self._input_batch.build(output)
        except Exception:
            logger.exception("event=build_failed step=%d", output.step_id)
            unfit = [item for item in output.scheduled if not self._fits(item, output)]
            if not unfit:
                raise
        self.scheduler.withdraw(output, unfit, now)
        return self._input_batch.build(output) if output.scheduled else None

    def _fail(self, seq: Sequence, now: float) -> None:
        event = self.scheduler.fail(seq.request_id, INTERNAL, now)
        if event is not None:
            self._events.append(event)

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


def _as_lists(answer: StepOutput) -> ModelRunnerOutput:
    """Plain lists: the scheduler reads single numbers, which numpy makes slow."""
    result = ModelRunnerOutput(answer.token_ids.tolist(), answer.finite.tolist(), answer=answer)
    if answer.logprobs is not None:
        assert answer.ranks is not None and answer.top_ids is not None and answer.top_logprobs is not None
        result.logprobs = answer.logprobs.tolist()
        result.ranks = answer.ranks.tolist()
        result.top_ids = answer.top_ids.tolist()
        result.top_logprobs = answer.top_logprobs.tolist()
    return result
