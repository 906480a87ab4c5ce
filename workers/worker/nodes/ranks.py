"""What an executor drives: all ranks of a model, on one host (`host_ranks.py`) or on several (`group_ranks.py`).

Ranks have their numbers in the whole group everywhere.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from oarlock.workers.errors import WorkerError
from oarlock.workers.kv_offload import KVReports
from oarlock.workers.protocol import StepMetadata, StepOutput

GRACE_S = 3.0  # for ranks to end by themselves
GRACE_AFTER_FAILURE_S = 0.5  # they may wait for one that is lost


class Place(NamedTuple):
    """How far a rank has come, in growing numbers; the first that differs tells which of two ranks is behind."""

    finished: int  # steps
    vote: int
    collective: int


class Ranks(Protocol):
    """Methods that send, receive or wait raise `ChannelClosedError` when a rank has ended or raised; then `failure`
    says which, and why."""

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the ranks of this host, in their order."""

    kv_reports: KVReports | None  # None where no blocks are kept beyond the pool

    @property
    def filenos(self) -> list[int]:
        """Descriptors that become readable when a rank has ended or raised."""

    @property
    def step_times_ns(self) -> Sequence[int]:
        """How long each rank of this host, the first ones of all, has worked on the newest step that it has ended."""

    # -- start

    def tell_all(self, kind: str, **fields: Any) -> None: ...

    def messages(self, timeout_s: float) -> list[tuple[int, dict[str, Any]]]:
        """What ranks have sent, after waiting for the first of it, as (rank, message). A rank that has ended has sent a
        last message of the kind "ended", with a `cause`."""

    # -- steps

    def send_step(self, step: StepMetadata, *, masks_follow: bool) -> None: ...

    def send_masks(self, bits: np.ndarray) -> None:
        """Complete the step that was sent last."""

    def receive_answer(self, timeout_s: float) -> StepOutput | None:
        """The next answer, of the answering rank; None after `timeout_s`."""

    def wait_until_finished(self, timeout_s: float) -> bool:
        """Whether all ranks finish all steps that were sent within `timeout_s`."""

    # -- failures and the end

    def failure(self, step_id: int) -> WorkerError:
        """The first cause, where a rank has ended or raised. `step_id`: of the newest step."""

    def places(self) -> list[Place]:
        """Of all ranks, in their order."""

    def log_stacks(self) -> None:
        """Make each rank that still runs write the stacks of its threads to the log."""

    def close(self, failure: Exception | None = None) -> None:
        """End all ranks: those that have not ended by themselves in time are killed. `failure`: why, if it is one.
        Idempotent."""
