"""An executor whose ranks are threads of this process, each with its own shard, stage, KV pages and sampler.

Ranks that are processes import torch once each; so eight of them take seconds where there are two cores.
"""

import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from queue import SimpleQueue
from threading import Barrier

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.adapters import AdapterControl, read_commands
from oarlock.workers.config import WorkerConfig
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.distributed.pipeline_stage import PipelineStage
from oarlock.workers.kv_offload import KVReports, KVReportSender
from oarlock.workers.preflight import preflight
from oarlock.workers.protocol import StepMetadata, StepOutput
from oarlock.workers.ranks.multiproc_executor import joint_info
from oarlock.workers.runner.encoder_runner import EncoderRunner
from oarlock.workers.runner.model_runner import ModelRunner
from oarlock.workers.runner.pending_output import wait_for, with_reports
from oarlock.workers.runner.step_guard import StepGuard
from tests.golden.paged_run import RankThreads, ThreadRank

_HUGE = 1 << 60  # bytes


class QueueChannel:
    """Messages between two stages, in order: copies of rows, or None."""

    def __init__(self) -> None:
        self._messages: SimpleQueue[Tensor | None] = SimpleQueue()

    def send(self, rows: Tensor) -> None:
        self._messages.put(rows.clone())

    def receive(self, rows: Tensor) -> bool:
        message = self._messages.get(timeout=60)
        if message is not None:
            rows.copy_(message)
        return message is not None

    def refuse(self, num_bytes: int) -> None:
        self._messages.put(None)

    def discard(self, num_bytes: int) -> None:
        self._messages.get(timeout=60)


class ThreadExecutor:
    """`Executor` of all ranks of `config` on the CPU, each of `num_threads` threads. A step is over when it was
    submitted, or has its masks."""

    rank_pids: tuple[int, ...] = ()
    step_times_ns: tuple[int, ...] = ()
    best_in_flight = 1

    def __init__(self, config: WorkerConfig, make: type[ModelRunner] = ModelRunner) -> None:
        self.config = preflight(config)
        size, stages = config.tensor_parallel_size, config.pipeline_parallel_size
        self.max_in_flight = max(2, stages)
        groups = [RankThreads(size) for _ in range(stages)]
        channels = [[QueueChannel() for _ in range(size)] for _ in range(stages - 1)]
        # One thread for each rank: with several, the barrier holds each until all have work.
        self._threads = ThreadPoolExecutor(size * stages, "rank", torch.set_num_threads, (config.num_threads or 1,))

        fitting: list[list[int]] = [[]] * (size * stages)
        all_loaded = Barrier(size * stages, timeout=120)

        def start(place: int) -> ModelRunner | EncoderRunner:
            number, rank = divmod(place, size)
            tp = TensorParallel.solo() if size == 1 else ThreadRank(rank, groups[number])
            before = channels[number - 1][rank] if number else None
            after = channels[number][rank] if number < stages - 1 else None
            runner: ModelRunner | EncoderRunner
            if self.config.whole_texts:
                runner = EncoderRunner(self.config, tp)
            else:
                runner = make(self.config, tp, stage=PipelineStage(number, stages, tp, before, after))
            runner.load(lambda fraction: None)
            fitting[place] = runner.num_blocks_that_fit()
            all_loaded.wait()
            runner.allocate([min(counts) for counts in zip(*fitting, strict=True)])
            return runner

        level = logging.getLogger("oarlock").level
        logging.getLogger("oarlock").setLevel(logging.WARNING)
        self.ranks = list(self._threads.map(start, range(size * stages)))
        logging.getLogger("oarlock").setLevel(level)
        self._guards: list[StepGuard | None] = [None] * len(self.ranks)
        self._controls = [self._control_of(place) for place in range(len(self.ranks))]
        self.info = joint_info({place: rank.info() for place, rank in enumerate(self.ranks)})
        self.kv_reports: KVReports | None = None
        self._report_fd: int | None = None
        if self.config.offloads_kv:
            self._start_offload()
        self._outputs: deque[StepOutput] = deque()
        self._lacks_masks: StepMetadata | None = None

    def _start_offload(self) -> None:
        read_fd, self._report_fd = os.pipe()
        self.kv_reports = KVReports(read_fd)
        for place, rank in enumerate(self.ranks):
            assert rank.kv_offload is not None
            rank.kv_offload.start(KVReportSender(self._report_fd, place))

    def _control_of(self, place: int) -> AdapterControl | None:
        """The control of a rank's LoRA adapters, if it serves any."""
        rank = self.ranks[place]
        if not isinstance(rank, ModelRunner) or rank.adapters is None:
            return None
        gather, size = rank.tp.all_gather, rank.tp.size
        return AdapterControl(rank.adapters, lambda vote: vote if size == 1 else bool(gather(torch.tensor(vote)).all()))

    def submit(self, step: StepMetadata, *, masks_follow: bool = False) -> None:
        """Runs the whole step, which `send_masks` does where they follow."""
        if masks_follow:
            self._lacks_masks = step
        else:
            self._run(step)

    def send_masks(self, bits: np.ndarray) -> None:
        assert self._lacks_masks is not None
        self._run(replace(self._lacks_masks, mask_bits=bits))
        self._lacks_masks = None

    def _run(self, step: StepMetadata) -> None:
        outputs = list(self._threads.map(lambda place: self._run_on(place, step), range(len(self.ranks))))
        output = outputs[-self.config.tensor_parallel_size]
        assert output is not None
        self._outputs.append(output)

    def _run_on(self, place: int, step: StepMetadata) -> StepOutput | None:
        rank, guard = self.ranks[place], self._guards[place]
        if len(step.kv_copies):
            assert rank.kv_offload is not None
            rank.kv_offload.run_copies(step)
        control, reports = self._controls[place], []
        if len(step.adapter_commands):
            assert control is not None
            reports = control.run(read_commands(step.adapter_commands, step.adapter_digests, step.adapter_texts))
        launched = rank.execute(step) if guard is None else guard.run(step, partial(rank.launch, step))
        return wait_for(with_reports(launched, reports))

    def refuse(self, lacks_memory: Callable[[int, StepMetadata], bool]) -> None:
        """Guard steps; whether a stage, by its number, has no memory for one is told by `lacks_memory`."""
        cpu = torch.device("cpu")
        for place, rank in enumerate(self.ranks):
            stage = rank.stage if isinstance(rank, ModelRunner) else PipelineStage.solo()
            needed = partial(lambda number, step: _HUGE if lacks_memory(number, step) else 1, stage.number)
            self._guards[place] = StepGuard(needed, cpu, None, stage)

    def collect(self) -> StepOutput:
        return self._outputs.popleft()

    def ping(self) -> None:
        return None

    def fileno_for_death(self) -> list[int]:
        return []

    def close(self, failure: Exception | None = None) -> None:
        self._threads.shutdown()
        for rank in self.ranks:
            if isinstance(rank, ModelRunner) and rank.adapters is not None:
                rank.adapters.close()
        if self.kv_reports is not None and self._report_fd is not None:
            for rank in self.ranks:
                rank.close()
            self.kv_reports.close()
            os.close(self._report_fd)
            self._report_fd = None
        self.ranks.clear()
