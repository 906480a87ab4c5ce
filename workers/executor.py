"""The engine's handle on its ranks: submit a step, collect its output, notice if a rank has ended. Torch-free."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from oarlock.base.errors import StartupError
from oarlock.workers.config import NodesConfig, OnProgress, WorkerConfig, WorkerInfo
from oarlock.workers.fingerprint import node_facts
from oarlock.workers.kv_offload import KVReports
from oarlock.workers.preflight import preflight
from oarlock.workers.protocol import StepMetadata, StepOutput
from oarlock.workers.rank_processes import RankProcess, end_ranks
from oarlock.workers.ranks.group_ranks import GroupRanks
from oarlock.workers.ranks.host_ranks import HostRanks
from oarlock.workers.ranks.multiproc_executor import MultiprocExecutor
from oarlock.workers.ranks.spawn_ranks import import_early
from oarlock.workers.transformers_backend.choice import class_by_name


class Executor(Protocol):
    """Executor of steps on all ranks, in the order of their submission, which returns their outputs in that order.

    At most `max_in_flight` steps are submitted and not collected. Methods raise `WorkerError` if a rank is lost.
    """

    info: WorkerInfo
    config: WorkerConfig
    max_in_flight: int  # steps that may be submitted and not collected

    @property
    def kv_reports(self) -> KVReports | None:
        """Reports of the ranks about files of KV blocks; None if no blocks are kept outside the pool."""

    @property
    def best_in_flight(self) -> int:
        """Number of steps in flight that is fastest on this machine."""

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """Process ids in the order of the ranks; empty if ranks are not processes."""

    @property
    def step_times_ns(self) -> Sequence[int]:
        """Nanoseconds that each rank worked on the newest step that it has finished, in the order of the ranks. With
        several hosts, only for the ranks of the first. A CUDA device may still be computing then. Empty if ranks are
        not processes."""

    def submit(self, step: StepMetadata, *, masks_follow: bool = False) -> None:
        """Start a step. With `masks_follow` the ranks begin without its masks, and wait for them before they sample."""

    def send_masks(self, bits: np.ndarray) -> None:
        """Complete the last submitted step, which had `masks_follow`: `bits` replaces its `mask_bits`.

        Must come before the next `submit`. The output of the previous step may be collected first.
        """

    def collect(self) -> StepOutput:
        """Block for the output of the oldest step that was not collected."""

    def ping(self) -> None:
        """Check that every rank still responds, with a step that computes nothing. No step may be in flight."""

    def fileno_for_death(self) -> list[int]:
        """Return descriptors that become readable if a rank ends while nothing is in flight."""

    def close(self, failure: Exception | None = None) -> None:
        """End every rank. `failure`: the reason, if the executor does not know it itself. Idempotent."""


# Imports transformers, which takes seconds.
_CLASS_CODE = "oarlock.workers.transformers_backend.model"


def _is_class_of_transformers(config: WorkerConfig) -> bool:
    """Return whether transformers' code will compute the model; False if `preflight` refuses it."""
    try:
        return class_by_name(config) is not None
    except StartupError:
        return False


def start_executor(
    config: WorkerConfig,
    on_progress: OnProgress,
    *,
    ahead: Sequence[RankProcess] = (),
    nodes: NodesConfig | None = None,
    leave_pid: int = 0,
) -> Executor:
    """Check the configuration, start the ranks and load the model.

    `ahead`: rank processes that already run; none of them is left if this fails. `nodes`: how to find the other hosts,
    if the ranks are divided among several. The process `leave_pid` gets SIGTERM if the operator of another host wants
    it to stop. Raises `StartupError` with a cause and a fix. Everything that headers and settings can show is checked
    before any weight is read.
    """
    try:
        if _is_class_of_transformers(config):
            import_early(ahead, _CLASS_CODE)
        resolved = preflight(config)
    except BaseException:
        end_ranks(ahead)
        raise
    if nodes is None:
        return MultiprocExecutor(resolved, HostRanks(resolved, ahead), on_progress)
    ranks = GroupRanks(resolved, nodes, node_facts(resolved), on_progress, ahead, leave_pid)
    return MultiprocExecutor(resolved, ranks, on_progress)
