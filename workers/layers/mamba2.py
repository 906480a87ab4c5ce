"""The Mamba 2 sublayer on one rank, from the input projection to the output projection.

A rank has some of the heads, with their groups. The all-reduces are those after the output projection and, if a group
of heads is divided among ranks, of the norm's sums of squares.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from oarlock.workers.attention.backend import LayerMemory, LayerStep
from oarlock.workers.kernels.cpu.fused_layer import OperationKind, Rows
from oarlock.workers.kernels.cpu.structures import (
    CColumns,
    CColumnScale,
    CGatedNorm,
    CGatedNormLayer,
    CMambaHeads,
    CMambaLayer,
)
from oarlock.workers.layers.convolution import ConvolutionWeights, ConvolvedLayer
from oarlock.workers.layers.fused_layer import MATMULS, Program
from oarlock.workers.layers.gated_norm import GatedNorm
from oarlock.workers.layers.linear import ColumnParallelLinear, RowParallelLinear
from oarlock.workers.layers.mamba2_spec import CHANNELS, PROJECTIONS, Mamba2Spec
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.sharding import HeadShard, shard_heads
from oarlock.workers.quantization.method import StoredRows
from oarlock.workers.recurrent import operations
from oarlock.workers.weights.source import WeightSource


def rows_of_rank(name: str, names: tuple[str, ...], cuts: list[tuple[int, int]], shard: HeadShard) -> list[StoredRows]:
    """Return the rank's rows of the modules `names` of the sublayer called `name`.

    `cuts`: the rows of each module, and the number of heads or groups that share them.
    """
    found, heads = [], max(parts for _, parts in cuts)
    of_group = shard.first_kv_head, shard.num_kv_heads
    for part, (rows, parts) in zip(names, cuts, strict=True):
        first, count = (shard.first_head, shard.num_heads) if parts == heads else of_group
        found.append(StoredRows(f"{name}.{part}", rows, rows // parts * first, rows // parts * count))
    return found


class Recurrence:
    """Bias of the time steps, decay and factor of the input of each head of the rank: float32 [heads]."""

    def __init__(self, name: str, spec: Mamba2Spec, shard: HeadShard, placement: Placement) -> None:
        self.name, self.spec = name, spec
        self.shard, self.placement = shard, placement

    @property
    def weight_bytes(self) -> int:
        return 4 * 3 * self.shard.num_heads

    def load(self, weights: WeightSource) -> None:
        self.step_bias, decay, self.skip = (self._taken(weights, name) for name in ("dt_bias", "A_log", "D"))
        self.decay = -torch.exp(decay.double()).float()

    def _taken(self, weights: WeightSource, name: str) -> Tensor:
        into = torch.empty(self.shard.num_heads, dtype=torch.float32, device=self.placement.device)
        weights.take(f"{self.name}.{name}", into, shape=(self.spec.num_heads,), start=self.shard.first_head)
        return into


class Mamba2(ConvolvedLayer):
    """Input projection, convolution, recurrence, gated norm, output projection; any mix of query lengths."""

    # module in a checkpoint -> attribute
    linear_layers: ClassVar[Mapping[str, str]] = {"in_proj": "projection", "out_proj": "output"}

    def __init__(self, name: str, spec: Mamba2Spec, layer: int, hidden: int, placement: Placement) -> None:
        tp = placement.tp
        self.spec, self.placement = spec, placement
        self.shard = shard = shard_heads(f"{name}.in_proj", spec.num_heads, spec.groups, tp.rank, tp.size)
        parts = rows_of_rank(name, PROJECTIONS, list(spec.rows), shard)
        self.projection = ColumnParallelLinear(
            tuple(parts), hidden, spec.projection_bias, placement, float32_output=False, fused=f"{name}.in_proj"
        )
        self.widths = [part.count for part in parts]  # gate, x, B, C and time steps of the rank
        channels = rows_of_rank(name, CHANNELS, list(spec.rows[1:4]), shard)
        self.convolution = ConvolutionWeights(
            channels, spec.window, placement, f"{name}.conv1d", has_bias=spec.conv_bias, scales=spec.scales[1:4]
        )
        self.recurrence = Recurrence(name, spec, shard, placement)
        self.norm = None if spec.eps is None else GatedNorm(name, spec, placement)
        self.output = RowParallelLinear(f"{name}.out_proj", spec.width, hidden, spec.output_bias, placement)

    @property
    def parts(self) -> list[ColumnParallelLinear | ConvolutionWeights | Recurrence | GatedNorm | RowParallelLinear]:
        found = (self.projection, self.convolution, self.recurrence, self.norm, self.output)
        return [part for part in found if part is not None]

    def __call__(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> Tensor:
        """Return the output for `x` [T, hidden] (normed), plus `residual` if there is one: [T, hidden]."""
        return self.output(self._mixed(x, step), residual)

    def unrounded(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return the output without a residual, as `RowParallelLinear.unrounded` returns it."""
        return self.output.unrounded(self._mixed(x, step))

    def _mixed(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return the gated result of the rank's heads, before the output projection: [T, heads * head width]."""
        gate, *rows, dt = self.projection(x).split(self.widths, 1)
        mixed = self.recur(self.convolve(torch.cat(rows, 1), step), dt, step)  # [T, heads, head width]
        gate = gate.unflatten(1, (self.shard.num_heads, -1))
        if self.spec.scales[0] != 1.0:
            gate = (gate.float() * self.spec.scales[0]).to(x.dtype)
        gated = operations.silu_gate(mixed, gate) if self.norm is None else self.norm(mixed, gate)
        return gated.flatten(1)

    def recur(self, rows: Tensor, dt: Tensor, step: LayerStep) -> Tensor:
        """Return the results of the recurrence on x, B and C, and write its state: [T, heads, head width].

        `rows` [T, channels], convolved; `dt` [T, heads], as projected.
        """
        assert step.states is not None and step.state_step is not None
        _, states = step.states.parts
        x, b, c = rows.split(self.widths[1:4], 1)
        b, c = (part.unflatten(1, (self.shard.num_kv_heads, -1)) for part in (b, c))
        own, scale = self.recurrence, self.spec.scales[4]
        steps = operations.mamba_steps(
            dt if scale == 1.0 else dt.float() * scale, own.step_bias, self.spec.least_step, self.spec.most_step
        )
        x = x.unflatten(1, (self.shard.num_heads, -1))
        return operations.mamba2(x, steps, own.decay, b, c, own.skip, states, step.state_step)

    def fuse(self, program: Program, source: Rows, rotary: int, memory: LayerMemory) -> tuple[RowParallelLinear, Rows]:
        """Add the operations on `source` before the output projection; return the projection and its input rows."""
        assert memory.states is not None
        inputs, states = memory.states.parts
        projected, convolved, mixed = Rows.SCRATCH_1, Rows.SCRATCH_0, Rows.SCRATCH_2
        width, stride, steps = self.widths[0], sum(self.widths), self.widths[4]
        program.multiply(program.take(self, "projection", ColumnParallelLinear), source, projected, *MATMULS)
        weights = program.take(self, "convolution", ConvolutionWeights)
        program.convolve(weights.weight, weights.bias, inputs, CColumns(projected, width, stride), convolved, silu=True)
        own, heads = program.take(self, "recurrence", Recurrence), self.shard.num_heads
        step_bias, decay, skip = (program.take(own, name, Tensor).data_ptr() for name in ("step_bias", "decay", "skip"))
        layer = CMambaLayer(
            CMambaHeads(decay, skip, heads, self.shard.num_kv_heads, self.spec.head_dim, states.shape[3]),
            states.data_ptr(), step_bias, self.spec.least_step, self.spec.most_step, self.spec.scales[4],
            CColumns(projected, stride - steps, stride),
        )  # fmt: skip
        program.add(OperationKind.MAMBA2, convolved, mixed, layer, width)
        gate = CColumns(projected, 0, stride)
        if self.spec.scales[0] != 1.0:
            scale = CColumnScale(gate, width, self.spec.scales[0])
            program.add(OperationKind.SCALE_COLUMNS, projected, projected, scale, 0)
        norm = program.take_optional(self, "norm", GatedNorm)
        plain = CGatedNorm(None, heads, self.spec.head_dim, 0.0, False, 1, heads, 0)
        gated = CGatedNormLayer(plain if norm is None else norm.fuse(program), gate)
        program.add(OperationKind.GATED_NORM, mixed, convolved, gated, width)
        return program.take(self, "output", RowParallelLinear), convolved
