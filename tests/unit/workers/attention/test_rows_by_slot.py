"""Rows of a step by the slot of their adapter."""

import numpy as np
import torch

from oarlock.workers.attention.rows_by_slot import RowsBySlot

CPU = torch.device("cpu")


def test_rows_are_sorted_by_slot_and_keep_their_order() -> None:
    rows = RowsBySlot.of_sequences(np.array([2, 0, 1, 2], np.int32), np.array([0, 2, 3, 6, 7], np.int32), CPU)
    assert rows is not None
    assert rows.rows.tolist() == [3, 4, 5, 0, 1, 6] and rows.others.tolist() == [2]
    assert rows.spans == ((1, 0, 3), (2, 3, 6))
    assert rows.starts.tolist() == [0, 3, 6] and rows.slots.tolist() == [1, 2] and rows.structure.spans == 2


def test_a_part_of_the_slots() -> None:
    rows = RowsBySlot.of(np.array([2, 0, 1, 2], np.int32), CPU)
    assert rows is not None and rows.among({1, 2, 3}) is rows
    one = rows.among({2})
    assert one is not None and one.rows.tolist() == [0, 3] and one.others.tolist() == [1, 2]
    assert rows.among({2}) is one and rows.among({3}) is None


def test_no_row_has_an_adapter() -> None:
    assert RowsBySlot.of_sequences(np.array([0], np.int32), np.array([0, 4], np.int32), CPU) is None
    assert RowsBySlot.of_sequences(np.array([], np.int32), np.array([0, 4], np.int32), CPU) is None
