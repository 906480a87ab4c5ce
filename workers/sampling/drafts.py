"""Verifies drafted tokens: a draft is right if it and all before it equal the tokens that were sampled in their places.

Noise is keyed by seed and position, so the token sampled after right drafts is the one that would have been sampled
without drafts: accepting while sample and draft are equal is exact for greedy and for seeded sampling alike.
"""

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.protocol import StepMetadata


def num_accepted(step: StepMetadata, sampled: Tensor) -> Tensor:
    """Number of right drafts of each sequence: int32 [S]. Waits for no device.

    `sampled` int64 [L]: the tokens of all rows of logits. `step.num_drafts` must not be empty.
    """
    drafts = step.num_drafts
    most = int(drafts.max(initial=0))
    firsts = step.query_start_loc[1:] - drafts  # [S]   of the drafts among the T tokens
    rows = np.searchsorted(step.logits_indices, firsts - 1)  # [S]   of the newest tokens among the L
    place = np.arange(most)
    is_draft = place < drafts[:, None]  # [S, most]
    guesses = step.token_ids[np.where(is_draft, firsts[:, None] + place, 0)]
    places = np.where(is_draft, rows[:, None] + place, 0)
    guesses = torch.from_numpy(np.where(is_draft, guesses, -1).astype(np.int64)).to(sampled.device, non_blocking=True)
    right = sampled[torch.from_numpy(places).to(sampled.device, non_blocking=True)] == guesses
    return right.int().cumprod(1).sum(1, dtype=torch.int32)
