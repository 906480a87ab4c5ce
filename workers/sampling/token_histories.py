"""The ids that came before in each of the engine's rows with penalties, and how often each was generated.

A step writes a row's history whole when a sequence first samples in it; from then on the tokens sampled there are
added. So a history is a function of the steps since then. Drafts count for the rows behind them, and stay only if they
were right. Keeps the histories in the host's memory; `DenseHistories` does on other devices.
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
    counts: np.ndarray  # int32   times generated; 0: in the prompt only


class PenalisedRows(NamedTuple):
    """The engine's rows, sequences and drafts that rows of logits with penalties belong to."""

    rows: np.ndarray  # int64 [P]   of the engine's tables
    seqs: np.ndarray  # int64 [P]   of the step's S sequences
    first_drafts: np.ndarray  # int64 [P]   the sequence's first draft among the T tokens
    num_drafts: np.ndarray  # int64 [P]   how many of its drafts come before what the row samples

    @staticmethod
    def of(step: StepMetadata) -> "PenalisedRows":
        tokens = step.logits_indices[step.penalty_rows].astype(np.int64)
        seqs = np.searchsorted(step.query_start_loc, tokens, "right") - 1
        drafts = step.num_drafts[seqs] if len(step.num_drafts) else np.zeros_like(seqs)
        first_drafts = step.query_start_loc[seqs + 1] - drafts
        return PenalisedRows(step.rows[seqs].astype(np.int64), seqs, first_drafts, tokens + 1 - first_drafts)

    def drafts_before(self, p: int, step: StepMetadata) -> np.ndarray:
        """The drafted ids that come before what row `p` of these samples: int32 [k]."""
        return step.token_ids[self.first_drafts[p] : self.first_drafts[p] + self.num_drafts[p]]


class Histories(Protocol):
    """Store of a rank's histories."""

    def write(self, step: StepMetadata) -> None:
        """Write the histories that `step` brings, before it samples."""

    def add(self, step: StepMetadata, sampled: Tensor, accepted: Tensor | None) -> None:
        """Count what rows with penalties sampled: `sampled` integers [L]; `accepted` int32 [S] if there are drafts."""


class TokenHistories:
    """Histories in the host's memory. Pages of it that no penalised row uses take none."""

    def __init__(self, num_rows: int, most_ids: int) -> None:
        """`most_ids`: distinct ids of one row."""
        self._ids = np.zeros((num_rows, most_ids), np.int32)
        self._counts = np.zeros((num_rows, most_ids), np.int32)
        self._lengths = np.zeros(num_rows, np.int32)
        self._places: list[dict[int, int] | None] = [None] * num_rows  # of each id; None: not made yet

    def write(self, step: StepMetadata) -> None:
        parts = pairwise(step.history_starts.tolist())
        for row, (start, end) in zip(step.history_rows.tolist(), parts, strict=True):
            self._ids[row, : end - start] = step.history_ids[start:end]
            self._counts[row, : end - start] = step.history_counts[start:end]
            self._lengths[row] = end - start
            self._places[row] = None

    def add(self, step: StepMetadata, sampled: Tensor, accepted: Tensor | None) -> None:
        where = PenalisedRows.of(step)
        tokens = sampled.numpy()[step.penalty_rows]
        rows = where.rows
        if accepted is not None:
            valid = where.num_drafts <= accepted.numpy()[where.seqs]
            tokens, rows = tokens[valid], rows[valid]
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            places = self._places_in(row)
            place = places.get(token)
            if place is None:
                place = places[token] = len(places)
                self._ids[row, place], self._counts[row, place] = token, 0
                self._lengths[row] = place + 1
            self._counts[row, place] += 1

    def entries(self, step: StepMetadata) -> Entries:
        """Views of the histories, or copies where drafts count as well."""
        where = PenalisedRows.of(step)
        if not where.num_drafts.any():
            firsts = where.rows * self._ids.shape[1]
            return Entries(firsts, self._lengths[where.rows], self._ids.ravel(), self._counts.ravel())
        parts = [self._with(row, where.drafts_before(p, step)) for p, row in enumerate(where.rows.tolist())]
        lengths = np.array([len(ids) for ids, _ in parts], np.int32)
        ids, counts = (np.concatenate(column) for column in zip(*parts, strict=True))
        return Entries(np.cumsum(lengths, dtype=np.int64) - lengths, lengths, ids, counts)

    def _places_in(self, row: int) -> dict[int, int]:
        places = self._places[row]
        if places is None:
            ids = self._ids[row, : self._lengths[row]].tolist()
            places = self._places[row] = dict(zip(ids, range(len(ids)), strict=True))
        return places

    def _with(self, row: int, drafts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ids and counts of `row`, with `drafts` counted."""
        length = self._lengths[row]
        ids, counts = self._ids[row, :length], self._counts[row, :length].copy()
        places, new = self._places_in(row), {}
        for token in drafts.tolist():
            place = places.get(token)
            if place is None:
                new[token] = new.get(token, 0) + 1
            else:
                counts[place] += 1
        more = np.array([*new], np.int32), np.array([*new.values()], np.int32)
        return np.concatenate([ids, more[0]]), np.concatenate([counts, more[1]])


class DenseHistories:
    """`seen` int32 [rows, V] on the device, of the rank's V ids from `first_id` on.

    On a device nothing is read back. The number of an id is twice its count, plus 1 if the step that wrote the history
    listed it: 0 has not come before, 1 is in the prompt only.
    """

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


def make_histories(
    device: torch.device, num_rows: int, max_model_len: int, vocab_start: int, vocab_local: int, vocab_size: int
) -> Histories:
    """Empty histories of `num_rows` rows. This rank's shard of the vocabulary has the ids from `vocab_start` on,
    `vocab_local` of them."""
    if device.type != "cpu":
        return DenseHistories(num_rows, vocab_start, vocab_local, device)
    # The last token is not computed, and the one that is sampled ahead after an end is counted as well.
    return TokenHistories(num_rows, min(max_model_len + 2, vocab_size))
