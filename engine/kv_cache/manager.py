"""KV blocks of one memory group: the blocks that sequences hold in its pool, and those that they no longer read.

Knows block tables, hashes and positions. Does not know the other groups of a model, tensors, bytes, or when a sequence
runs.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from oarlock.engine.kv_cache.block_events import extend_hashes
from oarlock.engine.kv_cache.block_pool import NULL_BLOCK, BlockPool
from oarlock.engine.kv_cache.state_slots import HeldSlots
from oarlock.engine.types import Request
from oarlock.workers.config import window_blocks

TableEntry = tuple[int, int, int, int]  # memory group, row, column, block id


class BlockTable:
    """Blocks of one sequence in one memory group. A column is an index into `block_ids`."""

    __slots__ = ("block_ids", "num_freed")

    def __init__(self) -> None:
        self.block_ids: list[int] = []  # always the same list
        self.num_freed = 0  # leading columns that are the null block, because no later token reads their blocks


@dataclass(frozen=True, slots=True)
class Shortage:
    """Refusal of blocks. While its cause lasts, the prefix cache need not be searched again."""

    floor: int  # retry once the total of released blocks of the pool that was short reaches floor + reserve
    awaited: bytes | None  # also retry once the block with this hash is cached
    short_group: int = 0  # index of the manager whose pool was short
    awaited_group: int = 0  # index of the manager that lacks the awaited block


class BlockHolder(Protocol):
    """Sequence as its memory knows it: its tokens, and the blocks of their keys and values."""

    request: Request
    row: int
    tables: tuple[BlockTable, ...]  # one for each manager
    block_hashes: list[bytes]
    num_cached_blocks: int  # leading columns that were offered to the prefix cache, in all groups
    shortage: Shortage | None
    slots: HeldSlots | None  # of recurrent state; None: the model has none, or the sequence does not run
    checkpoints_at: dict[int, bytes]  # planned checkpoints of its recurrent state: number of tokens -> hash
    awaited_checkpoint: bytes | None

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_skippable_tokens(self) -> int: ...


def hash_at(seq: BlockHolder, column: int, block_size: int) -> bytes:
    """Return the hash of the block of `seq` in `column`, whose tokens are all known."""
    hashes = seq.block_hashes
    if len(hashes) <= column:
        extend_hashes(hashes, seq.token_ids, seq.request.cache_salt, block_size, column + 1)
    return hashes[column]


class KVCacheManager:
    """Blocks of one memory group.

    With a span a query sees only the latest tokens, so a sequence frees the blocks that none of its later tokens reads,
    and the null block replaces them in their columns.
    """

    def __init__(
        self, index: int, number: int, num_blocks: int, block_size: int, span: int | None, max_step_tokens: int
    ) -> None:
        """`index`: position among the managers of a model, and of its tables among those of a sequence. `number`: the
        group in messages. `max_step_tokens`: maximum tokens of one sequence in a step; used with a span only."""
        self.index = index
        self.number = number
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.span = span  # a token attends to itself and the span - 1 tokens before it; None: to all before it
        self.most_held = num_blocks  # maximum blocks that one sequence holds at the same time
        if span is not None:
            self.most_held = window_blocks(span, max_step_tokens, block_size)

    def first_column_read(self, num_computed: int) -> int:
        """Return the first column that the token at position `num_computed`, or any later token, reads."""
        if self.span is None:
            return 0
        return max(0, num_computed - self.span + 1) // self.block_size

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the cached block of each of `hashes`, up to the first that is missing."""
        found: list[int] = []
        for block_hash in hashes:
            block = self.pool.block_of_hash.get(block_hash)
            if block is None:
                break
            found.append(block)
        return found

    def num_needed(self, found: list[int], num_columns: int) -> int:
        """Return the available blocks that a sequence of `num_columns` columns needs, with the prefix `found`."""
        taken = sum(block != NULL_BLOCK and self.pool.refs[block] == 0 for block in found)
        missing = num_columns - len(found)
        return taken + (missing if self.span is None else min(missing, self.most_held))

    def take(self, table: BlockTable, found: list[int]) -> None:
        """Give the empty `table` the cached blocks `found`."""
        for block in found:
            if block != NULL_BLOCK:
                self.pool.hold(block)
        table.block_ids += found
        table.num_freed = self.first_column_read(self.block_size * len(found))

    def free_unread(self, seq: BlockHolder, entries: list[TableEntry]) -> None:
        """Free the blocks that no uncomputed token of `seq` reads, and add the changed table entries to `entries`."""
        table = seq.tables[self.index]
        first = table.num_freed
        columns = range(first, max(first, self.first_column_read(seq.num_computed_tokens)))
        for column in columns:
            self.pool.release(table.block_ids[column])
            table.block_ids[column] = NULL_BLOCK
            entries.append((self.number, seq.row, column, NULL_BLOCK))
        table.num_freed = columns.stop

    def free(self, table: BlockTable) -> None:
        """Free all blocks of `table`. The last blocks are evicted first, so that prefixes stay cached longest."""
        for block in reversed(table.block_ids):
            if block != NULL_BLOCK:
                self.pool.release(block)
        table.block_ids.clear()
        table.num_freed = 0

    def evict(self, seq: BlockHolder, first_column: int) -> None:
        """Remove the blocks of `seq` from `first_column` on from the prefix cache, including blocks that it freed."""
        table = seq.tables[self.index]
        for block in table.block_ids[first_column:]:
            if self.pool.hash_of_block[block] is not None:
                self.pool.unname(block)
        for block_hash in seq.block_hashes[first_column : table.num_freed]:
            self.pool.forget(block_hash)

    def audit(self, holders: Iterable[BlockHolder]) -> None:
        """Raise AssertionError unless the tables of `holders` and the pool agree."""
        counts: Counter[int] = Counter()
        for seq in holders:
            table = seq.tables[self.index]
            freed = table.block_ids[: table.num_freed]
            assert freed == [NULL_BLOCK] * table.num_freed, "a freed block is still in the table"
            counts.update(table.block_ids[table.num_freed :])
        self.pool.audit(counts)
