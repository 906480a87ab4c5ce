"""The ids that came before in each of the engine's rows with penalties, and how often each was generated.

A step writes a row's history whole when a sequence first samples in it; from then on the tokens sampled there are
added. So a history is a function of the steps since then. Drafts count for the rows behind them, and stay only if they
were right. Keeps the histories in the host's memory; `DenseHistories` does on other devices.
"""

from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np
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
        """Count what the rows with penalties sampled: `sampled` int64 [L]; `accepted` int32 [S] if there are drafts."""


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
