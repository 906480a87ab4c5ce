"""Memory that a sublayer needs for each sequence: pages of keys and values, or slots of recurrent state. Torch-free.

A memory group is the set of sublayers of a model whose memory has the same shape and, if it is pages, the same window.
Pages grow with the sequence; a slot has one size and holds the state after some number of tokens.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from oarlock.workers.layers.sharding import kv_heads_of_rank
from oarlock.workers.platform.dtypes import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class PagesSpec:
    """Keys and values of each token. Counts are over all ranks."""

    kv_heads: int
    key_width: int  # values of one head's key
    value_width: int  # values of one head's value
    span: int | None = None  # latest tokens that hold all keys which a query sees; None: it may see any token before it
    of_layer: int | None = None  # layer whose pages are read, by a sublayer that has no own keys and values
    is_copied: bool = False  # every rank holds all heads; False: ranks divide them
    value_in_key: bool = False  # the value is the first `value_width` elements of the key, which are stored once

    @property
    def stored_width(self) -> int:
        """Values of one head's key and value together."""
        return self.key_width + (0 if self.value_in_key else self.value_width)

    def heads_of_rank(self, size: int) -> int:
        """Return the number of key-value heads whose keys and values each of `size` ranks stores."""
        return self.kv_heads if self.is_copied else kv_heads_of_rank(self.kv_heads, size)


@dataclass(frozen=True, slots=True)
class StatePart:
    """One tensor of a slot: [rows, *row_shape]. Counts are over all ranks."""

    name: str
    rows: int  # heads or channels that are divided among ranks
    row_shape: tuple[int, ...]
    copied_rows: int = 0  # further rows, in `copies` equal parts: ranks divide whole parts, and each has at least one
    copies: int = 1
    is_float32: bool = True  # otherwise it has the dtype of the model

    def shape_of_rank(self, size: int) -> tuple[int, ...]:
        """Return the shape on each of `size` ranks."""
        copied = self.copied_rows // self.copies * max(1, self.copies // size)
        return (self.rows // size + copied, *self.row_shape)

    def bytes_of_rank(self, size: int, dtype: str) -> int:
        """Return the bytes on each of `size` ranks for a model of `dtype`."""
        return math.prod(self.shape_of_rank(size)) * ITEM_BYTES["float32" if self.is_float32 else dtype]


@dataclass(frozen=True, slots=True)
class SlotsSpec:
    """Recurrent state of a sequence after some number of its tokens."""

    parts: tuple[StatePart, ...]

    def bytes_of_rank(self, size: int, dtype: str) -> int:
        """Return the bytes of one slot in one layer, on each of `size` ranks."""
        return sum(part.bytes_of_rank(size, dtype) for part in self.parts)


MemorySpec = PagesSpec | SlotsSpec


class MemoryGroup(NamedTuple):
    """The layers of a model whose memory has one shape."""

    memory: MemorySpec  # `of_layer` is None
    layers: tuple[int, ...]  # layers with own memory, in ascending order


def memory_groups(needs: Iterable[tuple[int, MemorySpec]]) -> tuple[MemoryGroup, ...]:
    """Return the groups of `needs`, pairs of a layer and its memory, in the order of their first use.

    A layer may have one sublayer with pages and one with slots. A sublayer that reads another layer's pages adds none.
    """
    found: dict[MemorySpec, list[int]] = {}
    for layer, memory in needs:
        shared = isinstance(memory, PagesSpec) and memory.of_layer is not None
        key = replace(memory, of_layer=None) if isinstance(memory, PagesSpec) else memory
        layers = found.setdefault(key, [])
        if not shared:
            layers.append(layer)
    return tuple(MemoryGroup(memory, tuple(layers)) for memory, layers in found.items())
