"""Steps of an encoder: whole texts, whose hidden states are pooled and which have no tokens to sample."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.models.encoders.encoder import Encoder
from oarlock.workers.protocol import StepMetadata, StepOutput
from oarlock.workers.sampling.row_chunks import empty_output


class EncoderSteps:
    """`ModelSteps` of an encoder."""

    def __init__(self, model: Encoder, device: torch.device, *, answers: bool) -> None:
        """Set the model and the rank's role. `answers`: whether this rank returns the outputs."""
        self._model, self._device, self._answers = model, device, answers

    def forward(self, step: StepMetadata) -> tuple[None, Tensor]:
        """Run the model on whole texts, as `ModelSteps` describes."""
        counts = np.diff(step.query_start_loc)
        assert (counts == step.seq_lens).all(), "texts are not divided among steps"
        ids, positions = (torch.from_numpy(x.astype(np.int64)) for x in (step.token_ids, step.positions))
        return None, self.hidden(ids, positions, _types(step), counts.tolist())

    def sample(
        self, step: StepMetadata, inputs: None, hidden: Tensor | None, await_masks: Callable[[], None] | None
    ) -> StepOutput | None:
        """Return an output without tokens, on the rank that returns outputs."""
        return empty_output(step.step_id) if self._answers else None

    def hidden(self, ids: Tensor, positions: Tensor, types: Tensor, lens: list[int]) -> Tensor:
        """Return the hidden states of tokens, int64 [T] each: [T, hidden]. `lens`: tokens of each text."""
        return self._model(ids.to(self._device), positions.to(self._device), types.to(self._device), lens)


def _types(step: StepMetadata) -> Tensor:
    """Return the token types, int64 [T]: 1 for tokens of a sequence's second text, else 0."""
    starts, types = step.query_start_loc.tolist(), torch.zeros(step.num_tokens, dtype=torch.int64)
    bounds = list(pairwise(starts))
    for seq, second in zip(step.pool_seqs.tolist(), step.pool_second.tolist(), strict=True):
        start, end = bounds[seq]
        if second:
            types[start + second : end] = 1
    return types
