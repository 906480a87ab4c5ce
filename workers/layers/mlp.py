"""The MLP without a gate on one rank."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from oarlock.workers.attention.backend import LayerMemory, LayerStep
from oarlock.workers.kernels.cpu.fused_layer import Rows
from oarlock.workers.layers.fused_layer import MATMULS, MLP_ROWS, Program
from oarlock.workers.layers.linear import ColumnParallelLinear, RowParallelLinear
from oarlock.workers.layers.mlp_spec import MLPSpec
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.sharding import shard_evenly
from oarlock.workers.quantization.method import StoredRows


class MLP:
    """MLP with an activation between two linear layers: `x` [T, hidden] (normed) -> [T, hidden], plus the residual if
    there is one."""

    # module in a checkpoint -> attribute
    linear_layers: ClassVar[Mapping[str, str]] = {"up_proj": "up", "down_proj": "down"}

    def __init__(self, name: str, spec: MLPSpec, layer: int, hidden: int, placement: Placement) -> None:
        width, up = spec.intermediate_size, f"{name}.up_proj"
        local = shard_evenly(up, "intermediate size", width, placement.tp.size)
        rows = (StoredRows(up, width, placement.tp.rank * local, local),)
        self.up = ColumnParallelLinear(rows, hidden, spec.bias, placement, spec.activation)
        self.down = RowParallelLinear(f"{name}.down_proj", width, hidden, spec.bias, placement)

    @property
    def output(self) -> RowParallelLinear:
        """The linear layer whose partial sums the ranks all-reduce."""
        return self.down

    @property
    def parts(self) -> list[ColumnParallelLinear | RowParallelLinear]:
        return [self.up, self.down]

    def __call__(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> Tensor:
        return self.down(self.up(x), residual)

    def unrounded(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return the output without a residual, as `RowParallelLinear.unrounded` returns it."""
        return self.down.unrounded(self.up(x))

    def fuse(self, program: Program, source: Rows, rotary: int, memory: LayerMemory) -> tuple[RowParallelLinear, Rows]:
        """Add the operations on `source` that precede the down projection; return the down projection and its input
        rows."""
        program.multiply(program.take(self, "up", ColumnParallelLinear), source, Rows.SCRATCH_1, *MATMULS)
        program.rows_at_once = MLP_ROWS
        return program.take(self, "down", RowParallelLinear), Rows.SCRATCH_1
