"""Runs a step, or refuses it for lack of memory, so that a rank need not end.

Ranks must refuse the same steps: one that left a step in its middle would leave the others in a collective. So each
reserves what the step needs, and they vote, before the first collective. A failure after that is an error where there
are several ranks; one alone refuses the step all the same. Nothing of a refused step holds: the engine sends again
whatever a rank may have written.

Each stage of a pipeline decides for itself. It tells the stage after it what it refuses, and forgets what comes from
the stage before for such a step: what earlier stages have computed of it does not hold either.
"""

import logging
from collections.abc import Callable

import torch

from oarlock.workers.distributed.pipeline_stage import PipelineStage, StepRefusedError
from oarlock.workers.distributed.votes import Votes
from oarlock.workers.protocol import StepMetadata, refusal
from oarlock.workers.runner.memory_needs import is_out_of_memory
from oarlock.workers.runner.pending_output import Computed, PendingOutput

logger = logging.getLogger("oarlock.rank")


class StepGuard:
    """Guard of one rank's steps. Every rank must be given the same steps, in order."""

    def __init__(
        self,
        needed: Callable[[StepMetadata], int],
        device: torch.device,
        votes: Votes | None,
        stage: PipelineStage | None = None,
    ) -> None:
        """`needed`: bytes that a step takes beside what the rank holds; 0 for one that allocates nothing, the same on
        every rank. `votes`: of the ranks of `stage`, where they are several. `stage`: None where it is the only one."""
        self._stage = stage or PipelineStage.solo()
        self._needed = needed
        self._device = device
        self._votes = votes
        self._has_refused = False  # the last step

    def run(self, step: StepMetadata, launch: Callable[[], PendingOutput]) -> PendingOutput:
        """Launches `step` and returns its output, or a refusal where a rank lacks the memory."""
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
        return Computed(refusal(step.step_id))

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
    """Take `size` bytes in one piece and give them back: CUDA's allocator of this process keeps them for what follows.

    Raises what the allocator raises.
    """
    torch.empty(size, dtype=torch.uint8, device=device)
