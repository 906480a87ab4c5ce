"""Refusal of steps for lack of memory, by all ranks of a pipeline stage alike."""

import logging
from collections.abc import Callable

import torch

from oarlock.workers.distributed.pipeline_stage import PipelineStage, StepRefusedError
from oarlock.workers.distributed.shm_layout import Votes
from oarlock.workers.protocol import StepMetadata, refusal
from oarlock.workers.runner.memory_needs import is_out_of_memory
from oarlock.workers.runner.pending_output import Launched

logger = logging.getLogger("oarlock.rank")


class StepGuard:
    """Guard of one rank's steps, which refuses steps for lack of memory. Every rank must get the same steps, in order.

    Ranks must refuse the same steps: if a rank left a step in the middle, the others would wait in a collective. So
    each rank reserves the memory of the step, and the ranks vote, before the first collective. A later failure is an
    error if there are several ranks; a single rank refuses the step. No result of a refused step is valid: the engine
    sends again everything that a rank may have written.

    Each pipeline stage decides by itself. It reports its refusals to the next stage, and drops the hidden states that
    the previous stage sends for a refused step, as the results of earlier stages are not valid either.
    """

    def __init__(
        self,
        needed: Callable[[StepMetadata], int],
        device: torch.device,
        votes: Votes | None,
        stage: PipelineStage | None = None,
    ) -> None:
        """Guard the steps of a rank.

        `needed`: bytes that a step takes in addition to the rank's memory; 0, on every rank, if it allocates nothing.
        `votes`: votes of the ranks of `stage` if there are several. `stage`: None if it is the only one.
        """
        self._stage = stage or PipelineStage.solo()
        self._needed = needed
        self._device = device
        self._votes = votes
        self._has_refused = False  # whether the last step was refused

    def run(self, step: StepMetadata, launch: Callable[[], Launched]) -> Launched:
        """Launch `step` and return its output, or a refusal if a rank lacks memory."""
        if not (step.is_ahead and self._has_refused):
            self._has_refused = not self._all_have_room(step)
        if self._has_refused:
            self._stage.drop(step.num_tokens)
        else:
            try:
                return launch()
            except StepRefusedError:
                self._has_refused = True
            except Exception as error:
                if self._votes is not None or self._stage.size > 1 or not is_out_of_memory(error):
                    raise
                self._refuse(step, error)
        self._stage.refuse(step.num_tokens)
        return refusal(step.step_id)

    def _all_have_room(self, step: StepMetadata) -> bool:
        size = self._needed(step)
        if size == 0:
            return True
        try:
            reserve(size, self._device)
            has_room = True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self._refuse(step, error)
            has_room = False
        return has_room if self._votes is None else self._votes.all_agree(has_room)

    def _refuse(self, step: StepMetadata, error: Exception) -> None:
        self._has_refused = True
        logger.warning("event=step_refused step=%d tokens=%d cause=%r", step.step_id, step.num_tokens, str(error))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def reserve(size: int, device: torch.device) -> None:
    """Allocate `size` bytes in one piece and free them: CUDA's caching allocator keeps them for this process.

    Raises the allocator's error if there is not enough memory.
    """
    torch.empty(size, dtype=torch.uint8, device=device)
