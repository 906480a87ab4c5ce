"""Rows of a step whose sequences have an adapter, sorted by the slot of the adapter.

A slot is the place of an adapter in a rank's memory. Slot 0 is no adapter. The rows are
sorted once for each step; all adapted layers read the same order.
"""

from collections.abc import Generator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.attention.blocks_by_slot import BlocksBySlot
from oarlock.workers.kernels.cpu.structures import CAdapterRows
from oarlock.workers.kernels.triton import availability

NO_ADAPTER = 0


class SlotSpan(NamedTuple):
    """The rows of one slot: entries `start` to `stop` of `RowsBySlot.rows`."""

    slot: int
    start: int
    stop: int


@dataclass(slots=True, eq=False)
class RowsBySlot:
    """Rows of a step by slot. At least one row has an adapter."""

    slot_of: np.ndarray  # int32 [T]   host
    rows: Tensor  # int64 [n]   rows with an adapter, by slot; rows of one slot in the order of the step
    others: Tensor  # int64 [T - n]   rows without an adapter
    spans: tuple[SlotSpan, ...]  # host
    structure: CAdapterRows = field(repr=False)  # read by kernels on the CPU; `starts` and `slots` are its arrays
    starts: np.ndarray = field(repr=False)  # int64 [spans + 1]
    slots: np.ndarray = field(repr=False)  # int32 [spans]
    _among: dict[frozenset[int], "RowsBySlot | None"] = field(default_factory=dict, repr=False)

    @staticmethod
    def of(slot_of: np.ndarray, device: torch.device) -> "RowsBySlot | None":
        """Sort rows by `slot_of` int32 [T], the slot of each. Return None if no row has an adapter."""
        if not slot_of.any():
            return None
        order = np.argsort(slot_of, kind="stable")
        first = int(np.searchsorted(slot_of[order], NO_ADAPTER, side="right"))
        slots, firsts = np.unique(slot_of[order[first:]], return_index=True)
        slots, starts = slots.astype(np.int32), np.append(firsts, len(order) - first)
        spans = tuple(map(SlotSpan, slots.tolist(), starts[:-1].tolist(), starts[1:].tolist()))
        others, rows = (torch.from_numpy(part).to(device, non_blocking=True) for part in (order[:first], order[first:]))
        at = (rows.data_ptr(), starts.ctypes.data, slots.ctypes.data)
        return RowsBySlot(slot_of, rows, others, spans, CAdapterRows(*at, len(spans)), starts, slots)

    @staticmethod
    def of_sequences(slots: np.ndarray, query_start_loc: np.ndarray, device: torch.device) -> "RowsBySlot | None":
        """Sort the rows of a step by `slots` int32 [S], the slot of each sequence, or [0] if no sequence has one.

        `query_start_loc` int32 [S + 1]. Return None if no row has an adapter.
        """
        return RowsBySlot.of(np.repeat(slots, np.diff(query_start_loc)), device) if len(slots) else None

    def among(self, slots: Set[int]) -> "RowsBySlot | None":
        """Return the same with the rows of other slots than `slots` among `others`; None if no row is left."""
        if all(span.slot in slots for span in self.spans):
            return self
        key = frozenset(slots)
        if key not in self._among:
            kept = np.where(np.isin(self.slot_of, list(slots)), self.slot_of, NO_ADAPTER)
            self._among[key] = RowsBySlot.of(kept, self.rows.device)
        return self._among[key]


AdaptedRows = RowsBySlot | BlocksBySlot  # of a step on the host, and on a device with Triton kernels


def adapted_rows(slot_of: np.ndarray, device: torch.device) -> AdaptedRows | None:
    """Sort rows by `slot_of` int32 [T], the slot of each, as the layers on `device` read them. Return None if no row
    has an adapter."""
    return (BlocksBySlot if availability.can_serve(device) else RowsBySlot).of(slot_of, device)


class StepRows:
    """The rows of the step that runs, which its adapted layers read; None between steps and in steps without
    adapters."""

    def __init__(self) -> None:
        self.current: AdaptedRows | None = None

    @contextmanager
    def of(self, rows: AdaptedRows) -> Generator[None]:
        """Set the rows while a step runs."""
        self.current = rows
        try:
            yield
        finally:
            self.current = None
