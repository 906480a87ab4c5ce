"""An executor whose ranks are threads of this process, each with its own shard, KV pages and sampler.

Ranks that are processes import torch once each; so eight of them take seconds where there are two cores.
"""

import logging
from concurrent.futures import ThreadPoolExecutor

import torch

from tests.golden.paged_run import RankThreads, ThreadRank
from workers.config import WorkerConfig
from workers.distributed.parallel_state import TensorParallel
from workers.preflight import preflight
from workers.protocol import FillMasks, StepMetadata, StepOutput
from workers.worker.model_runner import ModelRunner


class ThreadExecutor:
    """`Executor` of `config.tensor_parallel_size` ranks on the CPU, each of `num_threads` threads."""

    rank_pids: tuple[int, ...] = ()
    max_in_flight = best_in_flight = 1

    def __init__(self, config: WorkerConfig) -> None:
        self.config = preflight(config)
        self._size = config.tensor_parallel_size
        group = RankThreads(self._size)
        # One thread for each rank: with several, the barrier holds each until all have work.
        self._threads = ThreadPoolExecutor(self._size, "rank", torch.set_num_threads, (config.num_threads or 1,))

        def start(rank: int) -> ModelRunner:
            runner = ModelRunner(self.config, TensorParallel.solo() if self._size == 1 else ThreadRank(rank, group))
            runner.load(lambda fraction: None)
            runner.allocate(runner.num_blocks_that_fit())
            return runner

        level = logging.getLogger("oarlock").level
        logging.getLogger("oarlock").setLevel(logging.WARNING)
        self._ranks = list(self._threads.map(start, range(self._size)))
        logging.getLogger("oarlock").setLevel(level)
        self.info = self._ranks[0].info()
        self._output: StepOutput | None = None

    def submit(self, step: StepMetadata, fill_masks: FillMasks | None = None) -> None:
        """Runs the whole step."""
        if fill_masks is not None:
            fill_masks(step.mask_bits)
        self._output = next(iter(list(self._threads.map(lambda rank: rank.execute(step), self._ranks))))

    def collect(self) -> StepOutput:
        assert self._output is not None
        return self._output

    def ping(self) -> None:
        return None

    def fileno_for_death(self) -> list[int]:
        return []

    def close(self) -> None:
        self._threads.shutdown()
        self._ranks.clear()
