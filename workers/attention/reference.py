"""Reference attention backend: the textbook formula, one sequence at a time, in float32, on any device.

It is slow. One parametrised test compares every other backend with it.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from oarlock.workers.attention.backend import AttentionSpec, KVSpec, LayerKV
from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.attention.kv_format import dequantized


@dataclass(frozen=True, slots=True)
class Sequence:
    """Query rows `start` to `stop` of one sequence, and the slots of all its tokens in the cache."""

    start: int
    stop: int
    slots: Tensor  # int64 [C]


class ReferenceBackend:
    """Reference backend. Pages have the shape [blocks, block_size, kv_heads, elements of a row]; a slot is an index
    into the first two dimensions taken as one."""

    name: ClassVar[str] = "reference"

    def __init__(self, spec: KVSpec) -> None:
        self.spec = spec

    @staticmethod
    def why_not(spec: KVSpec) -> str | None:
        """Return None for every floating-point dtype of torch, else the reason."""
        return None if spec.dtype.is_floating_point else f"{spec.dtype} is not a floating-point type"

    def allocate(self, num_blocks: int) -> list[LayerKV]:
        spec = self.spec

        def pages(elements: int) -> Tensor:
            shape = (num_blocks, spec.block_size, spec.num_kv_heads, elements)
            return torch.zeros(shape, dtype=spec.kv_format.dtype(spec.dtype), device=spec.device)

        return [LayerKV(pages(spec.key_format.elements), pages(spec.value_elements)) for _ in range(spec.num_layers)]

    def prepare(self, batch: ForwardBatch) -> list[Sequence]:
        size, tables = self.spec.block_size, batch.block_tables[self.spec.group]
        plan = []
        start = 0
        for seq, (query_len, context_len) in enumerate(zip(batch.query_lens, batch.context_lens, strict=True)):
            token = torch.arange(context_len, device=tables.device)
            blocks = tables[batch.rows[seq], token // size].long()
            plan.append(Sequence(start, start + query_len, blocks * size + token % size))
            start += query_len
        return plan

    def write(self, kv: LayerKV, k: Tensor, v: Tensor | None, batch: ForwardBatch) -> None:
        slots = batch.slots[self.spec.group]
        kv.k.flatten(0, 1).index_copy_(0, slots, self.spec.key_format.rounded(k))
        if v is not None:
            kv.v.flatten(0, 1).index_copy_(0, slots, self.spec.kv_format.rounded(v))

    def attend(
        self, q: Tensor, kv: LayerKV, plan: list[Sequence], layer: AttentionSpec, sinks: Tensor | None = None
    ) -> Tensor:
        spec, out = self.spec, q.new_empty((*q.shape[:2], self.spec.value_width))
        for seq in plan:
            slots = seq.slots[_first_seen(seq, layer) :]
            k = spec.key_format.dequantized(kv.k.flatten(0, 1)[slots])  # [C, kv_heads, D]
            if spec.value_in_key:
                v = k[..., : spec.value_width]  # [C, kv_heads, value width]
            else:
                v = dequantized(spec.kv_format, kv.v.flatten(0, 1)[slots])
            out[seq.start : seq.stop] = attend_one(q[seq.start : seq.stop].float(), k, v, layer, sinks).to(q.dtype)
        return out.flatten(1)


def _first_seen(seq: Sequence, layer: AttentionSpec) -> int:
    """Return the first position that a query of `seq` attends to: blocks before it may have been freed and reused."""
    return layer.first_visible(len(seq.slots) - (seq.stop - seq.start))


def attend_one(q: Tensor, k: Tensor, v: Tensor, layer: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
    """Return the attention of `q` [Q, heads, D], at the last Q positions of a context.

    `k` [C, kv_heads, D], `v` [C, kv_heads, V]; the result is [Q, heads, V]. All tensors have the same dtype, here
    float32. `sinks` [heads]: see `AttentionBackend.attend`. With chunks, the first key begins a chunk.
    """
    num_queries_per_kv = layer.num_heads // layer.num_kv_heads
    k = k.repeat_interleave(num_queries_per_kv, dim=1)  # [C, heads, D]   copied for clarity
    v = v.repeat_interleave(num_queries_per_kv, dim=1)
    scores = torch.einsum("qhd,chd->hqc", q, k) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    key = torch.arange(len(k), device=q.device)
    query = key[len(k) - len(q) :, None]
    hidden = (key > query) | (key < layer.first_visible(query))
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, len(q), 1)), dim=-1)  # [heads, Q, C + 1]
    probs = scores.softmax(dim=-1)[:, :, : len(k)]
    return torch.einsum("hqc,chd->qhd", probs, v)
