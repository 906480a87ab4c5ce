"""Interface of attention backends, and the descriptions of the KV cache and of a layer that backends work from."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from oarlock.workers.attention.forward_batch import ForwardBatch
from oarlock.workers.attention.kv_format import FORMATS, ROUNDED, KeyFormat, KVFormat
from oarlock.workers.platform.dtypes import KVShape
from oarlock.workers.recurrent.states import LayerStates, StateStep


@dataclass(frozen=True, slots=True)
class KVSpec:
    """The pages of one memory group on one rank. Its KV heads are the rank's own, and are not repeated for each query
    head."""

    num_layers: int  # layers with own pages
    num_kv_heads: int  # local to the rank
    head_dim: int  # values of one head's key
    block_size: int
    dtype: torch.dtype  # dtype of the model
    device: torch.device
    cache_dtype: str = "auto"  # a name of `FORMATS`; auto: `dtype`
    fixed_span: int | None = None  # keys per program if rows must not depend on the batch; None: chosen for each step
    value_dim: int | None = None  # values of one head's value; None: `head_dim`
    value_in_key: bool = False  # the value is the first `value_width` elements of the key, which are stored once
    group: int = 0  # number of the memory group, a key of `ForwardBatch.slots` and `ForwardBatch.block_tables`

    @property
    def value_width(self) -> int:
        """Values of one head's value, and of its result."""
        return self.head_dim if self.value_dim is None else self.value_dim

    @property
    def kv_format(self) -> KVFormat:
        return FORMATS[self.cache_dtype]

    @property
    def key_format(self) -> KeyFormat:
        """Format of a stored key."""
        return KeyFormat(self.kv_format, self.shape.key_parts)

    @property
    def value_elements(self) -> int:
        """Number of elements of a stored value; 0 if the key contains it."""
        return 0 if self.value_in_key else self.kv_format.elements(self.value_width)

    @property
    def is_rounded(self) -> bool:
        """Whether pages hold quantized values."""
        return self.cache_dtype in ROUNDED

    @property
    def shape(self) -> KVShape:
        """Sizes that determine the bytes of this KV cache."""
        item = self.dtype.itemsize
        sizes = self.num_layers, self.num_kv_heads, self.head_dim, self.block_size
        return KVShape(*sizes, item, self.cache_dtype, self.value_dim, self.value_in_key)

    @property
    def bytes_per_token(self) -> int:
        return self.shape.bytes_per_token

    @property
    def bytes_per_block(self) -> int:
        return self.shape.bytes_per_block


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
    chunk: int | None = None  # a query sees the tokens of its own chunk of this many tokens, up to itself

    def first_visible(self, position: Any) -> Any:
        """Return the first position that a query at `position` sees: an integer, or an array or tensor of them."""
        if self.chunk is not None:
            return position - position % self.chunk
        if self.sliding_window is None:
            return position * 0
        first = position - self.sliding_window + 1
        return first * (first > 0)


@dataclass(slots=True)
class LayerKV:
    """One layer's pages of keys and values, in the layout of the backend that allocated them."""

    k: Tensor
    v: Tensor  # has pages without elements if keys contain the values


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """One layer's memory of sequences: pages, perhaps of another layer, and states in slots."""

    kv: LayerKV | None = None
    states: LayerStates | None = None


class AttentionBackend(Protocol):
    """Causal attention over the pages of one memory group. One call accepts any mix of query lengths: prefill, chunked
    prefill and decode."""

    name: ClassVar[str]
    spec: KVSpec

    def __init__(self, spec: KVSpec) -> None: ...

    @staticmethod
    def why_not(spec: KVSpec) -> str | None:
        """Return None if this backend supports `spec` here, else the reason as a phrase for the log."""

    def allocate(self, num_blocks: int) -> list[LayerKV]:
        """Return zeroed pages for every layer with own pages, including block 0 (the null block)."""

    def prepare(self, batch: ForwardBatch) -> Any:
        """Compute everything that does not depend on the layer. Called once per step, before the layers."""

    def write(self, kv: LayerKV, k: Tensor, v: Tensor | None, batch: ForwardBatch) -> None:
        """Store `k` [T, num_kv_heads, head_dim] and `v` [T, num_kv_heads, value_width] at the group's `batch.slots`.

        `v` is None if, and only if, keys contain the values (`KVSpec.value_in_key`).

        A block is filled from its first slot on, so a write to this slot invalidates the previous content of the block.
        """

    def attend(self, q: Tensor, kv: LayerKV, plan: Any, layer: AttentionSpec, sinks: Tensor | None = None) -> Tensor:
        """Return the attention of `q` [T, num_heads, head_dim]: [T, num_heads * value_width].

        `sinks`: float32 [num_heads], one extra score per head that joins the scores of the keys after the softcap. It
        has no value vector, so it only takes a share of the softmax.

        Called after `write` for the whole step: a sequence may read blocks that another sequence fills in this step. If
        a layer has a window or chunks, block tables hold the null block in place of blocks before the first visible
        key, which may have been freed; the contents of the null block must not change any result.
        """


@runtime_checkable
class FusedBackend(AttentionBackend, Protocol):
    """A backend with one kernel for the operations between the projection and `attend`."""

    def rotate_and_write(
        self,
        kv: LayerKV,
        qkv: Tensor,
        norm: tuple[Tensor, float] | None,
        cos: Tensor,
        sin: Tensor,
        batch: ForwardBatch,
        *,
        norms_last: bool = False,
        pairs_neighbours: bool = False,
        query_scale: Tensor | None = None,
    ) -> Tensor:
        """Rotate queries and keys, and write keys and values to the cache; return the queries, [T, heads, head_dim].

        `qkv`: [T, heads + 2 kv_heads, head_dim]. `norm`: scale of the head norm, float32 [heads + kv_heads, head_dim],
        and its epsilon. `cos`, `sin`: float32 [T, 1, rotary_dim], for the rotated elements; see `RotaryTable`.
        `norms_last`: heads are normed after the rotation. `pairs_neighbours`: neighbouring elements are rotated.
        `query_scale`: float32 [T], factors of the queries.
        """
        ...

    def stored_keys(self, kv: LayerKV, batch: ForwardBatch) -> Tensor:
        """Return the keys of the step's tokens as the pages hold them, which are not rounded: [T, num_kv_heads,
        head_dim]. A verification compares them."""
        ...


@runtime_checkable
class FusedLatentBackend(AttentionBackend, Protocol):
    """A backend with one kernel for the operations of latent attention between its projections and `attend`, except
    for the matmul of the queries."""

    def norm_rotate_and_write(
        self,
        kv: LayerKV,
        q: Tensor,
        rows: Tensor,
        norm: tuple[Tensor, float],
        angles: tuple[Tensor, Tensor] | None,
        batch: ForwardBatch,
        *,
        pairs_neighbours: bool,
    ) -> Tensor:
        """Norm the latents of `rows`, rotate their other elements, and write them to the cache. Return queries
        [T, H, head_dim] of which the elements after the first `value_width` are written: the last of `q`, rotated.

        `q`: [T, H, width], projected. `rows`: [T, head_dim], projected. `norm`: scale of the latents' norm
        [value_width], and its epsilon. `angles`: cos and sin, as in `FusedBackend`; None: nothing is rotated.
        `pairs_neighbours`: neighbouring elements are rotated.
        """
        ...

    def stored_keys(self, kv: LayerKV, batch: ForwardBatch) -> Tensor:
        """Return the rows of the step's tokens as `FusedBackend` does: [T, 1, head_dim]."""
        ...


@runtime_checkable
class CapturableBackend(AttentionBackend, Protocol):
    """A backend whose work for a step can be independent of values on the host."""

    def prepare_decode(self, batch: ForwardBatch) -> Any:
        """Return a plan for steps of one token per sequence, with contexts of up to `context_lens`. The plan stays
        valid while the tensors of `batch` change."""

    def prepare_prompts(self, batch: ForwardBatch, most: int) -> Any:
        """Return a plan as `prepare_decode` does, for queries of any lengths in `query_start_loc`. At most `most` of
        them are longer than one token."""


def is_capturable(backends: Mapping[int, AttentionBackend]) -> bool:
    """Return whether all attention of a model can run in graphs, whose lengths the host does not know."""
    return all(isinstance(backend, CapturableBackend) for backend in backends.values())


@dataclass(frozen=True, slots=True)
class LayerStep:
    """One layer's part of a step."""

    angles: tuple[Tensor, Tensor] | None  # cos and sin of its positions (`RotaryTable`); None: no rotation
    batch: ForwardBatch
    kv: LayerKV | None  # None, as the next two: the layer has no attention
    backend: AttentionBackend | None
    plan: Any  # result of the backend's `prepare` for this step
    query_scale: Tensor | None = None  # float32 [T]: factors of the queries (`QueryScaleTable`); None: none
    states: LayerStates | None = None  # None: the layer has no recurrent state
    layer_input: Tensor | None = None  # [T, width]: the layer's own input of each token (`LayerInputs`); None: none

    @property
    def state_step(self) -> StateStep | None:
        """The slots that the step reads and writes; None if the model has no recurrent layers."""
        return self.batch.state
