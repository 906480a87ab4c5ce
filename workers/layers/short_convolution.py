"""The gated short convolution on one rank, from the projection of its input to the output projection.

Channels are divided among ranks; the all-reduce after the output projection is the only communication.
"""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from oarlock.workers.attention.backend import LayerMemory, LayerStep
from oarlock.workers.kernels.cpu.fused_layer import OperationKind, Rows
from oarlock.workers.kernels.cpu.structures import CColumnProduct, CColumns
from oarlock.workers.layers.convolution import ConvolutionWeights
from oarlock.workers.layers.fused_layer import MATMULS, Program
from oarlock.workers.layers.linear import ColumnParallelLinear, RowParallelLinear
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.sharding import shard_evenly
from oarlock.workers.layers.short_convolution_spec import ShortConvolutionSpec
from oarlock.workers.quantization.method import StoredRows


class ShortConvolution:
    """Gated short convolution: `x` [T, hidden] (normed) -> [T, hidden], plus the residual if there is one."""

    # module in a checkpoint -> attribute
    linear_layers: ClassVar[Mapping[str, str]] = {"in_proj": "inputs", "out_proj": "output"}

    def __init__(self, name: str, spec: ShortConvolutionSpec, layer: int, hidden: int, placement: Placement) -> None:
        self.spec = spec
        self.local = local = shard_evenly(name, "number of channels", spec.channels, placement.tp.size)
        bounds = spec.channels, placement.tp.rank * local, local
        parts = tuple(StoredRows(f"{name}.{part}", *bounds) for part in spec.fused["in_proj"])
        self.inputs = ColumnParallelLinear(
            parts, hidden, spec.bias, placement, float32_output=False, fused=f"{name}.in_proj"
        )
        channels = (StoredRows(f"{name}.conv", *bounds),)
        self.conv = ConvolutionWeights(channels, spec.kernel_size, placement, has_bias=spec.bias)
        self.output = RowParallelLinear(f"{name}.out_proj", spec.channels, hidden, spec.bias, placement)

    @property
    def parts(self) -> list[ColumnParallelLinear | ConvolutionWeights | RowParallelLinear]:
        return [self.inputs, self.conv, self.output]

    def __call__(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> Tensor:
        return self.output(self._mixed(x, step), residual)

    def unrounded(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return the output without a residual, as `RowParallelLinear.unrounded` returns it."""
        return self.output.unrounded(self._mixed(x, step))

    def _mixed(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return the gated results of the rank's channels, before the output projection: [T, channels of the rank]."""
        b, c, inputs = self.inputs(x).split(self.local, 1)
        return self.conv(b * inputs, step, silu=False).mul_(c)

    def fuse(self, program: Program, source: Rows, rotary: int, memory: LayerMemory) -> tuple[RowParallelLinear, Rows]:
        """Add the operations on `source` before the output projection; return the projection and its input rows."""
        assert memory.states is not None
        (states,) = memory.states.parts
        local, projected, gated, mixed = self.local, Rows.SCRATCH_1, Rows.SCRATCH_2, Rows.SCRATCH_0
        b, c, inputs = (CColumns(projected, part * local, 3 * local) for part in range(3))
        own = CColumns(mixed, 0, local)
        program.multiply(program.take(self, "inputs", ColumnParallelLinear), source, projected, *MATMULS)
        program.add(OperationKind.MULTIPLY_COLUMNS, projected, gated, CColumnProduct(b, inputs, local), local)
        conv = program.take(self, "conv", ConvolutionWeights)
        program.convolve(conv.weight, conv.bias, states, CColumns(gated, 0, local), mixed, silu=False)
        program.add(OperationKind.MULTIPLY_COLUMNS, mixed, mixed, CColumnProduct(own, c, local), local)
        return program.take(self, "output", RowParallelLinear), mixed
