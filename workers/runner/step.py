"""The step of every model on one rank: hidden states, then sampled tokens and pooled values.

Knows neither the kind of the model nor the device, which are the concern of `ModelSteps`. Does not know processes,
channels or requests.
"""

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from oarlock.workers.protocol import StepMetadata, StepOutput
from oarlock.workers.runner.pending_output import Launched, wait_for
from oarlock.workers.runner.pooler import Pooler, with_pooled
from oarlock.workers.sampling.row_chunks import empty_output


class ModelSteps(Protocol):
    """The two halves of a step for one kind of model on one kind of device."""

    def forward(self, step: StepMetadata) -> tuple[Any, Tensor | None]:
        """Run the model on `step`. Return the step's inputs on the device, and its hidden states [T, hidden_size].

        The hidden states are None if a graph has computed the logits as well.
        """

    def sample(
        self, step: StepMetadata, inputs: Any, hidden: Tensor | None, await_masks: Callable[[], None] | None, /
    ) -> Launched:
        """Sample the rows of logits of `step`. `inputs`, `hidden`: the results of `forward`.

        Returns the output without pooled values, or None on ranks that do not return outputs.
        """


Steps = TypeVar("Steps", bound=ModelSteps)


class StepRunner(Generic[Steps]):
    """Runner of steps on one rank. Every rank must run the same steps, since all make the same collective calls."""

    steps: Steps  # set when the model is loaded
    pooler: Pooler | None = None  # set if this rank's pipeline stage is the last

    def __init__(self, *, answers: bool) -> None:
        """Run steps by `steps`, once it is set. `answers`: whether this rank returns the outputs."""
        self.answers = answers

    def execute(self, step: StepMetadata, await_masks: Callable[[], None] | None = None) -> StepOutput | None:
        """Run one step, and wait for its output: None on ranks that do not return outputs.

        `await_masks` blocks until `step.mask_bits` is complete; None if it is complete already.
        """
        return wait_for(self.launch(step, await_masks))

    @torch.inference_mode()
    def launch(self, step: StepMetadata, await_masks: Callable[[], None] | None = None) -> Launched:
        """Start one step, like `execute`; on the CPU it is finished on return. `step` is not read afterwards.

        At most two launched steps may have outputs that were not waited for. Hidden states come from the previous
        pipeline stage and go to the next. Raises `StepRefusedError` if an earlier stage has refused the step.
        """
        if not len(step.seq_lens):
            return empty_output(step.step_id) if self.answers else None
        inputs, hidden = self.steps.forward(step)
        output = self.steps.sample(step, inputs, hidden, await_masks)
        if self.pooler is None or not len(step.pool_seqs):
            return output
        assert hidden is not None, "a step that pools runs in no graph of plain decodes"
        return with_pooled(output, self.pooler(step, hidden))
