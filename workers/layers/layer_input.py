"""Inputs that each layer gets from the tokens (Gemma 3n, Gemma 4), and the sublayer that adds them to the residual.

Every rank computes the inputs of all layers once per step, from the tokens' ids and embeddings, and each layer gates
its own part of them.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from oarlock.workers.attention.backend import LayerMemory, LayerStep
from oarlock.workers.kernels.cpu.fused_layer import OperationKind, Rows
from oarlock.workers.kernels.cpu.structures import CColumnProduct, CColumns
from oarlock.workers.layers.embedding import VocabParallelEmbedding
from oarlock.workers.layers.fused_layer import MATMULS, Program
from oarlock.workers.layers.layer_input_spec import LayerInputSpec, LayerInputTable
from oarlock.workers.layers.linear import ColumnParallelLinear, RowParallelLinear
from oarlock.workers.layers.norm import RMSNorm
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.sharding import shard_evenly
from oarlock.workers.quantization.method import StoredRows


class LayerInputs:
    """Inputs of all layers: ids int64 [T] and embeddings [T, hidden] -> [T, layers, width] of the model's dtype."""

    def __init__(
        self, spec: LayerInputTable, layers: int, hidden: int, placement: Placement, vocab_placement: Placement
    ) -> None:
        """Prepare the table of a model of `layers` layers. `vocab_placement`: of its embedding."""
        values = layers * spec.width
        self.layers, self.width = layers, spec.width
        self.table = VocabParallelEmbedding(spec.table, spec.vocab_size, values, vocab_placement, spec.width**0.5)
        rows = (StoredRows(spec.projection, values, 0, values),)
        self.projection = ColumnParallelLinear(rows, hidden, False, placement, float32_output=False)
        # The projection is divided by the square root of the hidden size before its norm. The norm undoes this, except
        # for its epsilon.
        self.norm = RMSNorm(spec.projection_norm, spec.width, spec.norm.eps * hidden, placement, spec.norm.offset)

    @property
    def parts(self) -> list[VocabParallelEmbedding | ColumnParallelLinear | RMSNorm]:
        return [self.table, self.projection, self.norm]

    def __call__(self, ids: Tensor, embedded: Tensor) -> Tensor:
        found = self.table(ids).view(len(ids), self.layers, self.width)
        projected = self.norm(self.projection(embedded).view(-1, self.width)).view_as(found)
        return ((projected.float() + found.float()) * 0.5**0.5).to(embedded.dtype)


class LayerInput:
    """Gated input of a layer: `x` [T, hidden] -> [T, hidden], plus the residual if there is one."""

    # module in a checkpoint -> attribute
    linear_layers: ClassVar[Mapping[str, str]] = {"gate_proj": "gate", "down_proj": "output"}

    def __init__(self, name: str, spec: LayerInputSpec, layer: int, hidden: int, placement: Placement) -> None:
        self.first = layer * spec.width  # column of the layer's input among those of all layers
        gate = f"{name}.gate_proj"
        local = shard_evenly(gate, "width of layers' inputs", spec.width, placement.tp.size)
        self.columns = slice(placement.tp.rank * local, placement.tp.rank * local + local)
        rows = (StoredRows(gate, spec.width, self.columns.start, local),)
        self.gate = ColumnParallelLinear(rows, hidden, False, placement, spec.activation)
        self.output = RowParallelLinear(f"{name}.down_proj", spec.width, hidden, False, placement)

    @property
    def parts(self) -> list[ColumnParallelLinear | RowParallelLinear]:
        return [self.gate, self.output]

    def __call__(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> Tensor:
        return self.output(self._gated(x, step), residual)

    def unrounded(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return the output without a residual, as `RowParallelLinear.unrounded` returns it."""
        return self.output.unrounded(self._gated(x, step))

    def _gated(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return the rank's columns of the layer's input times its gate: [T, width of the rank]."""
        assert step.layer_input is not None, "the model has no table of layers' inputs"
        return self.gate(x) * step.layer_input[:, self.columns]

    def fuse(self, program: Program, source: Rows, rotary: int, memory: LayerMemory) -> tuple[RowParallelLinear, Rows]:
        """Add the operations on `source` before the output projection; return the projection and its input rows."""
        gated, width = Rows.SCRATCH_1, self.columns.stop - self.columns.start
        program.multiply(program.take(self, "gate", ColumnParallelLinear), source, gated, *MATMULS)
        own = CColumns(Rows.LAYER_INPUTS, self.first + self.columns.start, program.inputs)
        product = CColumnProduct(CColumns(gated, 0, width), own, width)
        program.add(OperationKind.MULTIPLY_COLUMNS, gated, gated, product, width)
        return program.take(self, "output", RowParallelLinear), gated
