"""The gated delta net on one rank, from the input projections to the output projection.

The all-reduce after the output projection is the only communication: a rank has whole key heads with their value heads.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from oarlock.workers.attention.backend import LayerMemory, LayerStep
from oarlock.workers.kernels.cpu.fused_layer import OperationKind, Rows
from oarlock.workers.kernels.cpu.gemm import Epilogue
from oarlock.workers.kernels.cpu.structures import CColumns, CDeltaHeads, CDeltaLayer, CGatedNorm, CGatedNormLayer
from oarlock.workers.layers.convolution import ConvolutionWeights, ConvolvedLayer
from oarlock.workers.layers.fused_layer import MATMULS, Program
from oarlock.workers.layers.gated_delta_spec import GatedDeltaSpec
from oarlock.workers.layers.linear import ColumnParallelLinear, RowParallelLinear
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.sharding import shard_evenly
from oarlock.workers.quantization.method import StoredRows
from oarlock.workers.recurrent import operations
from oarlock.workers.weights.source import WeightSource


class DeltaGates:
    """Decay and rate of writes of each value head of the rank, from the projections `a` and `b` of a token."""

    def __init__(self, name: str, heads: StoredRows, placement: Placement, *, doubles_beta: bool) -> None:
        """Describe the gates. `heads`: the rank's part of all value heads."""
        self.name = name
        self.heads = heads
        self.placement = placement
        self.beta_scale = 2.0 if doubles_beta else 1.0

    @property
    def weight_bytes(self) -> int:
        return 2 * 4 * self.heads.count

    def load(self, weights: WeightSource) -> None:
        both = torch.empty((2, self.heads.count), dtype=torch.float32, device=self.placement.device)
        for index, kind in enumerate(("A_log", "dt_bias")):
            shape, first = (self.heads.rows,), self.heads.first
            weights.take(f"{self.name}.{kind}", both[index], shape=shape, start=first)
        self.a_log, self.dt_bias = both  # each float32 [heads]

    def __call__(self, b_and_a: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logarithm of the decay, rate of writes) for `b_and_a` [T, 2 * heads]: each float32 [T, heads]."""
        b, a = b_and_a.chunk(2, 1)
        return operations.delta_gates(a, b, self.a_log, self.dt_bias, beta_scale=self.beta_scale)


class DeltaNorm:
    """Scale of the norm of each value head of the rank: `weight` float32 [heads, width] after loading."""

    def __init__(
        self,
        name: str,
        heads: int,
        width: int,
        eps: float,
        placement: Placement,
        *,
        gates_by_sigmoid: bool = False,
    ) -> None:
        """Describe the norm. `gates_by_sigmoid`: results are multiplied by the sigmoid of the gate, not by its SiLU."""
        self.name = name
        self.heads, self.width = heads, width
        self.eps = eps
        self.placement = placement
        self.gates_by_sigmoid = gates_by_sigmoid

    @property
    def weight_bytes(self) -> int:
        return 4 * self.heads * self.width

    def load(self, weights: WeightSource) -> None:
        one = torch.empty(self.width, dtype=torch.float32, device=self.placement.device)
        weights.take(f"{self.name}.weight", one, shape=(self.width,))
        self.weight = one.expand(self.heads, -1).contiguous()

    def __call__(self, x: Tensor, gate: Tensor) -> Tensor:
        """Return the norm of `x` [T, heads, width] over each head, gated by `gate`, in the dtype of `x`."""
        sigmoid = self.gates_by_sigmoid
        return operations.gated_norm(x, gate, self.weight, self.eps, gates_first=False, sigmoid=sigmoid)


class GatedDelta(ConvolvedLayer):
    """Projections, convolution, gates, gated delta rule, gated norm, output projection; any mix of query lengths."""

    # module in a checkpoint -> attribute
    linear_layers: ClassVar[Mapping[str, str]] = {
        "in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_ba": "b_and_a", "out_proj": "output",
    }  # fmt: skip

    def __init__(self, name: str, spec: GatedDeltaSpec, layer: int, hidden: int, placement: Placement) -> None:
        size, rank = placement.tp.size, placement.tp.rank
        self.spec = spec
        self.placement = placement
        self.num_key_heads = shard_evenly(name, "number of key heads", spec.num_key_heads, size)
        self.num_value_heads = shard_evenly(name, "number of value heads", spec.num_value_heads, size)
        self.key_size = self.num_key_heads * spec.key_width
        self.value_size = self.num_value_heads * spec.value_width

        def part(module: str, count: int) -> StoredRows:
            return StoredRows(f"{name}.{module}", count * size, rank * count, count)

        sizes = {"q": self.key_size, "k": self.key_size, "v": self.value_size}
        projections = tuple(part(f"in_proj_{kind}", count) for kind, count in sizes.items())
        convolutions = tuple(part(f"{kind}_conv1d", count) for kind, count in sizes.items())
        self.qkv = ColumnParallelLinear(
            projections, hidden, False, placement, float32_output=False, fused=f"{name}.in_proj_qkv"
        )
        self.z = ColumnParallelLinear(
            (part("in_proj_z", self.value_size),), hidden, False, placement, float32_output=False
        )
        # Rounding these few rows would change the decay of the whole state.
        exact = replace(placement, quantization=placement.quantization.of_gates)
        gates = part("in_proj_b", self.num_value_heads), part("in_proj_a", self.num_value_heads)
        self.b_and_a = ColumnParallelLinear(gates, hidden, False, exact, fused=f"{name}.in_proj_ba")
        self.convolution = ConvolutionWeights(convolutions, spec.taps_of_convolution, placement, fused=f"{name}.conv1d")
        self.gates = DeltaGates(name, part("A_log", self.num_value_heads), placement, doubles_beta=spec.doubles_beta)
        self.norm = DeltaNorm(f"{name}.norm", self.num_value_heads, spec.value_width, spec.eps, placement)
        self.output = RowParallelLinear(f"{name}.out_proj", spec.value_size, hidden, False, placement)

    @property
    def parts(
        self,
    ) -> list[ColumnParallelLinear | ConvolutionWeights | DeltaGates | DeltaNorm | RowParallelLinear]:
        return [self.qkv, self.z, self.b_and_a, self.convolution, self.gates, self.norm, self.output]

    def __call__(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> Tensor:
        """Return the output for `x` [T, hidden] (normed), plus `residual` if there is one: [T, hidden]."""
        return self.output(self._mixed(x, step), residual)

    def unrounded(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return the output without a residual, as `RowParallelLinear.unrounded` returns it."""
        return self.output.unrounded(self._mixed(x, step))

    def _mixed(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return the normed and gated results of the rank's heads: [T, value size]."""
        z = self.z(x).unflatten(1, (self.num_value_heads, -1))
        log_decay, beta = self.gates(self.b_and_a(x))
        mixed = self.recur(self.convolve(self.qkv(x), step), log_decay, beta, step)
        return self.norm(mixed, z).flatten(1)

    def recur(self, qkv: Tensor, log_decay: Tensor, beta: Tensor, step: LayerStep) -> Tensor:
        """Return the results of the gated delta rule, and write its state: [T, value heads, value width]."""
        assert step.states is not None and step.state_step is not None
        _, states = step.states.parts
        q, k, v = qkv.split([self.key_size, self.key_size, self.value_size], 1)
        q, k = (rows.unflatten(1, (self.num_key_heads, -1)) for rows in (q, k))
        v = v.unflatten(1, (self.num_value_heads, -1))
        return operations.gated_delta_rule(q, k, v, log_decay, beta, states, step.state_step)

    def fuse(self, program: Program, source: Rows, rotary: int, memory: LayerMemory) -> tuple[RowParallelLinear, Rows]:
        """Add the operations on `source` before the output projection; return the projection and its input rows."""
        assert memory.states is not None
        inputs, states = memory.states.parts
        qkv, z, gates, mixed = Rows.SCRATCH_1, Rows.SCRATCH_2, Rows.SCRATCH_3, Rows.SCRATCH_0
        program.multiply(program.take(self, "qkv", ColumnParallelLinear), source, qkv, *MATMULS)
        program.multiply(program.take(self, "z", ColumnParallelLinear), source, z, *MATMULS)
        b_and_a = program.multiply(program.take(self, "b_and_a", ColumnParallelLinear), source, gates, *MATMULS)
        assert b_and_a.epilogue == Epilogue.FLOAT
        channels, width = 2 * self.key_size + self.value_size, self.spec.value_width
        weight = program.take(self, "convolution", ConvolutionWeights).weight
        program.convolve(weight, None, inputs, CColumns(qkv, 0, channels), mixed, silu=True)
        own, heads = program.take(self, "gates", DeltaGates), self.num_value_heads
        layer = CDeltaLayer(
            CDeltaHeads(self.num_key_heads, heads, self.spec.key_width, width), states.data_ptr(),
            program.take(own, "a_log", Tensor).data_ptr(), program.take(own, "dt_bias", Tensor).data_ptr(),
            own.beta_scale, gates,
        )  # fmt: skip
        program.add(OperationKind.GATED_DELTA, mixed, qkv, layer, self.value_size)
        norm = program.take(self, "norm", DeltaNorm)
        scale = program.take(norm, "weight", Tensor).data_ptr()
        of_heads = CGatedNorm(scale, heads, width, norm.eps, False, 1, heads, 0)
        gated = CGatedNormLayer(of_heads, CColumns(z, 0, self.value_size))
        program.add(OperationKind.GATED_NORM, qkv, mixed, gated, self.value_size)
        return program.take(self, "output", RowParallelLinear), mixed
