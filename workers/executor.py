"""The engine's handle on its ranks: submit a step, collect its output, notice when a rank has ended.

Torch-free at import: the engine process loads torch only when it runs the single rank itself.
"""

from typing import Protocol

from workers.config import OnProgress, WorkerConfig, WorkerInfo
from workers.preflight import preflight
from workers.protocol import FillMasks, StepMetadata, StepOutput


class Executor(Protocol):
    """Runs steps on all ranks, in the order of their submission, and returns their outputs in that order.

    At most `max_in_flight` steps are submitted and not collected. Methods raise `WorkerError` when a rank is lost.
    """

    info: WorkerInfo
    config: WorkerConfig
    max_in_flight: int  # steps that may be submitted and not collected

    @property
    def best_in_flight(self) -> int:
        """How many of these are fastest on this machine."""

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """Empty when the single rank is the calling process."""

    def submit(self, step: StepMetadata, fill_masks: FillMasks | None = None) -> None:
        """Start a step. With `fill_masks` the ranks begin before the masks are computed, and wait for them to sample.

        `fill_masks` has returned when this returns, and the ranks have what it wrote; `step.mask_bits` may not.
        """

    def collect(self) -> StepOutput:
        """Block for the output of the oldest step that was not collected."""

    def ping(self) -> None:
        """Check that every rank still answers, with a step that computes nothing. No step may be in flight."""

    def fileno_for_death(self) -> list[int]:
        """Descriptors that become readable when a rank ends while nothing is in flight."""

    def close(self) -> None:
        """End every rank. Idempotent."""


def import_rank() -> None:
    """Import what the calling process needs to run a rank itself, which takes seconds; later imports find it."""
    import workers.worker.uniproc_executor  # noqa: F401


def start_executor(config: WorkerConfig, *, inline: bool, on_progress: OnProgress) -> Executor:
    """Check the configuration, start the ranks and load the model.

    Raises `StartupError` with a cause and a fix; what can be known from headers and numbers is checked before any
    weight is read. `inline` runs a single rank inside the calling process.
    """
    resolved = preflight(config)
    if inline and resolved.tensor_parallel_size == 1:
        from workers.worker.uniproc_executor import UniProcExecutor

        return UniProcExecutor(resolved, on_progress)
    from workers.worker.multiproc_executor import MultiprocExecutor

    return MultiprocExecutor(resolved, on_progress)
