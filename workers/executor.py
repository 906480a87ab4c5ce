"""The engine's handle on its ranks: submit a step, collect the answer, notice death.

Torch-free at import: the engine process loads torch only when it runs the single rank itself.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Protocol

import numpy as np

from workers.config import WorkerConfig, WorkerInfo
from workers.errors import WorkerError
from workers.preflight import preflight
from workers.protocol import StepMetadata, StepOutput
from workers.step_cost import adapted

if TYPE_CHECKING:
    from workers.worker.model_runner import ModelRunner

logger = logging.getLogger("oarlock.group")

OnProgress = Callable[[str, float], None]
FillMasks = Callable[[np.ndarray], None]  # writes a step's `mask_bits`, every word of them


class Executor(Protocol):
    """N ranks that act as one. `submit` and `collect` alternate; both raise `WorkerError` once the group is lost."""

    info: WorkerInfo
    config: WorkerConfig

    @property
    def rank_pids(self) -> tuple[int, ...]:
        """Empty when the single rank is the calling process."""

    def submit(self, step: StepMetadata, fill_masks: FillMasks | None = None) -> None:
        """With `fill_masks` the ranks begin before the masks are there, and wait for them only to choose tokens.

        It is through when this returns, and the ranks have what it wrote; `step.mask_bits` itself may lack it.
        """

    def collect(self) -> StepOutput: ...

    def ping(self) -> None:
        """Prove that every rank still answers, with a step that computes nothing."""

    def fileno_for_death(self) -> list[int]:
        """Descriptors that become readable when a rank ends while nothing is in flight."""

    def close(self) -> None:
        """End every rank. Idempotent."""


def start_group(config: WorkerConfig, *, inline: bool, on_progress: OnProgress) -> Executor:
    """Check the configuration, start the ranks and load the model.

    Raises `StartupError` with a cause and a fix; what can be known from headers and numbers is checked before any
    weight is read. `inline` runs a single rank inside the calling process: one hop fewer.
    """
    resolved = preflight(config)
    if inline and resolved.tensor_parallel_size == 1:
        return UniProcExecutor(resolved, on_progress)
    from workers.worker.multiproc_executor import MultiprocExecutor

    return MultiprocExecutor(resolved, on_progress)


class UniProcExecutor:
    """One rank in the calling process. A hung step hangs the caller too: the layer above watches the clock."""

    rank_pids: tuple[int, ...] = ()

    def __init__(self, config: WorkerConfig, on_progress: OnProgress) -> None:
        from workers.distributed.parallel_state import TensorParallel
        from workers.worker.model_runner import ModelRunner

        self.config = config
        self._runner: ModelRunner | None = ModelRunner(config, TensorParallel.solo())
        self._runner.load(lambda fraction: on_progress("loading", fraction))
        self._runner.allocate(self._runner.num_blocks_that_fit())
        self.config = adapted(config, self._runner.time_steps())
        self.info = self._runner.info()
        self._output: StepOutput | None = None
        self._step_id = 0
        self._filler = ThreadPoolExecutor(1, "masks")  # has no thread until a step needs it

    def submit(self, step: StepMetadata, fill_masks: FillMasks | None = None) -> None:
        """Runs the step at once; `collect` hands its answer over."""
        assert self._runner is not None, "the group is closed"
        self._step_id = step.step_id
        masks = None if fill_masks is None else self._filler.submit(fill_masks, step.mask_bits)
        try:
            self._output = self._runner.execute(step, None if masks is None else masks.result)
        except Exception as error:
            logger.error("step=%d %s", step.step_id, traceback.format_exc())
            raise WorkerError(0, step.step_id, f"{type(error).__name__}: {error}") from error
        finally:
            if masks is not None:
                wait([masks])  # what it reads is the caller's again

    def collect(self) -> StepOutput:
        assert self._output is not None, "nothing was submitted"
        output, self._output = self._output, None
        return output

    def ping(self) -> None:
        return None  # the rank is the caller: that it asks is the proof

    def fileno_for_death(self) -> list[int]:
        return []

    def close(self) -> None:
        self._runner = None
        self._filler.shutdown()
