"""Masks of a step that depend on tokens, which may not be known yet when the step is built.

Knows sequences and their constraints. Does not know rows of the step, or how masks reach the ranks.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from oarlock.engine.input_batch.logits_constraints import Constraints
from oarlock.engine.scheduler.sequence import GrammarMatcherProtocol, Sequence, Status

logger = logging.getLogger("oarlock.engine")

ALL = 0xFFFFFFFF

# A matcher, the tokens that are drafted after the known ones, and the masks to write: uint32 [1 + drafts, W].
GrammarRows = tuple[GrammarMatcherProtocol, tuple[int, ...], np.ndarray]
# Writes the masks of all matchers; returns for each what its `GrammarMatcherProtocol.fill_masks` returned or raised.
FillMasks = Callable[[list[GrammarRows]], list[int | Exception | None]]


def fill_one_by_one(rows: list[GrammarRows]) -> list[int | Exception | None]:
    """Fill the masks of one matcher after the other: the plain `FillMasks`."""
    results: list[int | Exception | None] = []
    for matcher, drafts, masks in rows:
        try:
            results.append(matcher.fill_masks(drafts, masks))
        except Exception as error:
            results.append(error)
    return results


@dataclass(slots=True)
class MaskedRows:
    """Masked rows of one sequence: its next row, and a row after each of its drafted tokens."""

    seq: Sequence
    constraints: Constraints
    num_generated: int  # tokens that the sequence will have generated before the first of these rows
    bans: list[list[int]]  # by row: ids that the step's bias bans now, beside those that it always bans
    drafts: tuple[int, ...] = ()

    @property
    def is_live(self) -> bool:
        """False when the sequence has ended or was preempted: the token sampled for it is dropped."""
        return self.seq.status is Status.RUNNING


class GrammarBitmask:
    """Masks of one step, computed while the ranks run it: they need the masks only when they sample."""

    def __init__(self, masked: list[MaskedRows], num_words: int) -> None:
        """`masked`: in the order of the step's rows. `num_words`: of one mask."""
        self._masked = masked
        self._shape = sum(len(rows.bans) for rows in masked), num_words
        self.failed: list[Sequence] = []  # sequences whose grammar raised
        self.complete: list[Sequence] = []  # sequences whose grammar allows nothing but the end

    @property
    def until_known(self) -> np.ndarray:
        """uint32 [G, W], read-only: every id is allowed."""
        return np.broadcast_to(np.uint32(ALL), self._shape)

    @property
    def follows_tokens(self) -> bool:
        """Whether any of these masks depends on the tokens that were generated."""
        return any(rows.constraints.follows_tokens for rows in self._masked)

    @property
    def must_wait(self) -> bool:
        """Whether a token that decides a mask is not known before the answer to the step before."""
        return any(rows.num_generated > rows.seq.num_generated_tokens for rows in self._masked)

    def compute(self, fill_masks: FillMasks = fill_one_by_one) -> np.ndarray:
        """Compute uint32 [G, W]. A sequence that has ended or ends here is allowed every id: its token is dropped."""
        bits = np.empty(self._shape, np.uint32)
        live: list[tuple[MaskedRows, np.ndarray]] = []
        grammars: list[tuple[Sequence, GrammarRows]] = []
        last = 0
        for rows in self._masked:
            first, last = last, last + len(rows.bans)
            if rows.is_live:
                live.append((rows, bits[first:last]))
            if rows.is_live and rows.seq.grammar_matcher is not None:
                grammars.append((rows.seq, (rows.seq.grammar_matcher, rows.drafts, bits[first:last])))
            else:
                bits[first:last] = ALL
        self._fill(grammars, fill_masks)
        for rows, masks in live:
            if rows.seq not in self.failed and rows.seq not in self.complete:
                rows.constraints.narrow(rows.seq.token_ids, rows.num_generated, rows.drafts, rows.bans, masks)
        return bits

    def _fill(self, grammars: list[tuple[Sequence, GrammarRows]], fill_masks: FillMasks) -> None:
        """Fill the masks of sequences with grammars."""
        if not grammars:
            return
        results = fill_masks([rows for _, rows in grammars])
        for (seq, (_, _, masks)), result in zip(grammars, results, strict=True):
            if isinstance(result, Exception):
                logger.error("event=request_failed request_id=%d stage=mask", seq.request_id, exc_info=result)
                self.failed.append(seq)
            elif result == 0:
                self.complete.append(seq)
            else:
                continue
            masks[:] = ALL
