"""The mutations that `faults.py` plants: each a small change of the code that serves, made by a monkeypatch.

Named for what goes wrong. Whatever a mutation needs of the real code it takes before it changes it.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from pytest import MonkeyPatch
from torch import Tensor

from oarlock.workers.attention import reference
from oarlock.workers.attention.backend import KVSpec
from oarlock.workers.attention.reference import ReferenceBackend
from oarlock.workers.layers import attention, embedding, experts, linear
from oarlock.workers.layers.attention import Attention, Sinks
from oarlock.workers.layers.attention_spec import SelfAttentionSpec
from oarlock.workers.layers.decoder_spec import DecoderSpec
from oarlock.workers.layers.embedding import PositionEmbedding, VocabParallelEmbedding, VocabParallelHead
from oarlock.workers.layers.experts import Experts, ExpertStack, Router
from oarlock.workers.layers.linear import RowParallelLinear
from oarlock.workers.layers.rotary import QueryScaleTable, RotaryTable, rotate
from oarlock.workers.model_files.tensor_names import Blocks, TensorNames
from oarlock.workers.quantization.method import DenseWeight, WeightShard
from oarlock.workers.weights.reader import WeightReader

# -- the KV cache


def kv_heads_stored_repeated(patch: MonkeyPatch) -> None:
    """Store KV heads once per query head: numbers stay right, memory does not."""
    allocate, write, attend = ReferenceBackend.allocate, ReferenceBackend.write, ReferenceBackend.attend
    group = 2  # query heads per KV head

    def repeated(spec: KVSpec) -> KVSpec:
        return replace(spec, num_kv_heads=spec.num_kv_heads * group)

    def patched_allocate(self: ReferenceBackend, blocks: int) -> list:
        self.spec = repeated(self.spec)
        return allocate(self, blocks)

    patch.setattr(ReferenceBackend, "allocate", patched_allocate)
    patch.setattr(
        ReferenceBackend,
        "write",
        lambda self, kv, k, v, batch: write(
            self, kv, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), batch
        ),
    )
    patch.setattr(
        ReferenceBackend,
        "attend",
        lambda self, q, kv, plan, layer, *sinks: attend(
            self, q, kv, plan, replace(layer, num_kv_heads=layer.num_kv_heads * group), *sinks
        ),
    )


# -- masks and scores


def _with_attention(patch: MonkeyPatch, change: Callable[..., Any]) -> None:
    """Attend with another `AttentionSpec`."""
    attend_one = reference.attend_one
    patch.setattr(reference, "attend_one", lambda q, k, v, layer, *sinks: attend_one(q, k, v, change(layer), *sinks))


def mask_by_zero_times_infinity(patch: MonkeyPatch) -> None:
    def masked_fill(scores: Tensor, hidden: Tensor, value: float) -> Tensor:
        return scores + hidden.float() * value  # 0 * -inf is NaN

    original = reference.attend_one

    def attend_one(*arguments: Any) -> Tensor:
        with MonkeyPatch.context() as inner:
            inner.setattr(Tensor, "masked_fill", masked_fill)
            return original(*arguments)

    patch.setattr(reference, "attend_one", attend_one)


def future_visible(patch: MonkeyPatch) -> None:
    attend_one = reference.attend_one

    def patched(q: Tensor, k: Tensor, v: Tensor, layer: Any, *sinks: Any) -> Tensor:
        ahead = torch.cat((q, torch.zeros_like(q[:1])))  # every query one place further on
        longer = [torch.cat((x, x[-1:])) for x in (k, v)]
        return attend_one(ahead, *longer, layer, *sinks)[1:]

    patch.setattr(reference, "attend_one", patched)


def window_one_too_long(patch: MonkeyPatch) -> None:
    _with_attention(
        patch,
        lambda layer: (
            layer if layer.sliding_window is None else replace(layer, sliding_window=layer.sliding_window + 1)
        ),
    )


def chunks_one_token_longer(patch: MonkeyPatch) -> None:
    with_init(
        patch,
        Attention,
        "spec",
        lambda layer: layer.spec if layer.spec.chunk is None else replace(layer.spec, chunk=layer.spec.chunk + 1),
    )


def chunks_as_a_window(patch: MonkeyPatch) -> None:
    with_init(patch, Attention, "spec", lambda layer: replace(layer.spec, chunk=None, sliding_window=layer.spec.chunk))


def gate_on_attention_left_out(patch: MonkeyPatch) -> None:
    patch.setattr(attention, "gate_rows", lambda x, gate: x)


def gate_without_its_sigmoid(patch: MonkeyPatch) -> None:
    patch.setattr(attention, "gate_rows", lambda x, gate: x * gate)


def attention_softcap_skipped(patch: MonkeyPatch) -> None:
    _with_attention(patch, lambda layer: replace(layer, softcap=None))


def attention_sinks_dropped(patch: MonkeyPatch) -> None:
    attend_one = reference.attend_one
    patch.setattr(reference, "attend_one", lambda q, k, v, layer, sinks: attend_one(q, k, v, layer))


def sinks_of_the_first_rank(patch: MonkeyPatch) -> None:
    original = Sinks.__init__

    def patched(self: Sinks, *arguments: Any) -> None:
        original(self, *arguments)
        self.shard = replace(self.shard, first_head=0)

    patch.setattr(Sinks, "__init__", patched)


def scale_from_head_dim(patch: MonkeyPatch) -> None:
    with_init(patch, Attention, "spec", lambda layer: replace(layer.spec, scale=layer.head_dim**-0.5))


# -- weights and their cuts


def bias_skipped(patch: MonkeyPatch) -> None:
    original = DenseWeight.matmul
    patch.setattr(DenseWeight, "matmul", lambda self, bias=None, **named: original(self, None, **named))


def _cut_along_the_other_dimension(patch: MonkeyPatch, projection: str) -> None:
    """Cut a square weight along the other dimension, where shapes do not reveal it."""
    take = WeightReader.take

    def patched(self: WeightReader, name: str, into: Tensor, *, shape: Any, dim: int = 0, start: int = 0) -> None:
        if not name.endswith(f"{projection}.weight"):
            return take(self, name, into, shape=shape, dim=dim, start=start)
        other = torch.empty_like(into.t())
        take(self, name, other, shape=shape, dim=1 - dim, start=start)
        into.copy_(other.t())
        return None

    patch.setattr(WeightReader, "take", patched)


def column_parallel_cut_along_the_input(patch: MonkeyPatch) -> None:
    _cut_along_the_other_dimension(patch, "q_proj")


def row_parallel_cut_along_the_output(patch: MonkeyPatch) -> None:
    _cut_along_the_other_dimension(patch, "o_proj")


def _cut_as_one(patch: MonkeyPatch, wanted: str) -> None:
    """A fused tensor in one piece per rank, as if its parts were not each cut apart."""
    apart = WeightShard.sources

    def sources(self: WeightShard, weights: Any, kind: str, into: Tensor) -> list:
        if self.fused is None or not self.fused.endswith(wanted):
            return apart(self, weights, kind, into)
        rank, rows = self.parts[0].first // self.parts[0].count, sum(part.rows for part in self.parts)
        return [(self.fused, rows, rank * len(into), into)]

    patch.setattr(WeightShard, "sources", sources)


def qkv_cut_as_one(patch: MonkeyPatch) -> None:
    _cut_as_one(patch, "qkv_proj")


def gate_and_up_cut_as_one(patch: MonkeyPatch) -> None:
    _cut_as_one(patch, "gate_up_proj")


def row_parallel_bias_on_every_rank(patch: MonkeyPatch) -> None:
    original = RowParallelLinear.load

    def patched(self: RowParallelLinear, weights: Any) -> None:
        original(self, weights)
        if self.bias is not None:
            self.bias *= self.placement.tp.size

    patch.setattr(RowParallelLinear, "load", patched)


def sum_over_ranks_left_out(patch: MonkeyPatch) -> None:
    def call(self: RowParallelLinear, x: Tensor, residual: Tensor | None) -> Tensor:
        self.placement.tp.all_reduce(torch.zeros_like(residual))
        return self.matmul(x) + residual

    patch.setattr(RowParallelLinear, "__call__", call)


# -- experts


def two_experts_change_places(patch: MonkeyPatch) -> None:
    original = ExpertStack.__init__

    def patched(self: ExpertStack, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        if len(self.names) > 1:
            self.names[:2] = self.names[1::-1]

    patch.setattr(ExpertStack, "__init__", patched)


def _with_route(patch: MonkeyPatch, route: Callable[..., tuple[Tensor, Tensor]]) -> None:
    """`route` in place of the router's, which the kernel would not call."""
    patch.setattr(experts, "has_kernel", lambda place: False)
    patch.setattr(experts, "route", route)


def _with_router(patch: MonkeyPatch, **changes: Any) -> None:
    route = experts.route
    _with_route(patch, lambda logits, spec, more: route(logits, replace(spec, **changes), more))


def weights_of_experts_not_normalised(patch: MonkeyPatch) -> None:
    _with_router(patch, normalised=False)


def constant_in_the_sum_of_weights_forgotten(patch: MonkeyPatch) -> None:
    _with_router(patch, added_to_sum=0.0)


def experts_of_all_groups(patch: MonkeyPatch) -> None:
    _with_router(patch, groups=1)


def correction_in_the_weights(patch: MonkeyPatch) -> None:
    route = experts.route

    def patched(logits: Tensor, spec: Any, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        ids, weights = route(logits, replace(spec, normalised=False), correction)
        assert correction is not None
        weights = weights + correction[ids.long()]
        return ids, weights / weights.sum(1, keepdim=True)

    _with_route(patch, patched)


def correction_after_the_scores(patch: MonkeyPatch) -> None:
    _with_router(patch, corrects_logits=False)


def close_experts_left_out(patch: MonkeyPatch) -> None:
    _with_router(patch, tolerance=0.0)


def gate_and_up_of_experts_swapped(patch: MonkeyPatch) -> None:
    original = ExpertStack._shards

    def patched(self: ExpertStack, name: str) -> tuple[WeightShard, WeightShard]:
        gate_up, down = original(self, name)
        return replace(gate_up, parts=gate_up.parts[::-1]), down

    patch.setattr(ExpertStack, "_shards", patched)


def bias_of_the_router_dropped(patch: MonkeyPatch) -> None:
    taken = Router._taken

    def patched(self: Router, weights: Any, name: str, *shape: int) -> Tensor:
        found = taken(self, weights, name, *shape)
        return found.zero_() if name.endswith(".bias") else found

    patch.setattr(Router, "_taken", patched)


def limit_of_activations_ignored(patch: MonkeyPatch) -> None:
    original = ExpertStack.__init__

    def patched(self: ExpertStack, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        self.shape = replace(self.shape, limit=1e6)

    patch.setattr(ExpertStack, "__init__", patched)


def shared_expert_dropped(patch: MonkeyPatch) -> None:
    patch.setattr(Experts, "unrounded", lambda self, x, step: self.sums(x)[0])


# -- KV heads and their query heads


def _with_shards(patch: MonkeyPatch, first_kv_head: Callable[[int, int, int], int]) -> None:
    original = linear.shard_heads

    def patched(layer: str, heads: int, kv_heads: int, rank: int, size: int) -> Any:
        shard = original(layer, heads, kv_heads, rank, size)
        return replace(shard, first_kv_head=first_kv_head(rank, size, kv_heads))

    patch.setattr(linear, "shard_heads", patched)


def replicated_kv_heads_dealt_in_turn(patch: MonkeyPatch) -> None:
    """Rank r holds KV head r % K, but its query heads read r * K // N."""
    _with_shards(patch, lambda rank, size, kv_heads: rank % kv_heads)


def partitioned_kv_heads_shifted(patch: MonkeyPatch) -> None:
    _with_shards(patch, lambda rank, size, kv_heads: (rank + 1) % size * (kv_heads // size))


def query_heads_read_kv_heads_in_turn(patch: MonkeyPatch) -> None:
    """Head h reads h % K, not h // (H / K)."""
    attend_one = reference.attend_one

    def patched(q: Tensor, k: Tensor, v: Tensor, layer: Any, *sinks: Any) -> Tensor:
        times = layer.num_heads // layer.num_kv_heads
        each = replace(layer, num_kv_heads=layer.num_heads)
        return attend_one(q, k.repeat(1, times, 1), v.repeat(1, times, 1), each, *sinks)

    patch.setattr(reference, "attend_one", patched)


# -- rotation


def _with_angles(patch: MonkeyPatch, change: Callable[..., Any]) -> None:
    """Rotate by other positions."""
    original = RotaryTable.__call__
    patch.setattr(RotaryTable, "__call__", lambda self, positions, longest: original(self, *change(positions, longest)))


def rotation_left_out(patch: MonkeyPatch) -> None:
    patch.setattr(attention, "rotate", lambda x, cos, sin, dtype: x.to(dtype))


def rotation_of_neighbours(patch: MonkeyPatch) -> None:
    """Element 2i turns with 2i + 1 (GPT-J), not i with i + D / 2."""

    def patched(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        size = x.shape[-1]
        apart = torch.cat((x[..., 0::2], x[..., 1::2]), -1)
        return rotate(apart, cos, sin, dtype).view(*x.shape[:-1], 2, size // 2).transpose(-1, -2).flatten(-2)

    patch.setattr(attention, "rotate", patched)


def _with_query_scale(patch: MonkeyPatch, change: Callable[[Tensor], Tensor]) -> None:
    """Scale queries as at other positions."""
    original = QueryScaleTable.__call__
    patch.setattr(
        QueryScaleTable, "__call__", lambda self, positions, longest: original(self, change(positions), longest)
    )


def query_scale_left_out(patch: MonkeyPatch) -> None:
    _with_query_scale(patch, torch.zeros_like)


def query_scale_one_token_late(patch: MonkeyPatch) -> None:
    _with_query_scale(patch, lambda positions: (positions - 1).clamp(min=0))


def keys_scaled_too(patch: MonkeyPatch) -> None:
    original = attention.finish_heads

    def patched(x: Tensor, angles: Any, norm: Any, scale: Any, scaled: int, dtype: torch.dtype, **how: Any) -> Tensor:
        return original(x, angles, norm, scale, x.shape[1], dtype, **how)

    patch.setattr(attention, "finish_heads", patched)


def norms_before_the_rotation(patch: MonkeyPatch) -> None:
    with_init(patch, Attention, "norms_last", False)


def norms_of_heads_left_out(patch: MonkeyPatch) -> None:
    with_init(patch, Attention, "norm", None)


def positions_begin_anew_in_each_chunk(patch: MonkeyPatch) -> None:
    _with_angles(patch, lambda positions, longest: (positions - positions.min(), longest))


def sine_of_the_wrong_sign(patch: MonkeyPatch) -> None:
    patch.setattr(attention, "rotate", lambda x, cos, sin, dtype: rotate(x, cos, -sin, dtype))


def whole_head_rotated(patch: MonkeyPatch) -> None:
    """The last rotated element's angle goes on to the end of the head."""

    def patched(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
        half = x.shape[-1] // 2
        wide = [torch.nn.functional.pad(t[..., -t.shape[-1] // 2 :], (0, half - t.shape[-1] // 2)) for t in (cos, sin)]
        return rotate(x, torch.cat((wide[0], wide[0]), -1), torch.cat((-wide[1], wide[1]), -1), dtype)

    patch.setattr(attention, "rotate", patched)


def _with_rope(patch: MonkeyPatch, **changes: Any) -> None:
    original = SelfAttentionSpec.for_length

    def patched(self: SelfAttentionSpec, length: int) -> SelfAttentionSpec:
        found = original(self, length)
        assert found.rope is not None
        return replace(found, rope=replace(found.rope, **changes))

    patch.setattr(SelfAttentionSpec, "for_length", patched)


def scaling_of_rope_ignored(patch: MonkeyPatch) -> None:
    _with_rope(patch, kind="default")


def other_pairs_rotated_too(patch: MonkeyPatch) -> None:
    _with_rope(patch, rotated_pairs=6)


def attention_factor_ignored(patch: MonkeyPatch) -> None:
    _with_rope(patch, attention_factor=1.0)


def short_factors_beyond_their_reach(patch: MonkeyPatch) -> None:
    _with_rope(patch, stretched=False, original_max_positions=1 << 20)


def one_rotary_table_for_all_layers(patch: MonkeyPatch) -> None:
    original = DecoderSpec.for_length

    def patched(self: DecoderSpec, length: int) -> DecoderSpec:
        found = original(self, length)
        (everywhere,) = {layer.attention.rope for layer in found.layers if layer.attention.window is None}
        return found.with_sublayers(
            lambda one: replace(one, rope=everywhere) if isinstance(one, SelfAttentionSpec) else one
        )

    patch.setattr(DecoderSpec, "for_length", patched)


def every_layer_rotated(patch: MonkeyPatch) -> None:
    original = DecoderSpec.for_length

    def patched(self: DecoderSpec, length: int) -> DecoderSpec:
        found = original(self, length)
        rope = next(layer.attention.rope for layer in found.layers if layer.attention.rope is not None)
        return found.with_sublayers(
            lambda one: replace(one, rope=one.rope or rope) if isinstance(one, SelfAttentionSpec) else one
        )

    patch.setattr(DecoderSpec, "for_length", patched)


def rotation_of_halves(patch: MonkeyPatch) -> None:
    """Element i turns with i + D / 2, not 2i with 2i + 1."""
    patch.setattr(attention, "rotate_neighbours", rotate)


# -- the vocabulary


def head_of_the_next_rank(patch: MonkeyPatch) -> None:
    original = embedding.vocab_shard

    def patched(layer: VocabParallelEmbedding | VocabParallelHead) -> WeightShard:
        if isinstance(layer, VocabParallelEmbedding):
            return original(layer)
        here, size = layer.start, layer.placement.tp.size
        layer.start = (layer.placement.tp.rank + 1) % size * layer.local
        shard = original(layer)
        layer.start = here
        return shard

    patch.setattr(embedding, "vocab_shard", patched)


def embedding_adds_foreign_rows(patch: MonkeyPatch) -> None:
    """Every rank looks up every id, its own or not."""

    def rows(self: VocabParallelEmbedding, ids: Tensor) -> Tensor:
        return self.placement.tp.all_reduce(self.look_up((ids - self.start).clamp(0, self.local - 1)))

    patch.setattr(VocabParallelEmbedding, "_rows", rows)


def positions_one_row_late(patch: MonkeyPatch) -> None:
    call = PositionEmbedding.__call__
    patch.setattr(PositionEmbedding, "__call__", lambda self, x, positions: call(self, x, positions + 1))


def positions_added_before_the_sum_over_ranks(patch: MonkeyPatch) -> None:
    """Every rank adds the row of the position to its part of the embedding."""
    call = PositionEmbedding.__call__
    patch.setattr(
        PositionEmbedding,
        "__call__",
        lambda self, x, positions: call(self, x, positions) + (self.placement.tp.size - 1) * self.weight[positions],
    )


def bias_of_the_head_dropped(patch: MonkeyPatch) -> None:
    original = VocabParallelHead.load_bias

    def patched(self: VocabParallelHead, weights: Any) -> None:
        original(self, weights)
        self.bias = None

    patch.setattr(VocabParallelHead, "load_bias", patched)


def bias_of_the_head_of_the_first_rank(patch: MonkeyPatch) -> None:
    original = VocabParallelHead.load_bias

    def patched(self: VocabParallelHead, weights: Any) -> None:
        here, self.start = self.start, 0
        original(self, weights)
        self.start = here

    patch.setattr(VocabParallelHead, "load_bias", patched)


def conv1d_read_as_other_matrices(patch: MonkeyPatch) -> None:
    """A square matrix, whose shape does not show that it is transposed."""
    original = TensorNames.is_transposed
    patch.setattr(
        TensorNames, "is_transposed", lambda self, module: original(self, module) and not module.endswith("o_proj")
    )


def parts_of_heads_taken_as_parts_of_all(patch: MonkeyPatch) -> None:
    """All of q, then all of k, then all of v."""
    original = TensorNames.blocks_of

    def patched(self: TensorNames, module: str) -> Blocks | None:
        found = original(self, module)
        return found and replace(found, rows=tuple(rows * found.groups for rows in found.rows), groups=1)

    patch.setattr(TensorNames, "blocks_of", patched)


def with_init(patch: MonkeyPatch, layer: type, attribute: str, value: Any) -> None:
    original = layer.__init__

    def patched(self: Any, *arguments: Any, **named: Any) -> None:
        original(self, *arguments, **named)
        setattr(self, attribute, value(self) if callable(value) else value)

    patch.setattr(layer, "__init__", patched)


def embedding_scale_forgotten(patch: MonkeyPatch) -> None:
    with_init(patch, VocabParallelEmbedding, "scale", 1.0)


def logit_softcap_skipped(patch: MonkeyPatch) -> None:
    with_init(patch, VocabParallelHead, "softcap", None)


def logit_scale_forgotten(patch: MonkeyPatch) -> None:
    with_init(patch, VocabParallelHead, "scale", 1.0)
