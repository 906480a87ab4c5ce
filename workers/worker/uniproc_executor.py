"""A single rank inside the calling process."""

import logging
import traceback
from concurrent.futures import ThreadPoolExecutor, wait

from workers.config import OnProgress, WorkerConfig
from workers.distributed.parallel_state import TensorParallel
from workers.errors import WorkerError
from workers.protocol import FillMasks, StepMetadata, StepOutput
from workers.worker.cpu_affinity import use_cpus
from workers.worker.model_runner import ModelRunner
from workers.worker.step_limits import adapted

logger = logging.getLogger("oarlock.executor")


class UniProcExecutor:
    """One rank in the calling process. A hung step hangs the caller as well; the engine's watchdog ends it."""

    rank_pids: tuple[int, ...] = ()
    max_in_flight = best_in_flight = 1

    def __init__(self, config: WorkerConfig, on_progress: OnProgress) -> None:
        self.config = config
        use_cpus(config, rank=0)
        self._runner: ModelRunner | None = ModelRunner(config, TensorParallel.solo())
        self._runner.load(lambda fraction: on_progress("loading", fraction))
        self._runner.allocate(self._runner.num_blocks_that_fit())
        self.config = adapted(config, self._runner.time_steps())
        self.info = self._runner.info()
        self._output: StepOutput | None = None
        self._step_id = 0
        self._filler = ThreadPoolExecutor(1, "masks")  # starts its thread when a step needs it

    def submit(self, step: StepMetadata, fill_masks: FillMasks | None = None) -> None:
        """Runs the whole step; `collect` returns its output."""
        assert self._runner is not None, "the executor is closed"
        self._step_id = step.step_id
        masks = None if fill_masks is None else self._filler.submit(fill_masks, step.mask_bits)
        try:
            self._output = self._runner.execute(step, None if masks is None else masks.result)
        except Exception as error:
            logger.error("step=%d %s", step.step_id, traceback.format_exc())
            raise WorkerError(0, step.step_id, f"{type(error).__name__}: {error}") from error
        finally:
            if masks is not None:
                wait([masks])  # afterwards the caller may change what it reads

    def collect(self) -> StepOutput:
        assert self._output is not None, "nothing was submitted"
        output, self._output = self._output, None
        return output

    def ping(self) -> None:
        return None  # the rank is the calling process

    def fileno_for_death(self) -> list[int]:
        return []

    def close(self) -> None:
        self._runner = None
        self._filler.shutdown()
