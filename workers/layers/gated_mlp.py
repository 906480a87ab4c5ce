"""The gated MLP sublayer on one rank."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from oarlock.workers.attention.backend import LayerMemory, LayerStep
from oarlock.workers.kernels.cpu.fused_layer import Rows
from oarlock.workers.layers.fused_layer import GATED_MATMULS, MLP_ROWS, Program
from oarlock.workers.layers.gated_mlp_spec import GatedMLPSpec
from oarlock.workers.layers.linear import GatedParallelLinear, RowParallelLinear
from oarlock.workers.layers.placement import Placement


class GatedMLP:
    """Gated MLP: `x` [T, hidden] (normed) -> [T, hidden], plus the residual if there is one."""

    # module in a checkpoint -> attribute
    linear_layers: ClassVar[Mapping[str, str]] = {"gate_up_proj": "gate_up", "down_proj": "down"}

    def __init__(self, name: str, spec: GatedMLPSpec, layer: int, hidden: int, placement: Placement) -> None:
        width = spec.intermediate_size
        self.gate_up = GatedParallelLinear(name, hidden, width, spec.bias, spec.activation, placement)
        self.down = RowParallelLinear(f"{name}.down_proj", width, hidden, spec.bias, placement)

    @property
    def output(self) -> RowParallelLinear:
        """The linear layer whose partial sums the ranks all-reduce."""
        return self.down

    @property
    def parts(self) -> list[GatedParallelLinear | RowParallelLinear]:
        return [self.gate_up, self.down]

    def __call__(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> Tensor:
        return self.down(self.gate_up(x), residual)

    def unrounded(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return the output without a residual, as `RowParallelLinear.unrounded` returns it."""
        return self.down.unrounded(self.gate_up(x))

    def fuse(self, program: Program, source: Rows, rotary: int, memory: LayerMemory) -> tuple[RowParallelLinear, Rows]:
        """Add the operations on `source` that precede the down projection; return the down projection and its input
        rows."""
        program.multiply(program.take(self, "gate_up", GatedParallelLinear), source, Rows.SCRATCH_1, *GATED_MATMULS)
        program.rows_at_once = MLP_ROWS
        return program.take(self, "down", RowParallelLinear), Rows.SCRATCH_1
