"""Experts of a step in which some rows have adapters of them.

This class computes with torch, and is the reference of the C++ kernel (`cpp_layers.py`), which serves on the CPU. The
rows that have an adapter of these experts are computed expert by expert, from the same weights, and all other rows by
the experts' own matmul. Each slice of an expert's width, or each group of experts, gets its own part of the update
before the slices are added in their tree, so that the bits do not depend on the number of ranks.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.attention.rows_by_slot import RowsBySlot, StepRows
from oarlock.workers.distributed.all_reduce import tree_sum
from oarlock.workers.kernels.cpu.experts import CppExpertMatmul
from oarlock.workers.kernels.cpu.packed_sums import PackedSums
from oarlock.workers.layers.experts import ExpertStack
from oarlock.workers.lora.adapted_layers import adapted_rows
from oarlock.workers.lora.low_rank import LayerPairs
from oarlock.workers.quantization.expert_matmul import TorchExpertMatmul
from oarlock.workers.quantization.expert_weights import gate_of
from oarlock.workers.quantization.unrounded import Sums, float32_sums

_ROWS_AT_ONCE = 128  # each has float32 sums of every slice


class AdaptedExperts:
    """Experts of one width: x [T, hidden], ids and weights [T, k] -> the rank's share, float32 [T, hidden]."""

    def __init__(self, layer: ExpertStack, pairs: Sequence[LayerPairs], step: StepRows) -> None:
        """Adapt `layer`. `pairs`: of gate and up, and of down, of each of its experts by turns."""
        self.step, self.shape, self.multiply = step, layer.shape, layer.matmul
        self.pairs = list(zip(pairs[::2], pairs[1::2], strict=True))
        self.used: frozenset[int] = frozenset()  # slots that have a pair of any of the experts
        self.sums = [_sums_of(layer.matmul, number) for number in range(layer.shape.count)]

    @property
    def rows(self) -> RowsBySlot | None:
        """Rows of the step that runs that have an adapter of any of these experts; None if there are none."""
        return adapted_rows(self.step, self.used)

    def note_slots(self) -> None:
        """Update `used` after a change of slots."""
        self.used = frozenset().union(*(one.used for pairs in self.pairs for one in pairs))

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, rows: RowsBySlot) -> Tensor:
        total = torch.empty((len(x), self.shape.hidden), device=x.device)
        if len(rows.others):
            others = (part.index_select(0, rows.others) for part in (x, ids, weights))
            total.index_copy_(0, rows.others, self.multiply(*others))
        for part in rows.rows.split(_ROWS_AT_ONCE):
            chosen = (each.index_select(0, part) for each in (x, ids, weights))
            total.index_copy_(0, part, self._adapted(*chosen, rows.slot_of[part.numpy()]))
        return total

    def _adapted(self, x: Tensor, ids: Tensor, weights: Tensor, slot_of: np.ndarray) -> Tensor:
        """Return the results of rows with adapters, as `TorchExpertMatmul` adds them up. `slot_of`: of each row."""
        shape = self.shape
        lanes = torch.zeros((shape.slices * shape.groups, len(x), shape.hidden), device=x.device)
        for expert in range(shape.count):
            rows, choices = (ids - shape.first == expert).nonzero(as_tuple=True)  # a row has an expert once
            if not len(rows):
                continue
            lane = expert // shape.group if shape.group else 0
            weight = weights[rows, choices, None]  # [rows, 1]
            after = 1.0 if shape.weighs_inputs else weight
            results = self._slices(expert, x[rows], weight, RowsBySlot.of(slot_of[rows.numpy()], x.device))
            lanes[lane : lane + shape.slices, rows] += after * results
        return tree_sum(list(lanes))

    def _slices(self, expert: int, x: Tensor, weight: Tensor, rows: RowsBySlot | None) -> Tensor:
        """Return the expert's results for `x` [T, hidden], all of whose rows have adapters, of each slice of its width:
        float32 [slices, T, hidden]. `weight`: of the expert, float32 [T, 1]."""
        assert rows is not None
        (gate_up, down, bias), shape = self.sums[expert], self.shape
        low, high = self.pairs[expert]
        both = gate_up(x).index_add_(0, rows.rows, low.update(x, rows))
        if shape.weighs_inputs:
            both = both * weight
        inner = gate_of(both, shape).to(shape.dtype)  # [T, width]
        # A slice's result is the result for rows whose other slices are zero. All are multiplied together, as reading
        # the weight takes longer than multiplying a few rows.
        alone, length = inner.new_zeros((shape.slices, *inner.shape)), shape.width // shape.slices
        for number in range(shape.slices):
            here = slice(number * length, (number + 1) * length)
            alone[number, :, here] = inner[:, here]
        found = down(alone.flatten(0, 1)).unflatten(0, (shape.slices, -1))
        found.index_add_(1, rows.rows, high.expand(high.shrink_slices(inner, rows), rows))
        if bias is not None:
            found[0] += bias.float()
        return found


def _sums_of(multiply: object, number: int) -> tuple[Sums, Sums, Tensor | None]:
    """Return the sums of gate and up, and of down, of expert `number`, and the bias of down that one rank adds."""
    if isinstance(multiply, TorchExpertMatmul):
        gate_up, down, bias = multiply.matmuls[number]
        return float32_sums(gate_up), float32_sums(down), bias
    if not isinstance(multiply, CppExpertMatmul):
        raise TypeError(f"a {type(multiply).__name__} has no sums that an adapter could be added to")
    return PackedSums.of_expert(multiply, number)
