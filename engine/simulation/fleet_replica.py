"""Simulates one replica in virtual time: the real scheduler, and ranks that only take time.

One step is in flight at a time, as at a pipeline depth of 1. Steps that would each give every running sequence one
token, and do nothing else, are fast-forwarded: the scheduler gives a sequence several tokens in one step, as drafts
that are all right. A fast-forward ends when the first sequence ends, and is cut short when a request arrives: later
drafts are then wrong. Its steps take as long as one by one, and a test compares both. Only blocks differ: they are
allocated for all its steps at its beginning, and where they are short, steps are taken one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oarlock.engine.config import EngineConfig, SpeculativeConfig
from oarlock.engine.data_parallel.choice import Load
from oarlock.engine.errors import QueueFullError, RequestError
from oarlock.engine.kv_cache.events import BlockEventLog
from oarlock.engine.kv_cache.manager import KVCacheManager
from oarlock.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from oarlock.engine.scheduler.scheduler import Scheduler
from oarlock.engine.scheduler.step_cost import REMEMBERED
from oarlock.engine.simulation.fleet_requests import TOKEN, Records
from oarlock.engine.simulation.roofline import StepLoad, StepTime
from oarlock.engine.spec_decode.drafter import Candidate, Drafter, RowCosts
from oarlock.engine.types import Request
from oarlock.workers.config import WorkerInfo
from oarlock.workers.protocol import FINITE, StepOutput

_NO_LOOKUP = SpeculativeConfig(num_speculative_tokens=1, prompt_lookup_max=1, prompt_lookup_min=1)


class FastForward(Drafter):
    """Replaces the scheduler's drafter. Drafts only while `is_allowed`, which callers set when nothing waits."""

    def __init__(self, time: StepTime, manager: KVCacheManager, costs: RowCosts) -> None:
        super().__init__(_NO_LOOKUP, costs)
        self._time, self._manager = time, manager
        self.is_allowed = False
        self.steps_s = np.zeros(0)  # float64 [steps]   seconds of those that `choose` has drafted for

    def may_pay(self, num_seqs: int) -> bool:
        return self.is_allowed

    def choose(self, candidates: Sequence[Candidate], num_seqs: int, most: int) -> list[list[int]]:
        """Draft the same number of tokens for each candidate."""
        count = 0
        if len(candidates) == num_seqs:
            count = min(most // num_seqs, min(candidate.room for candidate in candidates))
        lengths = [len(candidate.token_ids) for candidate in candidates]
        if count and not self._has_blocks(lengths, count):
            count = 0
        contexts = sum(lengths) + num_seqs * np.arange(count + 1)
        self.steps_s = self._time.seconds(StepLoad(num_seqs, num_seqs, contexts, contexts))
        return [[TOKEN] * count for _ in candidates]

    def _has_blocks(self, lengths: list[int], count: int) -> bool:
        """Whether there are blocks for `count` more tokens of each of these sequences, and half of them stay free."""
        of, available = self._manager.blocks_for, self._manager.num_available
        needed = sum(of(length + count) - of(length - 1) for length in lengths)
        return needed + len(lengths) <= available // 2


@dataclass(slots=True)
class _InFlight:
    output: SchedulerOutput
    begun_s: float
    ends_s: np.ndarray  # float64 [steps]: one, or those of a fast-forward
    num_arrived: int = 0  # since it began

    @property
    def at_s(self) -> float:
        """Time at which the answer comes."""
        return float(self.ends_s[-1])


class SimulatedReplica:
    """Simulated replica; `records` gets the times of its requests."""

    def __init__(
        self, config: EngineConfig, info: WorkerInfo, time: StepTime, records: Records, *, fast_forward: bool = True
    ) -> None:
        self.scheduler = Scheduler(config, info)
        self._time, self._records = time, records
        self._fast_forward = FastForward(time, self.scheduler.kv_cache_manager, self.scheduler.step_costs)
        self._may_fast_forward = fast_forward
        self.scheduler.drafter = self._fast_forward
        self._in_flight: _InFlight | None = None
        self._now_s = 0.0  # when the last step ended
        self._is_steady = False  # whether the next step would do the same as the last one
        self.load = Load(
            max_open=self.scheduler.max_num_seqs + config.max_waiting_requests,
            max_waiting_tokens=config.max_waiting_tokens,
        )
        self._new_tokens: dict[int, int] = {}  # request id -> what it adds to `load.num_waiting_tokens`
        self.busy_s = 0.0
        self.waiting_s = 0.0  # requests in the queue times seconds
        self._waited_to_s = 0.0

    @property
    def block_events(self) -> BlockEventLog:
        """Log of block events, kept from the first call on."""
        manager = self.scheduler.kv_cache_manager
        manager.event_log = manager.event_log or BlockEventLog()
        return manager.event_log

    def advance(self, to_s: float) -> None:
        """Apply every answer that comes up to `to_s`, and begin the steps before it."""
        while True:
            step = self._in_flight
            if step is not None:
                if step.at_s > to_s:
                    return
                self._finish(step)
            if not self.scheduler.has_work or self._now_s >= to_s or not self._begin():
                return

    def add(self, request: Request, now_s: float, num_cached: int) -> bool:
        """Add a request that arrives now; `num_cached` tokens of its prompt were cached here. False: it was refused."""
        self._count_waiting(now_s)
        step = self._in_flight
        if step is not None:  # the step that runs now is the last of a fast-forward
            step.ends_s = step.ends_s[: int(np.searchsorted(step.ends_s, now_s)) + 1]
            step.num_arrived += 1
        else:
            self._now_s = max(self._now_s, now_s)
        try:
            self.scheduler.add(request, now_s)
        except (QueueFullError, RequestError):
            return False
        self._is_steady = False
        self.load.num_open += 1
        self._new_tokens[request.request_id] = num_new = len(request.prompt_token_ids) - num_cached
        self.load.num_waiting_tokens += num_new
        return True

    def _begin(self) -> bool:
        """Schedule the next step at the end of the last one."""
        self._fast_forward.is_allowed = self._may_fast_forward and self._is_steady
        self._count_waiting(self._now_s)
        output = self.scheduler.schedule(self._now_s)
        if output is None:
            return False
        steps_s = self._fast_forward.steps_s if output.num_drafts else np.array([self._time.seconds(load_of(output))])
        self._in_flight = _InFlight(output, self._now_s, self._now_s + np.cumsum(steps_s))
        return True

    def _finish(self, step: _InFlight) -> None:
        output, ends_s = step.output, step.ends_s
        accepted = [len(ends_s) - 1 if item.drafts else 0 for item in output.scheduled]
        num_rows = len(output.decodes.rows) + sum(item.num_rows for item in output.scheduled)
        answer = StepOutput(
            output.step_id,
            np.full(num_rows, TOKEN, np.int32),
            np.full(num_rows, FINITE, np.uint8),
            num_accepted=np.array([0] * len(output.decodes.rows) + accepted, np.int32) if output.num_drafts else None,
        )
        self._in_flight, self._now_s = None, step.at_s
        self.busy_s += step.at_s - step.begun_s
        steps_s = np.diff(ends_s, prepend=step.begun_s)
        num_before = max(0, len(steps_s) - REMEMBERED)  # only the last steps of a fast-forward are observed
        for seconds in steps_s[num_before:].tolist():
            self.scheduler.step_costs.observe(output.num_decodes, output.num_prompt_tokens, seconds, num_before)
            num_before = 0
        events = self.scheduler.update_from_output(output, ModelRunnerOutput(answer), self._now_s)
        failed = self.scheduler.take_events()
        num_ended = self._records.tokens(events, ends_s) + self._records.ended(failed, self._now_s)
        self.load.num_open -= num_ended
        for event in (*events.others, *failed):  # the first event of a request is never a plain one
            self.load.num_waiting_tokens -= self._new_tokens.pop(event.request_id, 0)
        changed = num_ended + step.num_arrived + output.num_prompt_tokens + output.num_preempted
        self._is_steady = changed == 0

    def _count_waiting(self, now_s: float) -> None:
        self.waiting_s += self.scheduler.num_waiting * max(0.0, now_s - self._waited_to_s)
        self._waited_to_s = max(self._waited_to_s, now_s)


def load_of(output: SchedulerOutput) -> StepLoad:
    """Work of a step without a fast-forward."""
    positions, scheduled = output.decodes.positions, output.scheduled
    context = int(positions.sum()) + len(positions)
    pairs = context + sum(item.num_tokens * item.start + math.comb(item.num_tokens + 1, 2) for item in scheduled)
    return StepLoad(
        tokens=len(positions) + sum(item.num_tokens for item in scheduled),
        rows=len(positions) + sum(item.wants_logits for item in scheduled),
        context=context + sum(item.start + item.num_tokens for item in scheduled),
        pairs=pairs,
    )
