"""Computes the masks of all grammars of one step at once: those of different grammars in parallel threads.

Matchers of one compiled grammar share a cache with one lock, so they take turns, and threads would only wait. Does not
know sequences, steps or where masks go.
"""

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from llguidance import LLExecutor

from oarlock.engine.structured_output.matcher import ALL

# Stack of each thread: as large as the engine's, four times what the sandbox lets a grammar use.
_STACK_BYTES = 8 << 20

# A `GrammarMatcher`, the tokens that are drafted after the known ones, and the masks to write: uint32 [1 + drafts, W].
Rows = tuple[Any, tuple[int, ...], np.ndarray]


class MaskBatch:
    """Fills masks like `GrammarMatcher.fill_masks`, for many at once. Its threads start when first needed."""

    def __init__(self) -> None:
        self._threads: LLExecutor | None = None
        self._masks = np.empty((0, 0), np.uint32)  # the library writes into it; reused

    def fill_masks(self, batch: list[Rows]) -> list[int | Exception | None]:
        """Fill the masks of every matcher; return for each what its `fill_masks` returns or raises."""
        if len({id(matcher.origin) for matcher, _, _ in batch}) == 1:
            return [_outcome(matcher.fill_masks, drafts, into) for matcher, drafts, into in batch]
        computed = self._computed(batch)
        return [
            _outcome(matcher.finish_masks, drafts, masks, into)
            for (matcher, drafts, into), masks in zip(batch, computed, strict=True)
        ]

    def _computed(self, batch: list[Rows]) -> list[np.ndarray]:
        """Masks of each matcher as the library computes them: uint32 [1 + drafts, num_words]."""
        ends = np.cumsum([1 + len(drafts) for _, drafts, _ in batch]).tolist()
        masks = self._room_for(ends[-1], batch[0][0].compiler.num_words)
        plain, drafted = [], []
        for (matcher, drafts, _), first, last in zip(batch, [0, *ends], ends, strict=False):
            if possible := matcher.possible(drafts):
                masks[first + 1 : last] = ALL
                drafted.append((matcher.matcher, first, possible))
            else:
                plain.append((matcher.matcher, first))
        place = (masks.ctypes.data, masks.shape[1] * masks.itemsize, len(masks))
        if self._threads is None:
            os.environ.setdefault("RUST_MIN_STACK", str(_STACK_BYTES))  # read by the library's threads
            self._threads = LLExecutor()  # as many as suit the CPUs
        if plain:
            self._threads.unsafe_compute_mask_ptr(plain, *place)
        if drafted:
            self._threads.unsafe_compute_mask_ptr_with_draft_token(drafted, *place)
        return np.split(masks, ends[:-1])

    def _room_for(self, num_rows: int, num_words: int) -> np.ndarray:
        if len(self._masks) < num_rows or self._masks.shape[1] != num_words:
            self._masks = np.empty((num_rows, num_words), np.uint32)
        return self._masks[:num_rows]


def _outcome(fill: Callable[..., int | None], *arguments: object) -> int | Exception | None:
    try:
        return fill(*arguments)
    except Exception as error:
        return error
