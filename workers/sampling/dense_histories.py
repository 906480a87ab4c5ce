"""Histories of rows with penalties on a device from which nothing is read back: one number for each id of the shard.

The same histories as `TokenHistories` keeps. The number of an id is twice its count, plus 1 if the step that wrote the
history listed it: 0 has not come before, 1 is in the prompt only.
"""

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.protocol import StepMetadata
from oarlock.workers.sampling.token_histories import PenalisedRows


class DenseHistories:
    """`seen` int32 [rows, V] on the device, of the rank's V ids from `first_id` on."""

    def __init__(self, num_rows: int, first_id: int, width: int, device: torch.device) -> None:
        self._first_id = first_id
        self.seen = torch.zeros((num_rows, width), dtype=torch.int32, device=device)

    def write(self, step: StepMetadata) -> None:
        if not len(step.history_rows):
            return
        self.seen.index_fill_(0, self._moved(step.history_rows), 0)
        local = step.history_ids.astype(np.int64) - self._first_id
        ours = np.flatnonzero((local >= 0) & (local < self.seen.shape[1]))
        rows = np.repeat(step.history_rows.astype(np.int64), np.diff(step.history_starts))
        values = self._moved(2 * step.history_counts[ours] + 1).to(torch.int32)
        self.seen.view(-1).index_copy_(0, self._moved(rows[ours] * self.seen.shape[1] + local[ours]), values)

    def add(self, step: StepMetadata, sampled: Tensor, accepted: Tensor | None) -> None:
        where = PenalisedRows.of(step)
        tokens = sampled[self._moved(step.penalty_rows)]
        valid = torch.ones_like(tokens, dtype=torch.bool)
        if accepted is not None:
            valid = self._moved(where.num_drafts) <= accepted[self._moved(where.seqs)]
        self._count(self.seen, self._moved(where.rows), tokens, valid)

    def of(self, step: StepMetadata, part: slice) -> Tensor:
        """The numbers of some of the rows with penalties, drafts counted: int32 [p, V]."""
        where = PenalisedRows.of(step)
        seen = self.seen[self._moved(where.rows[part])]
        drafts = [where.drafts_before(p, step) for p in range(len(where.rows))[part]]
        rows = np.repeat(np.arange(len(drafts)), [len(some) for some in drafts])
        if len(rows):
            tokens = self._moved(np.concatenate(drafts))
            self._count(seen, self._moved(rows), tokens, torch.ones_like(tokens, dtype=torch.bool))
        return seen

    def _count(self, seen: Tensor, rows: Tensor, tokens: Tensor, valid: Tensor) -> None:
        """Count `tokens` [n] in `rows` [n] of `seen`, where `valid` [n] and of this shard."""
        local = tokens - self._first_id
        valid = valid & (local >= 0) & (local < seen.shape[1])
        places = rows * seen.shape[1] + local.clamp(0, seen.shape[1] - 1)
        seen.view(-1).index_add_(0, places, 2 * valid.to(torch.int32))

    def _moved(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.seen.device, non_blocking=True)
