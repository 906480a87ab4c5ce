"""The masks of one step that grammars decide, computed while the ranks are at work on that step already.

A row's mask costs a grammar tens to hundreds of microseconds, and the ranks need it only when they choose a token. A
grammar that fails leaves its row free to choose anything: what comes of it is thrown away, because its request ends.

Knows sequences and masks. Does not know in which thread it runs, where the bits lie or how the ranks hear of them.
"""

import logging

import numpy as np

from engine.scheduler.sequence import Sequence

logger = logging.getLogger("oarlock.engine")

_ALL = 0xFFFFFFFF


class GrammarBitmask:
    """Nothing else may touch the sequences from the step's submission until `fill` is through."""

    def __init__(self, masked: list[tuple[Sequence, list[int]]]) -> None:
        """`masked`: each row's sequence, its constraints made, with the ids banned in this step; in order of rows."""
        self._masked = masked
        self.failed: list[Sequence] = []  # whose grammar raised

    def fill(self, bits: np.ndarray) -> None:
        """Write every word of `bits`, uint32 [G, W]."""
        for words, (seq, bans) in zip(bits, self._masked, strict=True):
            assert seq.constraints is not None
            try:
                seq.constraints.fill_mask(seq, bans, words)
            except Exception:
                logger.exception("event=request_failed request_id=%d stage=mask", seq.request_id)
                words[:] = _ALL
                self.failed.append(seq)
