"""Linear layers and experts of a step in which some rows have adapters, by kernels on the CPU.

Linear layers are computed by the operations of `csrc/layer/adapted_rows.h`, experts by `csrc/gemm/experts.cpp`. The
same code runs inside `PreparedLayers`, so that a row has the same bits in a step whose layers run one after the other.
"""

import ctypes
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor

from oarlock.workers.attention.rows_by_slot import RowsBySlot, StepRows
from oarlock.workers.kernels.cpu import library
from oarlock.workers.kernels.cpu.experts import CppExpertMatmul
from oarlock.workers.kernels.cpu.fused_layer import Rows, bound
from oarlock.workers.kernels.cpu.gemm import ELEMENT_TYPES, Epilogue
from oarlock.workers.kernels.cpu.structures import CBranch, CExpertAdapters, CExpertPairs, CLayerStep
from oarlock.workers.layers.experts import ExpertStack
from oarlock.workers.layers.fused_layer import GATED_MATMULS, MATMULS, CannotPrepare, Program
from oarlock.workers.layers.linear import GatedParallelLinear, RowParallelLinear
from oarlock.workers.layers.placement import Placement
from oarlock.workers.lora.adapted_experts import AdaptedExperts
from oarlock.workers.lora.adapted_layers import AdaptedColumnLayer, AdaptedRowLayer, ColumnLayer
from oarlock.workers.lora.low_rank import LayerPairs


def column_layer(layer: ColumnLayer, pairs: LayerPairs, step: StepRows) -> AdaptedColumnLayer:
    """Return the fastest computation of a layer whose outputs are divided among ranks, and make the layer use it."""
    layer.adapted = adapted = AdaptedColumnLayer(layer, pairs, step)
    if _has_kernels(layer.placement):
        with suppress(CannotPrepare):  # if torch multiplies the weight
            layer.adapted = adapted = CppColumnLayer(layer, pairs, step)
    return adapted


def row_layer(layer: RowParallelLinear, pairs: LayerPairs, step: StepRows) -> AdaptedRowLayer:
    """Return the fastest computation of a layer whose inputs are divided among ranks, and make the layer use it."""
    layer.adapted = adapted = AdaptedRowLayer(layer, pairs, step)
    if _has_kernels(layer.placement):
        with suppress(CannotPrepare):
            layer.adapted = adapted = CppRowLayer(layer, pairs, step)
    return adapted


def expert_stack(layer: ExpertStack, pairs: Sequence[LayerPairs], step: StepRows) -> AdaptedExperts:
    """Return the fastest computation of experts, and make the layer use it. `pairs`: as in `AdaptedExperts`."""
    kind = CppAdaptedExperts if isinstance(layer.matmul, CppExpertMatmul) else AdaptedExperts
    layer.adapted = adapted = kind(layer, pairs, step)
    return adapted


def _has_kernels(placement: Placement) -> bool:
    is_on_host = placement.device.type == "cpu" and placement.dtype in ELEMENT_TYPES
    return is_on_host and library.why_not(placement.dtype) is None


class CppColumnLayer(AdaptedColumnLayer):
    """`AdaptedColumnLayer` by one C++ operation."""

    def __init__(self, layer: ColumnLayer, pairs: LayerPairs, step: StepRows) -> None:
        """Build the operation from the layer's matmul; `layer.adapted` must be set. Raises `CannotPrepare`."""
        super().__init__(layer, pairs, step)
        self._program = program = _program(layer.placement, pairs)
        gated = isinstance(layer, GatedParallelLinear)
        weight = program.multiply(layer, Rows.RESIDUAL, Rows.NORMED_0, *(GATED_MATMULS if gated else MATMULS))
        program.end()
        pairs.pack()
        self._columns = weight.columns // 2 if gated else weight.columns
        self._dtype = torch.float32 if weight.epilogue == Epilogue.FLOAT else layer.placement.dtype

    def __call__(self, x: Tensor, rows: RowsBySlot) -> Tensor:
        x, y = x.contiguous(), torch.empty((len(x), self._columns), dtype=self._dtype)
        _run(self._program, 0, _step(self._program, x, rows, y, None))
        return y


class CppRowLayer(AdaptedRowLayer):
    """`AdaptedRowLayer` by two C++ operations, with the all-reduce between them."""

    def __init__(self, layer: RowParallelLinear, pairs: LayerPairs, step: StepRows) -> None:
        """Build the operations from the layer's matmul; `layer.adapted` must be set. Raises `CannotPrepare`."""
        super().__init__(layer, pairs, step)
        self._program = program = _program(layer.placement, pairs)
        for target in (Rows.NORMED_0, Rows.RESIDUAL):  # the first without a residual, the second with one
            program.end(program.finish(layer, Rows.RESIDUAL, None, 1.0, is_shared=True, target=target))
        pairs.pack()

    def __call__(self, x: Tensor, rows: RowsBySlot, residual: Tensor | None = None) -> Tensor:
        outputs, program, tp = self.pairs.shard.rows, self._program, self.layer.placement.tp
        partial = torch.empty(len(x) * outputs + len(rows.rows) * self.pairs.max_rank, dtype=torch.float32)
        x = x.contiguous()
        _run(program, 0, _step(program, x, rows, None, partial))
        partial = tp.all_reduce(partial) if tp.size > 1 else partial
        if residual is None:
            y = torch.empty((len(x), outputs), dtype=x.dtype)
            _finish(program, 0, _step(program, x, rows, y, partial))
        else:
            y = residual.clone(memory_format=torch.contiguous_format)
            _finish(program, 1, _step(program, y, rows, None, partial))
        return y


class CppAdaptedExperts(AdaptedExperts):
    """`AdaptedExperts` by the kernel that also computes the experts of other rows."""

    def __init__(self, layer: ExpertStack, pairs: Sequence[LayerPairs], step: StepRows) -> None:
        super().__init__(layer, pairs, step)
        assert isinstance(layer.matmul, CppExpertMatmul)
        self._kernel = layer.matmul
        for one in pairs:
            one.pack()
        at = [ctypes.addressof(one.structure) for one in pairs]
        self.structures = (CExpertPairs * len(self.pairs))(*zip(at[::2], at[1::2], strict=True))

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, rows: RowsBySlot) -> Tensor:
        adapters = CExpertAdapters(ctypes.addressof(self.structures), ctypes.addressof(rows.structure))
        return self._kernel(x.contiguous(), ids, weights, adapters)


def _program(placement: Placement, pairs: LayerPairs) -> Program:
    kernels = library.library(placement.dtype)
    return Program((), kernels, placement.dtype, pairs.shard.local_inputs, adapts=True)


def _step(
    program: Program, hidden: Tensor, rows: RowsBySlot, normed: Tensor | None, partial: Tensor | None
) -> CLayerStep:
    """Describe a step of one layer: `hidden` and `normed` are the rows of these names."""
    step = CLayerStep(rows=len(hidden), width=hidden.shape[1], type=ELEMENT_TYPES[program.dtype])
    step.hidden, step.adapters = hidden.data_ptr(), ctypes.addressof(rows.structure)
    step.normed[0] = None if normed is None else normed.data_ptr()
    step.partial = None if partial is None else partial.data_ptr()
    return step


def _run(program: Program, number: int, step: CLayerStep) -> None:
    """Run the operations of branch `number` before its all-reduce."""
    branches = (CBranch * len(program.branches))(*program.branches)
    bound(program.kernels).oarlock_run_branches(ctypes.addressof(branches), number, number + 1, ctypes.addressof(step))


def _finish(program: Program, number: int, step: CLayerStep) -> None:
    """Run the operations of branch `number` after its all-reduce."""
    bound(program.kernels).oarlock_finish_branch(ctypes.addressof(program.branches[number]), ctypes.addressof(step))
