"""What an attention backend must offer, and the two small descriptions it works from."""

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from workers.attention.forward_batch import ForwardBatch


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The KV memory of one rank. KV heads are this rank's own, never repeated to query heads."""

    num_layers: int
    num_kv_heads: int  # local to the rank
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        return self.bytes_per_token * self.block_size


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention on one rank. Query head h reads KV head h // (num_heads // num_kv_heads)."""

    layer: int
    num_heads: int  # local to the rank
    num_kv_heads: int  # local to the rank
    head_dim: int
    scale: float
    sliding_window: int | None = None  # a query sees itself and the window - 1 tokens before it
    softcap: float | None = None


@dataclass(slots=True)
class LayerKV:
    """One layer's pages; the backend that allocated them is the only one that knows their layout."""

    k: Tensor
    v: Tensor


class AttentionBackend(Protocol):
    """Any mix of query lengths in one call: prefill, chunked prefill and decode take the same path. Causal always."""

    name: ClassVar[str]

    def __init__(self, spec: KVSpec) -> None: ...

    @staticmethod
    def why_not(spec: KVSpec) -> str | None:
        """None when this backend can serve; else one sentence for the log."""

    def allocate(self, num_blocks: int) -> list[LayerKV]:
        """Zeroed pages for every layer, block 0 (the null block) included."""

    def prepare(self, batch: ForwardBatch) -> Any:
        """Once per step, outside the layer loop: everything that does not depend on the layer."""

    def write(self, kv: LayerKV, k: Tensor, v: Tensor, batch: ForwardBatch) -> None:
        """Store `k`, `v` [T, num_kv_heads, head_dim] at `batch.slot_mapping`.

        A block is filled from its first slot on: writing that slot says that whatever else the block held is over.
        """

    def attend(self, q: Tensor, kv: LayerKV, plan: Any, layer: AttentionSpec) -> Tensor:
        """`q` [T, num_heads, head_dim] -> [T, num_heads * head_dim].

        Called after `write` of the whole step: a sequence may read blocks that another one fills in this step. Blocks
        outside the window of every query may be given to others: the null block stands in their columns, and what it
        holds must change no result.
        """
