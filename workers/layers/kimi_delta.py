"""Kimi delta attention on one rank, from the input projections to the output projection.

The all-reduce after the output projection is the only communication: a rank has whole heads. The first of two
projections to decays, or to the output gate, is on every rank.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from oarlock.workers.attention.backend import LayerMemory, LayerStep
from oarlock.workers.kernels.cpu.fused_layer import OperationKind, Rows
from oarlock.workers.kernels.cpu.gemm import Epilogue
from oarlock.workers.kernels.cpu.structures import (
    CColumns,
    CDeltaHeads,
    CGatedNorm,
    CGatedNormLayer,
    CKimiDeltaLayer,
    CKimiGates,
    CPackedWeight,
)
from oarlock.workers.layers.convolution import ConvolutionWeights, ConvolvedLayer
from oarlock.workers.layers.fused_layer import MATMULS, Program
from oarlock.workers.layers.gated_delta import DeltaNorm
from oarlock.workers.layers.kimi_delta_spec import KimiDeltaSpec
from oarlock.workers.layers.linear import ColumnParallelLinear, RowParallelLinear
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.sharding import shard_evenly
from oarlock.workers.quantization.method import StoredRows
from oarlock.workers.recurrent import operations
from oarlock.workers.weights.source import WeightSource


class KimiGates:
    """Decays of the channels of each head of the rank, and rates of writes, from two projections of a token."""

    def __init__(self, name: str, spec: KimiDeltaSpec, placement: Placement) -> None:
        self.name = name
        self.spec = spec
        self.placement = placement
        self.heads = spec.num_heads // placement.tp.size

    @property
    def weight_bytes(self) -> int:
        return 4 * self.heads * (1 + self.spec.head_width)

    def load(self, weights: WeightSource) -> None:
        width, first, device = self.spec.head_width, self.placement.tp.rank * self.heads, self.placement.device
        self.a_log = torch.empty(self.heads, dtype=torch.float32, device=device)
        self.dt_bias = torch.empty((self.heads, width), dtype=torch.float32, device=device)
        before, after = self.spec.axes_around_rates
        rates = self.a_log.view(*(1,) * before, self.heads, *(1,) * after)
        weights.take(f"{self.name}.A_log", rates, shape=self.spec.rates_shape, dim=before, start=first)
        bias = self.dt_bias.view(-1)
        weights.take(f"{self.name}.dt_bias", bias, shape=(self.spec.size,), start=first * width)

    def __call__(self, f: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return (logarithms of decays float32 [T, heads, head width], rates of writes float32 [T, heads]) for `f` [T,
        heads * head width] and `b` [T, heads]."""
        f = f.unflatten(1, (self.heads, -1))
        return operations.kimi_gates(f, b, self.a_log, self.dt_bias, lower_bound=self.spec.lower_bound)

    def fuse(self, program: Program) -> CKimiGates:
        """Return the gates as the kernels read them."""
        a_log, dt_bias = (program.take(self, name, Tensor).data_ptr() for name in ("a_log", "dt_bias"))
        bound = 0.0 if self.spec.lower_bound is None else self.spec.lower_bound
        return CKimiGates(a_log, dt_bias, self.heads, self.spec.head_width, bound)


class KimiDelta(ConvolvedLayer):
    """Projections, convolution, gates, gated delta rule, gated norm, output projection; any mix of query lengths."""

    # module in a checkpoint -> attribute
    linear_layers: ClassVar[Mapping[str, str]] = {
        "qkv_proj": "qkv", "f_a_proj": "f_a", "f_b_proj": "f", "f_proj": "f", "b_proj": "b", "g_a_proj": "g_a",
        "g_b_proj": "g", "g_proj": "g", "o_proj": "output",
    }  # fmt: skip

    def __init__(self, name: str, spec: KimiDeltaSpec, layer: int, hidden: int, placement: Placement) -> None:
        size, rank = placement.tp.size, placement.tp.rank
        self.spec = spec
        self.placement = placement
        self.num_heads = shard_evenly(name, "number of heads", spec.num_heads, size)
        self.size = self.num_heads * spec.head_width  # elements of the rank's queries, keys or values
        # Rounding these few rows would change the decay of the whole state.
        exact = replace(placement, quantization=placement.quantization.of_gates)

        def part(module: str, count: int) -> StoredRows:
            return StoredRows(f"{name}.{module}", count * size, rank * count, count)

        def first(module: str, rows: int | None, where: Placement) -> ColumnParallelLinear | None:
            """Return the first of two projections, all of it."""
            if rows is None:
                return None
            whole = (StoredRows(f"{name}.{module}", rows, 0, rows),)
            return ColumnParallelLinear(whole, hidden, False, where, float32_output=False)

        projections = tuple(part(f"{kind}_proj", self.size) for kind in "qkv")
        self.qkv = ColumnParallelLinear(
            projections, hidden, False, placement, float32_output=False, fused=f"{name}.qkv_proj"
        )
        self.convolution = ConvolutionWeights(
            tuple(part(f"{kind}_conv1d", self.size) for kind in "qkv"),
            *(spec.taps_of_convolution, placement, f"{name}.conv1d"),
        )
        self.f_a = first("f_a_proj", spec.decay_rank, exact)
        decays = part("f_proj" if self.f_a is None else "f_b_proj", self.size)
        self.f = ColumnParallelLinear((decays,), spec.decay_rank or hidden, False, exact)
        self.b = ColumnParallelLinear((part("b_proj", self.num_heads),), hidden, False, exact)
        self.gates = KimiGates(name, spec, placement)
        self.g_a = first("g_a_proj", spec.gate_rank, placement)
        gate = part("g_proj" if self.g_a is None else "g_b_proj", self.size)
        self.g = ColumnParallelLinear((gate,), spec.gate_rank or hidden, False, placement, float32_output=False)
        self.norm = DeltaNorm(
            f"{name}.o_norm", self.num_heads, spec.head_width, spec.eps, placement, gates_by_sigmoid=True
        )
        self.output = RowParallelLinear(f"{name}.o_proj", spec.size, hidden, False, placement)

    @property
    def parts(
        self,
    ) -> list[ColumnParallelLinear | ConvolutionWeights | KimiGates | DeltaNorm | RowParallelLinear]:
        all_parts = [self.qkv, self.convolution, self.f_a, self.f, self.b, self.gates, self.g_a, self.g]
        return [*(part for part in all_parts if part is not None), self.norm, self.output]

    def __call__(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> Tensor:
        """Return the output for `x` [T, hidden] (normed), plus `residual` if there is one: [T, hidden]."""
        return self.output(self._mixed(x, step), residual)

    def unrounded(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return the output without a residual, as `RowParallelLinear.unrounded` returns it."""
        return self.output.unrounded(self._mixed(x, step))

    def _mixed(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return the normed and gated results of the rank's heads: [T, size]."""
        qkv = self.convolve(self.qkv(x), step)
        f = self.f(x if self.f_a is None else self.f_a(x))
        log_decay, beta = self.gates(f, self.b(x))
        mixed = self.recur(qkv, log_decay, beta, step)
        gate = self.g(x if self.g_a is None else self.g_a(x))
        return self.norm(mixed, gate.unflatten(1, (self.num_heads, -1))).flatten(1)

    def recur(self, qkv: Tensor, log_decay: Tensor, beta: Tensor, step: LayerStep) -> Tensor:
        """Return the results of the gated delta rule, and write its state: [T, heads, head width]."""
        assert step.states is not None and step.state_step is not None
        _, states = step.states.parts
        q, k, v = (rows.unflatten(1, (self.num_heads, -1)) for rows in qkv.chunk(3, 1))
        return operations.gated_delta_rule(q, k, v, log_decay, beta, states, step.state_step)

    def fuse(self, program: Program, source: Rows, rotary: int, memory: LayerMemory) -> tuple[RowParallelLinear, Rows]:
        """Add the operations on `source` before the output projection; return the projection and its input rows."""
        assert memory.states is not None
        inputs, states = memory.states.parts
        one, two, three = Rows.SCRATCH_1, Rows.SCRATCH_2, Rows.SCRATCH_3
        program.multiply(program.take(self, "qkv", ColumnParallelLinear), source, one, *MATMULS)
        weight = program.take(self, "convolution", ConvolutionWeights).weight
        program.convolve(weight, None, inputs, CColumns(one, 0, 3 * self.size), two, silu=True)
        decays = self._fuse_projections(program, ("f_a", "f"), source, one, three)
        rates = program.multiply(program.take(self, "b", ColumnParallelLinear), source, one, *MATMULS)
        assert decays.epilogue == rates.epilogue == Epilogue.FLOAT
        heads, width = self.num_heads, self.spec.head_width
        gates = program.take(self, "gates", KimiGates).fuse(program)
        rule = CDeltaHeads(heads, heads, width, width, True)
        layer = CKimiDeltaLayer(rule, gates, states.data_ptr(), three, one)
        program.add(OperationKind.KIMI_DELTA, two, one, layer, self.size)
        self._fuse_projections(program, ("g_a", "g"), source, two, three)
        norm = program.take(self, "norm", DeltaNorm)
        scale = program.take(norm, "weight", Tensor).data_ptr()
        of_heads = CGatedNorm(scale, heads, width, norm.eps, False, 1, heads, 0, True)
        program.add(
            OperationKind.GATED_NORM, one, two, CGatedNormLayer(of_heads, CColumns(three, 0, self.size)), self.size
        )
        return program.take(self, "output", RowParallelLinear), two

    def _fuse_projections(
        self, program: Program, names: tuple[str, str], source: Rows, between: Rows, target: Rows
    ) -> CPackedWeight:
        """Add one matmul, or two with the rows `between`. Return the weight of the last one."""
        first = program.take_optional(self, names[0], ColumnParallelLinear)
        if first is not None:
            program.multiply(first, source, between, *MATMULS)
            source = between
        return program.multiply(program.take(self, names[1], ColumnParallelLinear), source, target, *MATMULS)
