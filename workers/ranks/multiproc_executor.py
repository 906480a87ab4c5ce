"""The executor whose ranks are processes, on this host and perhaps on others: it loads them, and runs steps on them."""

import logging
from collections.abc import Sequence
from typing import NoReturn

import numpy as np

from oarlock.workers.config import LOADING_TIMEOUT_S, OnProgress, WorkerConfig, WorkerInfo
from oarlock.workers.distributed.shm_layout import last_of
from oarlock.workers.distributed.shm_ring import ChannelClosedError
from oarlock.workers.errors import WorkerError
from oarlock.workers.platform.cores import available_cores
from oarlock.workers.protocol import StepMetadata, StepOutput, empty_step
from oarlock.workers.ranks.host_ranks import HostRanks, Place
from oarlock.workers.ranks.joint_info import joint_info
from oarlock.workers.ranks.load_progress import LoadProgress
from oarlock.workers.ranks.step_limits import adapted

logger = logging.getLogger("oarlock.executor")


class MultiprocExecutor:
    """Owns `ranks`. Loads them in its constructor; raises `StartupError` with everything cleaned up when one cannot."""

    def __init__(
        self,
        config: WorkerConfig,
        ranks: HostRanks,
        on_progress: OnProgress,
        *,
        loading_timeout_s: float = LOADING_TIMEOUT_S,
    ) -> None:
        """`ranks`: started with `config`. `loading_timeout_s`: the longest time without a message."""
        self.config = config
        self.max_in_flight = max(2, config.pipeline_parallel_size)  # fewer than a ring has slots
        self._ranks = ranks
        self.kv_reports = ranks.kv_reports
        self._loading_timeout_s = loading_timeout_s
        self._step_id = 0
        self._failure: Exception | None = None
        try:
            self.info = self._load(on_progress)
            if self.info.step_cost is not None:
                self.config = adapted(config, self.info.step_cost)
        except BaseException as error:
            self._ranks.close(error if isinstance(error, Exception) else None)
            raise
        logger.info("event=ranks_ready size=%d pids=%s", len(self.rank_pids), ",".join(map(str, self.rank_pids)))

    @property
    def best_in_flight(self) -> int:
        """One in each pipeline stage. With one stage 2 where the engine has a core to schedule on while the ranks
        compute; else it would take one from a rank, for which the others wait, and nothing is gained."""
        config = self.config
        if config.pipeline_parallel_size > 1:
            return config.pipeline_parallel_size
        leaves_core = config.device == "cuda" or available_cores() > config.ranks_on_host * (config.num_threads or 1)
        return self.max_in_flight if leaves_core else 1

    @property
    def rank_pids(self) -> tuple[int, ...]:
        return self._ranks.pids

    @property
    def step_times_ns(self) -> Sequence[int]:
        return self._ranks.step_times_ns

    def _load(self, on_progress: OnProgress) -> WorkerInfo:
        """Follow all ranks through loading; they agree on the smallest number of blocks any of them has room for."""
        loading = LoadProgress(self.config.ranks_per_node * self.config.nnodes)
        while not loading.is_done:
            messages = self._ranks.messages(self._loading_timeout_s)
            if not messages:
                self._ranks.log_stacks()
                collectives = [place.collective for place in self._ranks.places()]
                raise loading.no_progress_error(collectives, self._loading_timeout_s)
            for rank, message in messages:
                loading.handle(rank, message)
                if message["kind"] == "progress":
                    on_progress("loading", loading.fraction)
                elif message["kind"] == "loaded" and loading.num_blocks is not None:
                    self._ranks.tell_all("allocate", num_blocks=loading.num_blocks)
        return joint_info(loading.infos)

    # -- steps

    def submit(self, step: StepMetadata, *, masks_follow: bool = False) -> None:
        self._step_id = step.step_id
        try:
            self._ranks.send_step(step, masks_follow=masks_follow)
        except ChannelClosedError:
            self._fail()

    def send_masks(self, bits: np.ndarray) -> None:
        try:
            self._ranks.send_masks(bits)
        except ChannelClosedError:
            self._fail()

    def collect(self) -> StepOutput:
        try:
            answer = self._ranks.receive_answer(self.config.step_timeout_s)
        except ChannelClosedError:
            self._fail()
        return self._fail_hung() if answer is None else answer

    def ping(self) -> None:
        self.submit(empty_step(self._step_id))
        self.collect()
        try:
            if not self._ranks.wait_until_finished(self.config.step_timeout_s):
                self._fail_hung()
        except ChannelClosedError:
            self._fail()

    def fileno_for_death(self) -> list[int]:
        return self._ranks.filenos

    # -- end

    def _fail(self) -> NoReturn:
        """A rank has ended or raised: raise the first cause."""
        self._failure = self._ranks.failure(self._step_id)
        raise self._failure from None

    def _fail_hung(self) -> NoReturn:
        """Raise that no output came in time, naming the rank that is behind: the others wait for it in a collective."""
        places = self._ranks.places()
        stage = first_stage_behind(places, self.config.tensor_parallel_size)
        last = last_of(*zip(*places[stage.start : stage.stop], strict=True))
        cause = f"no answer within {self.config.step_timeout_s:g} s"
        if last is None:
            last = min(range(len(stage)), key=lambda rank: places[stage[rank]].finished)
            latest = min(places[rank].collective for rank in stage)
            cause += f"; all ranks that have not answered are as far, at collective {latest}"
        self._ranks.log_stacks()
        self._failure = WorkerError(stage[last], self._step_id, cause, hung=True)
        raise self._failure

    def close(self, failure: Exception | None = None) -> None:
        self._ranks.close(self._failure or failure)


def first_stage_behind(places: Sequence[Place], num_ranks: int) -> range:
    """The ranks of the first pipeline stage, each of `num_ranks`, that has finished the fewest steps: later ones wait
    for it."""
    last = min(range(len(places)), key=lambda rank: places[rank].finished)
    first = last - last % num_ranks
    return range(first, first + num_ranks)
