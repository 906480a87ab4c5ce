"""The ids that occurred in each of the engine's rows with penalties, and the number of times each was generated.

When a sequence first samples in a row, the step writes the row's whole history; from then on the tokens sampled there
are added. So a history follows from the steps since then. Drafts count for the rows after them, and stay only if they
are accepted. `TokenHistories` keeps the histories in host memory; `DenseHistories` does on other devices.
"""

from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.protocol import StepMetadata


class Entries(NamedTuple):
    """The histories of a step's P rows with penalties: entries `firsts[p]` to `firsts[p] + lengths[p]`."""

    firsts: np.ndarray  # int64 [P]
    lengths: np.ndarray  # int32 [P]
    ids: np.ndarray  # int32   distinct within a row
    counts: np.ndarray  # int32   times generated; 0: only in the prompt


class PenalisedRows(NamedTuple):
    """The engine's rows, sequences and drafts of logits rows with penalties."""

    rows: np.ndarray  # int64 [P]   rows of the engine's tables
    seqs: np.ndarray  # int64 [P]   indices among the step's S sequences
    first_drafts: np.ndarray  # int64 [P]   the sequence's first draft among the T tokens
    num_drafts: np.ndarray  # int64 [P]   number of its drafts before the token that the row samples

    @staticmethod
    def of(step: StepMetadata) -> "PenalisedRows":
        tokens = step.logits_indices[step.penalty_rows].astype(np.int64)
        seqs = np.searchsorted(step.query_start_loc, tokens, "right") - 1
        drafts = step.num_drafts[seqs] if len(step.num_drafts) else np.zeros_like(seqs)
        first_drafts = step.query_start_loc[seqs + 1] - drafts
        return PenalisedRows(step.rows[seqs].astype(np.int64), seqs, first_drafts, tokens + 1 - first_drafts)

    def drafts_before(self, p: int, step: StepMetadata) -> np.ndarray:
        """Return the drafts that precede the token sampled by row `p`: int32 [k]."""
        return step.token_ids[self.first_drafts[p] : self.first_drafts[p] + self.num_drafts[p]]


class Histories(Protocol):
    """Store of a rank's histories."""

    def write(self, step: StepMetadata) -> None:
        """Write the histories that `step` brings, before it samples."""

    def add(self, step: StepMetadata, sampled: Tensor, accepted: Tensor | None) -> None:
        """Count the tokens that rows with penalties sampled.

        `sampled`: integers [L]. `accepted`: int32 [S] if there are drafts, else None.
        """


class TokenHistories:
    """Histories in host memory. Its pages that no penalised row uses take no memory."""

    def __init__(self, num_rows: int, most_ids: int) -> None:
        """Allocate empty histories. `most_ids`: largest number of distinct ids of one row."""
        self._ids = np.zeros((num_rows, most_ids), np.int32)
        self._counts = np.zeros((num_rows, most_ids), np.int32)
        self._lengths = np.zeros(num_rows, np.int32)
        self._index_of: list[dict[int, int] | None] = [None] * num_rows  # index of each id; None: not computed yet

    def write(self, step: StepMetadata) -> None:
        parts = pairwise(step.history_starts.tolist())
        for row, (start, end) in zip(step.history_rows.tolist(), parts, strict=True):
            self._ids[row, : end - start] = step.history_ids[start:end]
            self._counts[row, : end - start] = step.history_counts[start:end]
            self._lengths[row] = end - start
            self._index_of[row] = None

    def add(self, step: StepMetadata, sampled: Tensor, accepted: Tensor | None) -> None:
        where = PenalisedRows.of(step)
        tokens = sampled.numpy()[step.penalty_rows]
        rows = where.rows
        if accepted is not None:
            valid = where.num_drafts <= accepted.numpy()[where.seqs]
            tokens, rows = tokens[valid], rows[valid]
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            indices = self._indices_in(row)
            index = indices.get(token)
            if index is None:
                index = indices[token] = len(indices)
                self._ids[row, index], self._counts[row, index] = token, 0
                self._lengths[row] = index + 1
            self._counts[row, index] += 1

    def entries(self, step: StepMetadata) -> Entries:
        """Return views of the histories, or copies if drafts count as well."""
        where = PenalisedRows.of(step)
        if not where.num_drafts.any():
            firsts = where.rows * self._ids.shape[1]
            return Entries(firsts, self._lengths[where.rows], self._ids.ravel(), self._counts.ravel())
        parts = [self._with(row, where.drafts_before(p, step)) for p, row in enumerate(where.rows.tolist())]
        lengths = np.array([len(ids) for ids, _ in parts], np.int32)
        ids, counts = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Entries(np.cumsum(lengths, dtype=np.int64) - lengths, lengths, ids, counts)

    def _indices_in(self, row: int) -> dict[int, int]:
        indices = self._index_of[row]
        if indices is None:
            ids = self._ids[row, : self._lengths[row]].tolist()
            indices = self._index_of[row] = dict(zip(ids, range(len(ids)), strict=True))
        return indices

    def _with(self, row: int, drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return ids and counts of `row`, with `drafts` counted."""
        length = self._lengths[row]
        ids, counts = self._ids[row, :length], self._counts[row, :length].copy()
        indices, new = self._indices_in(row), {}
        for token in drafts.tolist():
            index = indices.get(token)
            if index is None:
                new[token] = new.get(token, 0) + 1
            else:
                counts[index] += 1
        more = np.array([*new], np.int32), np.array([*new.values()], np.int32)
        return np.concatenate([ids, more[0]]), np.concatenate([counts, more[1]])


class DenseHistories:
    """Histories on a device: `seen` int32 [rows, V], for the rank's V ids from `first_id` on.

    Nothing is read back from the device. The value of an id is twice its count, plus 1 if the step that wrote the
    history listed it: 0 means that it has not occurred, 1 that it is only in the prompt.
    """

    def __init__(self, num_rows: int, first_id: int, width: int, device: torch.device) -> None:
        self._first_id = first_id
        self.seen = torch.zeros((num_rows, width), dtype=torch.int32, device=device)

    def write(self, step: StepMetadata) -> None:
        if not len(step.history_rows):
            return
        self.seen.index_fill_(0, self._moved(step.history_rows), 0)
        local = step.history_ids.astype(np.int64) - self._first_id
        local_rows = np.flatnonzero((local >= 0) & (local < self.seen.shape[1]))
        rows = np.repeat(step.history_rows.astype(np.int64), np.diff(step.history_starts))
        values = self._moved(2 * step.history_counts[local_rows] + 1).to(torch.int32)
        self.seen.view(-1).index_copy_(
            0, self._moved(rows[local_rows] * self.seen.shape[1] + local[local_rows]), values
        )

    def add(self, step: StepMetadata, sampled: Tensor, accepted: Tensor | None) -> None:
        where = PenalisedRows.of(step)
        tokens = sampled[self._moved(step.penalty_rows)]
        valid = torch.ones_like(tokens, dtype=torch.bool)
        if accepted is not None:
            valid = self._moved(where.num_drafts) <= accepted[self._moved(where.seqs)]
        self._count(self.seen, self._moved(where.rows), tokens, valid)

    def of(self, step: StepMetadata, part: slice) -> Tensor:
        """Return the values of some of the rows with penalties, with drafts counted: int32 [p, V]."""
        where = PenalisedRows.of(step)
        seen = self.seen[self._moved(where.rows[part])]
        drafts = [where.drafts_before(p, step) for p in range(len(where.rows))[part]]
        rows = np.repeat(np.arange(len(drafts)), [len(some) for some in drafts])
        if len(rows):
            tokens = self._moved(np.concatenate(drafts))
            self._count(seen, self._moved(rows), tokens, torch.ones_like(tokens, dtype=torch.bool))
        return seen

    def _count(self, seen: Tensor, rows: Tensor, tokens: Tensor, valid: Tensor) -> None:
        """Count `tokens` [n] in `rows` [n] of `seen` if `valid` [n] is true and the id is in this shard."""
        local = tokens - self._first_id
        valid = valid & (local >= 0) & (local < seen.shape[1])
        indices = rows * seen.shape[1] + local.clamp(0, seen.shape[1] - 1)
        seen.view(-1).index_add_(0, indices, 2 * valid.to(torch.int32))

    def _moved(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.seen.device, non_blocking=True)


def make_histories(
    device: torch.device, num_rows: int, max_model_len: int, vocab_start: int, vocab_local: int, vocab_size: int
) -> Histories:
    """Return empty histories of `num_rows` rows.

    This rank's shard of the vocabulary has `vocab_local` ids, beginning with `vocab_start`.
    """
    if device.type != "cpu":
        return DenseHistories(num_rows, vocab_start, vocab_local, device)
    # The last token is not computed, and a token sampled ahead after the end of a sequence is counted as well.
    return TokenHistories(num_rows, min(max_model_len + 2, vocab_size))
