"""Latent attention on one rank, from the projections of queries and of the latent to the output projection.

Always in the absorbed form, for prompts and decodes: each head's query is multiplied by the matrix that would expand
the latent to its keys, so that attention reads the latent itself, and the result by the matrix that would expand the
latent to its values. So a token has the same bits however its prompt is cut into steps. A rank has some of the heads,
and the rows of all tokens. The all-reduce after the output projection is the only communication.
"""

import ctypes
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionSpec, FusedLatentBackend, LayerKV, LayerMemory, LayerStep
from oarlock.workers.kernels.cpu.fused_layer import OperationKind, Rows
from oarlock.workers.kernels.cpu.head_matmul import CppHeadMatmul
from oarlock.workers.kernels.cpu.structures import CHeadGate, CHeadMatmulLayer, CLatentHeads, CLatentPages
from oarlock.workers.layers.attention import gate_with
from oarlock.workers.layers.fused_layer import MATMULS, CannotPrepare, Program
from oarlock.workers.layers.head_matmul import HeadMatmul
from oarlock.workers.layers.latent_attention_spec import LatentAttentionSpec
from oarlock.workers.layers.linear import ColumnParallelLinear, RowParallelLinear
from oarlock.workers.layers.norm import RMSNorm
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.rotary import rotate, rotate_neighbours
from oarlock.workers.layers.sharding import shard_evenly
from oarlock.workers.quantization.fixed_order import FIXED_ORDER, FixedOrderHeadMatmul
from oarlock.workers.quantization.method import StoredRows, WeightShard
from oarlock.workers.weights.source import WeightSource


class LatentMatrices:
    """The two matrices of each head of the rank, in the model's dtype. Most checkpoints store them as one, `kv_b_proj`.

    `keys` multiplies queries [T, heads, nope_width] -> [T, heads, kv_rank]; `values` multiplies results
    [T, heads, kv_rank] -> [T, heads, value_dim].
    """

    def __init__(self, name: str, spec: LatentAttentionSpec, first_head: int, heads: int, placement: Placement) -> None:
        """Describe the matrices of `heads` heads from `first_head` on. `name` is the attention module's name."""
        self.heads, self.nope_width = heads, spec.nope_width
        self.placement = placement

        def shard(module: str, width: int, inputs: int) -> WeightShard:
            rows = StoredRows(f"{name}.{module}", *(count * width for count in (spec.num_heads, first_head, heads)))
            return WeightShard((rows,), inputs, 0, inputs)

        self.weight_shards = [shard(module, *sizes) for module, sizes in spec.head_matrices.items()]

    @property
    def weight_bytes(self) -> int:
        return sum(shard.rows * shard.inputs for shard in self.weight_shards) * self.placement.dtype.itemsize

    def load(self, weights: WeightSource) -> None:
        stored = [
            self.placement.load_dequantized(shard, weights).unflatten(0, (self.heads, -1))
            for shard in self.weight_shards
        ]
        if len(stored) == 1:
            keys, values = stored[0][:, : self.nope_width].transpose(1, 2), stored[0][:, self.nope_width :]
        else:
            keys, values = stored
        kind = FixedOrderHeadMatmul if self.placement.quantization is FIXED_ORDER else HeadMatmul
        self.keys, self.values = kind(keys), kind(values)


class LatentAttention:
    """Projections, norms of latents, rotary embedding, absorption, write of rows, attention, expansion of results,
    output projection; any mix of query lengths."""

    # module in a checkpoint -> attribute
    linear_layers: ClassVar[Mapping[str, str]] = {
        "q_proj": "q", "q_a_proj": "q_a", "q_b_proj": "q", "kv_a_proj_with_mqa": "kv_a", "g_proj": "gate",
        "o_proj": "output",
    }  # fmt: skip
    norms: ClassVar[Mapping[str, str]] = {"q_a_layernorm": "q_norm", "kv_a_layernorm": "kv_norm"}  # likewise

    def __init__(self, name: str, spec: LatentAttentionSpec, layer: int, hidden: int, placement: Placement) -> None:
        tp = placement.tp
        heads = shard_evenly(name, "number of heads", spec.num_heads, tp.size)
        first = tp.rank * heads
        self.placement = placement
        self.sizes = spec
        self.rope = spec.rope
        self.pairs_neighbours = spec.rope is not None and spec.rope.interleaved

        def whole(module: str, rows: int) -> ColumnParallelLinear:
            part = StoredRows(f"{name}.{module}", rows, 0, rows)
            return ColumnParallelLinear((part,), hidden, spec.bias, placement, float32_output=False)

        def of_heads(module: str, width: int, inputs: int) -> ColumnParallelLinear:
            part = StoredRows(f"{name}.{module}", *(count * width for count in (spec.num_heads, first, heads)))
            return ColumnParallelLinear((part,), inputs, False, placement, float32_output=False)

        self.q_a: ColumnParallelLinear | None = None
        self.q_norm: RMSNorm | None = None
        if spec.q_rank is None:
            self.q = of_heads("q_proj", spec.query_width, hidden)
        else:
            self.q_a = whole("q_a_proj", spec.q_rank)
            self.q_norm = RMSNorm(f"{name}.q_a_layernorm", spec.q_rank, spec.eps, placement)
            self.q = of_heads("q_b_proj", spec.query_width, spec.q_rank)
        self.kv_a = whole("kv_a_proj_with_mqa", spec.key_width)
        self.kv_norm = RMSNorm(f"{name}.kv_a_layernorm", spec.kv_rank, spec.eps, placement, factor=spec.latent_factor)
        self.matrices = LatentMatrices(name, spec, first, heads, placement)
        self.gate = of_heads("g_proj", 1, hidden) if spec.output_gate else None
        self.output = RowParallelLinear(f"{name}.o_proj", spec.shared_inputs, hidden, spec.bias, placement)
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=heads,
            num_kv_heads=1,
            head_dim=spec.key_width,
            scale=spec.scale * spec.query_factor,
        )

    @property
    def parts(self) -> list[ColumnParallelLinear | RMSNorm | LatentMatrices | RowParallelLinear]:
        parts = self.q_a, self.q_norm, self.q, self.kv_a, self.kv_norm, self.matrices, self.gate, self.output
        return [part for part in parts if part is not None]

    def __call__(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> Tensor:
        """Return the output for `x` [T, hidden] (normed), plus `residual` if there is one: [T, hidden]."""
        return self.output(self._mixed(x, step), residual)

    def unrounded(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return the output without a residual, as `RowParallelLinear.unrounded` returns it."""
        return self.output.unrounded(self._mixed(x, step))

    def _mixed(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return the results of the rank's heads, before the output projection: [T, H * value_dim]."""
        backend, kv = step.backend, step.kv
        assert backend is not None and kv is not None
        if isinstance(backend, FusedLatentBackend):
            q = self._written(x, step, backend, kv)
        else:
            q, rows = self.queries_and_rows(x, None if self.rope is None else step.angles)
            backend.write(kv, rows, None, step.batch)
        found = backend.attend(q, kv, step.plan, self.spec)  # [T, H * kv_rank]
        mixed = self.matrices.values(found.unflatten(1, (self.spec.num_heads, -1))).flatten(1)
        return mixed if self.gate is None else gate_with(mixed, self.gate(x), "sigmoid")

    def _projected(self, x: Tensor) -> Tensor:
        """Return the queries before absorption: [T, H, nope_width + rope_width]."""
        latent = x if self.q_a is None or self.q_norm is None else self.q_norm(self.q_a(x))
        return self.q(latent).unflatten(1, (self.spec.num_heads, -1))

    def _written(self, x: Tensor, step: LayerStep, backend: FusedLatentBackend, kv: LayerKV) -> Tensor:
        """Return the absorbed queries [T, H, kv_rank + rope_width], and write the rows of the tokens."""
        q, rows = self._projected(x), self.kv_a(x)
        norm, angles = (self.kv_norm.weight, self.kv_norm.eps), None if self.rope is None else step.angles
        queries = backend.norm_rotate_and_write(
            kv, q, rows, norm, angles, step.batch, pairs_neighbours=self.pairs_neighbours
        )
        self.matrices.keys(q[..., : self.sizes.nope_width], out=queries[..., : self.sizes.kv_rank])
        return queries

    def queries_and_rows(self, x: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Return the absorbed queries [T, H, kv_rank + rope_width] and the rows of the tokens
        [T, 1, kv_rank + rope_width], the latent first."""
        q = self._projected(x)
        q_nope, q_rope = q.split([self.sizes.nope_width, self.sizes.rope_width], 2)
        compressed, k_rope = self.kv_a(x).split([self.sizes.kv_rank, self.sizes.rope_width], 1)
        both = torch.cat((q_rope, k_rope.unsqueeze(1)), 1)  # [T, H + 1, rope_width]
        if angles is not None:
            both = (rotate_neighbours if self.pairs_neighbours else rotate)(both, *angles, x.dtype)
        row = torch.cat((self.kv_norm(compressed.contiguous()), both[:, -1]), 1)
        return torch.cat((self.matrices.keys(q_nope), both[:, :-1]), 2), row.unsqueeze(1)

    def fuse(self, program: Program, source: Rows, rotary: int, memory: LayerMemory) -> tuple[RowParallelLinear, Rows]:
        """Add the operations on `source` before the output projection; return the projection and its input rows."""
        pages, sizes, heads = memory.kv, self.sizes, self.spec.num_heads
        assert pages is not None
        latent, q, rows, absorbed = Rows.SCRATCH_1, Rows.SCRATCH_2, Rows.SCRATCH_3, Rows.SCRATCH_0
        gate, found, mixed = latent, q, absorbed  # these buffers are free again
        q_a = program.take_optional(self, "q_a", ColumnParallelLinear)
        if q_a is not None:
            program.multiply(q_a, source, latent, *MATMULS)
            norm = program.norm(program.take(self, "q_norm", RMSNorm))
            program.add(OperationKind.NORM_ROWS, latent, latent, norm, norm.width)
        of_q = program.take(self, "q", ColumnParallelLinear)
        program.multiply(of_q, source if q_a is None else latent, q, *MATMULS)
        program.multiply(program.take(self, "kv_a", ColumnParallelLinear), source, rows, *MATMULS)
        gate_proj = program.take_optional(self, "gate", ColumnParallelLinear)
        if gate_proj is not None:
            program.multiply(gate_proj, source, gate, *MATMULS)
        kv_norm = program.norm(program.take(self, "kv_norm", RMSNorm))
        prepared = CLatentHeads(
            kv_norm.scale, heads, sizes.nope_width, sizes.rope_width, sizes.kv_rank, kv_norm.eps,
            -1 if self.rope is None else rotary, self.pairs_neighbours, rows,
        )  # fmt: skip
        program.add(OperationKind.PREPARE_LATENT, q, absorbed, prepared, heads * sizes.key_width)
        matrices = program.take(self, "matrices", LatentMatrices)
        self._multiply_heads(program, matrices.keys, q, sizes.query_width, absorbed, sizes.key_width)
        layer = CLatentPages(
            ctypes.addressof(program.backend.layer(self.spec)), pages.k.data_ptr(), program.pages, rows
        )
        program.add(OperationKind.ATTEND_LATENT, absorbed, found, layer, heads * sizes.kv_rank)
        self._multiply_heads(program, matrices.values, found, sizes.kv_rank, mixed, sizes.value_dim)
        if gate_proj is not None:
            gates = CHeadGate(heads, sizes.value_dim, False)
            program.add(OperationKind.GATE_HEADS, gate, mixed, gates, heads * sizes.value_dim)
        return program.take(self, "output", RowParallelLinear), mixed

    def _multiply_heads(
        self,
        program: Program,
        matmul: HeadMatmul | FixedOrderHeadMatmul,
        source: Rows,
        width: int,
        target: Rows,
        target_width: int,
    ) -> None:
        """Add `matmul` of heads that are `width` elements apart in the source, and `target_width` in the target."""
        if not isinstance(matmul, HeadMatmul):
            raise CannotPrepare("matrices of heads are multiplied by kernels in Triton")
        kernel = program.take(matmul, "kernel", CppHeadMatmul)
        if kernel.kernels is not program.kernels or kernel.dtype != program.dtype:
            raise CannotPrepare("matrices of heads are packed for other kernels or another type")
        layer = CHeadMatmulLayer(kernel.structure, width, target_width)
        program.add(OperationKind.MULTIPLY_HEADS, source, target, layer, self.spec.num_heads * target_width)
