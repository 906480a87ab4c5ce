"""Rows of a step in blocks of one adapter slot each, which kernels on a device read.

Unlike `RowsBySlot`, its host counterpart, the number of blocks depends only on the numbers of rows and slots, and
nothing about the rows is known on the host: a graph that reads the arrays at their addresses serves any mixture of
adapters. Rows without an adapter have blocks as well, because kernels that add an update also finish all rows.
"""

from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import torch
from torch import Tensor

BLOCK_ROWS = 32  # rows of a block
NO_ROW = -1  # padding of a block
UNUSED = -1  # slot of a block without rows


@dataclass(frozen=True, slots=True, eq=False)
class BlocksBySlot:
    """Rows by slot, each slot's rows in the order of the step, padded to whole blocks."""

    order: Tensor  # int32 [blocks * BLOCK_ROWS]   rows, or NO_ROW
    slots: Tensor  # int32 [blocks]   slot of each block: 0 without an adapter, or UNUSED
    first: int = 0  # the row that is number 0 of the tensors to compute; earlier rows are left out

    @staticmethod
    def of(slot_of: np.ndarray, device: torch.device) -> "BlocksBySlot | None":
        """Sort rows by `slot_of` int32 [T], the slot of each. Return None if no row has an adapter."""
        if not slot_of.any():
            return None
        blocks = num_blocks(len(slot_of), int(slot_of.max()))
        order, slots = np.empty(blocks * BLOCK_ROWS, np.int32), np.empty(blocks, np.int32)
        write_blocks(slot_of, order, slots)
        parts = (torch.from_numpy(part).to(device, non_blocking=True) for part in (order, slots))
        return BlocksBySlot(next(parts), next(parts))

    def among(self, slots: Set[int]) -> Self:
        """Return all blocks: kernels skip slots without a pair of the layer."""
        return self

    def from_row(self, first: int) -> Self:
        """Return the same for tensors that begin with row `first`."""
        return replace(self, first=first)


def num_blocks(rows: int, num_slots: int) -> int:
    """Return the most blocks of `rows` rows that have up to `num_slots` adapters or none."""
    return (rows + (BLOCK_ROWS - 1) * min(rows, num_slots + 1)) // BLOCK_ROWS


def write_blocks(slot_of: np.ndarray, order: np.ndarray, slots: np.ndarray) -> None:
    """Write the blocks of rows whose slots are `slot_of` int32 [T] to the arrays of a `BlocksBySlot`."""
    by_slot = np.argsort(slot_of, kind="stable")
    counts = np.bincount(slot_of)
    blocks = -(-counts // BLOCK_ROWS)
    used = int(blocks.sum())
    slots[:used] = np.repeat(np.arange(len(counts)), blocks)
    slots[used:] = UNUSED
    # Padding comes before the rows of a slot: a row moves by the padding of its own slot and of all before.
    padding = np.cumsum(blocks * BLOCK_ROWS - counts)
    order[:] = NO_ROW
    order[np.arange(len(slot_of)) + np.repeat(padding, counts)] = by_slot
