"""The real engine without its process: scheduler, input batch and ranks in one loop, driven step by step.

from tests.parallel.direct_engine import DirectEngine

Several engines may use one loaded executor, one after the other, each with its own limits, KV blocks and prefix cache.
"""

import select
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np

from oarlock.engine.config import EngineConfig, SpeculativeConfig
from oarlock.engine.core.engine_core import EngineCore
from oarlock.engine.lora.registry import LoadError
from oarlock.engine.scheduler.sequence import GrammarMatcherProtocol
from oarlock.engine.types import Request, TokenEvent, TokenLogprobs
from oarlock.workers.config import WorkerInfo
from oarlock.workers.executor import Executor
from oarlock.workers.protocol import StepMetadata, StepOutput


@dataclass
class Answer:
    """Answer of a request: all its events together. `==` compares floats bit by bit."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    pooled: list[float] = field(default_factory=list)
    error: str | None = None


class _LimitedExecutor:
    """An executor that reports another `info` than it has, for example fewer KV blocks."""

    def __init__(self, executor: Executor, info: WorkerInfo) -> None:
        self._executor = executor
        self.info = info
        self.rank_pids = executor.rank_pids
        self.step_times_ns = ()
        self.kv_reports = executor.kv_reports
        self.max_in_flight = executor.max_in_flight
        self.best_in_flight = executor.best_in_flight
        self.num_refused = 0  # steps, for lack of memory

    def submit(self, step: StepMetadata, *, masks_follow: bool = False) -> None:
        self._executor.submit(step, masks_follow=masks_follow)

    def send_masks(self, bits: np.ndarray) -> None:
        self._executor.send_masks(bits)

    def collect(self) -> StepOutput:
        output = self._executor.collect()
        self.num_refused += output.out_of_memory
        return output


class DirectEngine:
    """Runs requests to their ends. Limits that are not given are those of the executor."""

    def __init__(
        self,
        executor: Executor,
        *,
        max_num_seqs: int | None = None,
        max_num_batched_tokens: int | None = None,
        num_blocks: int | None = None,
        info: WorkerInfo | None = None,
        enable_prefix_caching: bool = False,
        pipeline_depth: int | None = 1,
        speculative: SpeculativeConfig | None = None,
    ) -> None:
        worker = executor.config
        if max_num_seqs is not None:
            worker = worker.with_(max_num_seqs=max_num_seqs)
        if max_num_batched_tokens is not None:
            worker = worker.with_(max_num_batched_tokens=max_num_batched_tokens)
        config = EngineConfig(
            worker,
            enable_prefix_caching=enable_prefix_caching,
            pipeline_depth=pipeline_depth,
            speculative=speculative,
        )
        info = info or executor.info
        if num_blocks is not None:
            groups = [one if one.is_recurrent else replace(one, num_blocks=num_blocks) for one in info.groups]
            info = replace(info, num_blocks=num_blocks, groups=tuple(groups))
        self.now = 0.0
        self.num_steps = 0
        self.num_ahead = 0  # steps that began while another was in flight
        self.num_cached_tokens = 0
        self.most_blocks_held = 0
        self._executor = _LimitedExecutor(executor, info)
        self._engine_core = EngineCore(config, self._executor, lambda: self.now)
        self.scheduler = self._engine_core.scheduler

    @property
    def num_refused(self) -> int:
        """Steps for which the ranks had not enough memory."""
        return self._executor.num_refused

    def run(
        self,
        requests: Iterable[Request],
        *,
        arrives_at: Callable[[int], int] = lambda number: 0,
        matchers: Mapping[int, GrammarMatcherProtocol] = MappingProxyType({}),
    ) -> dict[int, Answer]:
        """Answers by request id. The number-th request is added before step `arrives_at(number)`.

        `matchers`: by request id, of those with a grammar.
        """
        coming = sorted(enumerate(requests), key=lambda pair: arrives_at(pair[0]))
        answers = {request.request_id: Answer() for _, request in coming}
        step = 0
        while coming or self.scheduler.has_work or self._engine_core.num_in_flight:
            while coming and arrives_at(coming[0][0]) <= step:
                request = coming.pop(0)[1]
                self.scheduler.add(request, self.now, matchers.get(request.request_id))
            self._step(answers)
            step += 1
        return answers

    def add_adapter(self, name: str, digest: str, directory: str) -> str | None:
        """Load a LoRA adapter. Returns the reason if it fails."""
        adapters = self.scheduler.adapters
        assert adapters is not None
        adapters.add(name, digest, directory, self.now)
        outcomes: dict[str, LoadError | None] = {}

        def has_ended() -> bool:
            outcomes.update(adapters.registry.take_outcomes())
            return name in outcomes and not self._engine_core.num_in_flight

        self.run_until(has_ended)
        error = outcomes[name]
        return None if error is None else error.message

    def run_until(self, condition: Callable[[], bool]) -> None:
        """Go on without requests, as long as what ranks do beside steps takes."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "it does not come"
            self._step({})
            time.sleep(0.001)

    def _step(self, answers: dict[int, Answer]) -> None:
        self.now += 0.01
        num_in_flight = self._engine_core.num_in_flight
        self._engine_core.receive_reports()
        output = self._engine_core.begin()
        if output is None and not num_in_flight and self.scheduler.requests.loading:
            assert self._executor.kv_reports is not None
            assert select.select([self._executor.kv_reports], [], [], 60)[0], "files are not read"
            self.now -= 0.01
        self.most_blocks_held = max(self.most_blocks_held, self.scheduler.memory.num_held)
        events = self._engine_core.take_events()
        if output is not None:
            self.num_steps += 1
            self.num_ahead += num_in_flight > 0
        if self._engine_core.num_in_flight and (output is None or self._engine_core.is_full):
            events += self._engine_core.finish()
        for event in events:
            self._add_event(event, answers[event.request_id])

    def _add_event(self, event: TokenEvent, answer: Answer) -> None:
        answer.token_ids += event.token_ids
        answer.logprobs += event.logprobs
        answer.prompt_logprobs += event.prompt_logprobs
        answer.pooled += event.pooled
        answer.error = event.error
        if event.finish_reason is not None:
            self.num_cached_tokens += event.num_cached_tokens
