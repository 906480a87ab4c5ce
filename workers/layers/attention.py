"""The attention sublayer on one rank, from the q, k and v projections to the output projection.

The all-reduce after the output projection is the only communication. The backend owns the pages and their layout.
"""

import ctypes
from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.attention.backend import (
    AttentionBackend,
    AttentionSpec,
    FusedBackend,
    LayerKV,
    LayerMemory,
    LayerStep,
)
from oarlock.workers.kernels.cpu import elementwise
from oarlock.workers.kernels.cpu.fused_layer import OperationKind, Rows
from oarlock.workers.kernels.cpu.structures import (
    CClamp,
    CColumns,
    CColumnScale,
    CHeadColumns,
    CHeadGate,
    CHeadsAndPages,
)
from oarlock.workers.kernels.triton import availability
from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.fused_layer import MATMULS, CannotPrepare, Program
from oarlock.workers.layers.linear import ColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from oarlock.workers.layers.norm import HeadNorm, RowNorm, triton_kernels
from oarlock.workers.layers.placement import Placement
from oarlock.workers.layers.rotary import finish_heads, rotate, rotate_neighbours
from oarlock.workers.layers.sharding import HeadShard
from oarlock.workers.quantization.method import StoredRows
from oarlock.workers.weights.source import WeightSource


class Sinks:
    """Learned scores of the rank's query heads that belong to no key: float32 [heads of the rank]."""

    def __init__(self, name: str, num_heads: int, shard: HeadShard, placement: Placement) -> None:
        """Describe this rank's shard. `name` is the attention module's name; `num_heads` counts heads over all
        ranks."""
        self.name = f"{name}.sinks"
        self.num_heads = num_heads
        self.shard = shard
        self.placement = placement

    @property
    def weight_bytes(self) -> int:
        return 4 * self.shard.num_heads

    def load(self, weights: WeightSource) -> None:
        self.weight = torch.empty(self.shard.num_heads, dtype=torch.float32, device=self.placement.device)
        weights.take(self.name, self.weight, shape=(self.num_heads,), start=self.shard.first_head)


class Attention:
    """Projections, head norm, rotary embedding, KV write, attention, output projection; any mix of query lengths."""

    # module in a checkpoint -> attribute
    linear_layers: ClassVar[Mapping[str, str]] = {"qkv_proj": "qkv", "gate_proj": "gate", "o_proj": "output"}

    def __init__(self, name: str, spec: SelfAttentionSpec, layer: int, hidden: int, placement: Placement) -> None:
        self.placement = placement
        self.head_dim = spec.head_dim
        self.rope = spec.rope
        self.clip_qkv = spec.clip_qkv
        self.value_width = spec.value_width
        self.keys_are_values = spec.keys_are_values and spec.has_keys
        self.has_keys = spec.has_keys  # False: another layer's keys and values are read
        self.qkv = QKVParallelLinear(
            name, hidden, spec.head_dim, spec.num_heads, spec.num_kv_heads, spec.qkv_bias, placement,
            value_dim=spec.value_dim, has_keys=spec.has_keys, has_values=not spec.keys_are_values,
        )  # fmt: skip
        shard = self.qkv.shard
        self.output = RowParallelLinear(f"{name}.o_proj", spec.shared_inputs, hidden, spec.o_bias, placement)
        self.norm: HeadNorm | RowNorm | None = None
        if spec.qk_norm is not None and spec.norms_rows:
            heads = spec.num_heads, spec.num_kv_heads
            self.norm = RowNorm(name, shard, heads, spec.head_dim, spec.qk_norm, placement)
        elif spec.qk_norm is not None:
            self.norm = HeadNorm(
                name,
                shard.num_heads,
                shard.num_kv_heads if spec.has_keys else 0,
                spec.head_dim,
                spec.qk_norm.eps,
                placement,
                spec.qk_norm.offset,
                is_stored=spec.qk_norm.weight,
            )
        assert not (spec.norms_rows and spec.norms_after_rotation), "no kernel norms rows after the rotation"
        assert spec.has_keys or not spec.norms_rows, "no kernel norms rows of queries only"
        self.norms_last = spec.norms_after_rotation
        self.pairs_neighbours = spec.rope is not None and spec.rope.interleaved
        self.gate: ColumnParallelLinear | None = None
        if spec.output_gate:
            bounds = spec.num_heads, shard.first_head, shard.num_heads
            of_head = spec.num_gates // spec.num_heads
            self.num_gates = of_head * shard.num_heads
            rows = StoredRows(f"{name}.gate_proj", *(heads * of_head for heads in bounds))
            self.gate = ColumnParallelLinear((rows,), hidden, False, placement, float32_output=False)
        self.has_usual_gate = not spec.gate_per_head and spec.gate_activation == "sigmoid"
        self.gate_activation = spec.gate_activation
        self.sinks = Sinks(name, spec.num_heads, shard, placement) if spec.sinks else None
        self.value_norm: HeadNorm | None = None
        if spec.norms_values and spec.has_keys:
            assert spec.qk_norm is not None, "values are normed like keys"
            sizes = 0, shard.num_kv_heads, spec.value_width, spec.qk_norm.eps
            self.value_norm = HeadNorm(name, *sizes, placement, is_stored=False)
        self.value_scale = spec.value_scale
        self.spec = AttentionSpec(
            layer=layer,
            num_heads=shard.num_heads,
            num_kv_heads=shard.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.scale * spec.key_scale,
            sliding_window=spec.window,
            softcap=spec.softcap,
            chunk=spec.chunk,
        )

    @property
    def parts(self) -> list[QKVParallelLinear | ColumnParallelLinear | RowParallelLinear | HeadNorm | RowNorm | Sinks]:
        parts = self.qkv, self.norm, self.value_norm, self.gate, self.sinks, self.output
        return [part for part in parts if part is not None]

    def __call__(self, x: Tensor, residual: Tensor | None, step: LayerStep) -> Tensor:
        """Return the output for `x` [T, hidden] (normed), plus `residual` if there is one: [T, hidden]."""
        return self.output(self._mixed(x, step), residual)

    def unrounded(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return the output without a residual, as `RowParallelLinear.unrounded` returns it."""
        return self.output.unrounded(self._mixed(x, step))

    def _mixed(self, x: Tensor, step: LayerStep) -> Tensor:
        """Return the attention output of the rank's heads, before the output projection: [T, H * value width]."""
        backend, kv = step.backend, step.kv
        assert backend is not None and kv is not None
        qkv = self.qkv(x)
        if self.clip_qkv is not None:
            qkv.clamp_(-self.clip_qkv, self.clip_qkv)
        if self.keys_are_values:
            qkv = torch.cat((qkv, qkv[:, self.spec.num_heads * self.head_dim :]), 1)
        if self.changes_values:
            self._change_values(qkv)
        q = self._written(qkv, step, backend, kv)  # [T, H, D]
        mixed = backend.attend(q, kv, step.plan, self.spec, None if self.sinks is None else self.sinks.weight)
        if self.gate is None:
            return mixed
        gate = self.gate(x)
        return gate_rows(mixed, gate) if self.has_usual_gate else gate_with(mixed, gate, self.gate_activation)

    @property
    def changes_values(self) -> bool:
        """Whether values are normed or scaled after their projection."""
        return self.value_norm is not None or (self.has_keys and self.value_scale != 1.0)

    @property
    def first_value(self) -> int:
        """Column of the first value among the projections."""
        return (self.spec.num_heads + (self.spec.num_kv_heads if self.has_keys else 0)) * self.head_dim

    @property
    def value_columns(self) -> int:
        """Number of columns of values among the projections."""
        return self.spec.num_kv_heads * self.value_width if self.has_keys else 0

    def _change_values(self, qkv: Tensor) -> None:
        """Norm and scale the values among the projections `qkv`, in place."""
        values = qkv[:, self.first_value :].unflatten(1, (-1, self.value_width))
        if self.value_norm is not None:
            values.copy_(self.value_norm(values))
        if self.value_scale != 1.0:
            values.mul_(self.value_scale)

    def _written(self, qkv: Tensor, step: LayerStep, backend: AttentionBackend, kv: LayerKV) -> Tensor:
        """Return the queries [T, H, D] of the projections `qkv`, and write the keys and values, if there are any."""
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads if self.has_keys else 0
        angles = None if self.rope is None else step.angles
        is_fused = not isinstance(self.norm, RowNorm) and angles is not None and isinstance(backend, FusedBackend)
        if self.has_keys and self.value_width == self.head_dim:
            qkv = qkv.view(len(qkv), heads + 2 * kv_heads, self.head_dim)
        if is_fused and self.has_keys:
            norm = None if self.norm is None else (self.norm.weight, self.norm.eps)
            return backend.rotate_and_write(
                kv, qkv, norm, *angles, step.batch, norms_last=self.norms_last,
                pairs_neighbours=self.pairs_neighbours, query_scale=step.query_scale,
            )  # fmt: skip
        columns = (heads + kv_heads) * self.head_dim
        if qkv.dim() == 3:
            qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        else:
            qk = qkv[:, :columns].unflatten(1, (heads + kv_heads, self.head_dim))
            v = qkv[:, columns:].unflatten(1, (-1, self.value_width)) if self.has_keys else None
        qk = self._prepared(qk, angles, step.query_scale, qkv.dtype)  # [T, H + K, D]
        if v is not None:
            backend.write(kv, qk[:, heads:], v, step.batch)
        return qk[:, :heads]

    def _prepared(
        self, qk: Tensor, angles: tuple[Tensor, Tensor] | None, scale: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Return queries and keys [T, H + K, D] as attention reads them: normed, rotated and scaled, in `dtype`."""
        last = None
        if isinstance(self.norm, HeadNorm) and self.norms_last:
            last = (self.norm.weight, self.norm.eps)
        elif self.norm is not None:
            qk = self.norm(qk)
        if last is not None or scale is not None:
            heads = self.spec.num_heads
            return finish_heads(qk, angles, last, scale, heads, dtype, pairs_neighbours=self.pairs_neighbours)
        if angles is None:
            return qk.to(dtype)
        return (rotate_neighbours if self.pairs_neighbours else rotate)(qk, *angles, dtype)

    def fuse(self, program: Program, source: Rows, rotary: int, memory: LayerMemory) -> tuple[RowParallelLinear, Rows]:
        """Add the operations on `source` before the output projection; return the projection and its input rows."""
        if self.keys_are_values:
            raise CannotPrepare("keys are copied to values by torch")
        pages = memory.kv
        assert pages is not None
        qkv, mixed, gate = Rows.SCRATCH_1, Rows.SCRATCH_0, Rows.SCRATCH_2
        program.multiply(program.take(self, "qkv", QKVParallelLinear), source, qkv, *MATMULS)
        if self.clip_qkv is not None:
            columns = self.first_value + self.value_columns
            program.add(OperationKind.CLAMP_ROWS, qkv, qkv, CClamp(columns, self.clip_qkv), columns)
        if self.changes_values:
            self._fuse_values(program, qkv)
        gate_proj = program.take_optional(self, "gate", ColumnParallelLinear)
        if gate_proj is not None:
            program.multiply(gate_proj, source, gate, *MATMULS)
        norm = program.take_optional(self, "norm", HeadNorm, RowNorm)
        if norm is not None and not norm.has_kernel:
            raise CannotPrepare("norms of heads are computed by torch")
        row_heads = norm.rank_heads if isinstance(norm, RowNorm) else None
        if row_heads is not None and self.placement.tp.size > 1 and self.placement.tp.group_for_kernels is None:
            raise CannotPrepare("no kernel all-reduces the squares of the row norm")
        sinks = program.take_optional(self, "sinks", Sinks)
        heads = CHeadsAndPages(
            ctypes.addressof(program.backend.layer(self.spec)),
            None if norm is None else program.take(norm, "weight", Tensor).data_ptr(),
            pages.k.data_ptr(),
            pages.v.data_ptr(),
            rotary,
            self.pairs_neighbours,
            0.0 if norm is None else norm.eps,
            None if row_heads is None else program.keep(row_heads),
            None if sinks is None else program.take(sinks, "weight", Tensor).data_ptr(),
            self.norms_last,
            program.query_scale,
            program.pages,
            self.has_keys,
        )
        width = self.spec.num_heads * self.value_width
        if norm is not None or rotary >= 0 or program.query_scale >= 0:
            program.add(OperationKind.APPLY_ROPE, qkv, qkv, heads, 0)
        program.add(OperationKind.ATTEND, qkv, mixed, heads, width)
        if gate_proj is not None and self.has_usual_gate:
            program.add(OperationKind.GATE_ROWS, gate, mixed, heads, width)
        elif gate_proj is not None:
            of_head = CHeadGate(self.num_gates, width // self.num_gates, self.gate_activation == "softplus")
            program.add(OperationKind.GATE_HEADS, gate, mixed, of_head, width)
        return program.take(self, "output", RowParallelLinear), mixed

    def _fuse_values(self, program: Program, qkv: Rows) -> None:
        """Add the operations of `_change_values` on the projections `qkv`."""
        columns = CColumns(qkv, self.first_value, self.first_value + self.value_columns)
        norm = program.take_optional(self, "value_norm", HeadNorm)
        if norm is not None:
            if not norm.has_kernel:
                raise CannotPrepare("norms of heads are computed by torch")
            weight = program.take(norm, "weight", Tensor).data_ptr()
            heads = CHeadColumns(columns, weight, self.spec.num_kv_heads, self.value_width, norm.eps)
            program.add(OperationKind.NORM_HEADS, qkv, qkv, heads, 0)
        if self.value_scale != 1.0:
            scale = CColumnScale(columns, self.value_columns, self.value_scale)
            program.add(OperationKind.SCALE_COLUMNS, qkv, qkv, scale, 0)


def gate_rows(x: Tensor, gate: Tensor) -> Tensor:
    """Return `x` times the sigmoid of `gate`, both [T, columns], in the dtype of `x`. May overwrite `x`."""
    if elementwise.can_serve(x.dtype, x.device):
        return elementwise.gate_rows(x, gate)
    if availability.can_serve(x.device):
        return triton_kernels().gate_rows(x, gate)
    return (x.float() * torch.sigmoid(gate.double()).float()).to(x.dtype)


def gate_with(x: Tensor, gate: Tensor, activation: str) -> Tensor:
    """Return `x` [T, columns] times the sigmoid or softplus of `gate` [T, gates], each of which is for as many
    consecutive columns, in the dtype of `x`."""
    function = {"sigmoid": torch.sigmoid, "softplus": F.softplus}[activation]
    factors = function(gate.double()).float().unsqueeze(2)  # double, as the bits of a row depend on nothing else
    return (x.unflatten(1, (gate.shape[1], -1)).float() * factors).flatten(1).to(x.dtype)
