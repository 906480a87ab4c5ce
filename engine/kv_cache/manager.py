"""Pool of KV blocks: which sequences hold which blocks, the prefix cache over full blocks, and eviction.

Knows block ids and token ids. Does not know tensors, bytes, or when a sequence runs.

A block is in exactly one of three states: *held* (reference count > 0), *cached* (reference count 0, but its content
can be found by its hash) or *free* (its content is meaningless). Block 0 is the null block and has no state.

The hash of a block is chained over the salt and every token up to the block's end: equal hashes mean equal content, and
anyone can compute the hashes of a prompt's blocks from its tokens and salt. A block is stored when its computation is
scheduled. If a step is withdrawn or refused, the blocks that it was to fill are removed. At any time, replaying all
events so far in order gives exactly the hashes by which a new request could find a block.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, Protocol

from oarlock.engine.kv_cache.offload import KVOffload
from oarlock.engine.types import Request

HASH_BYTES = 32


class BlockStored(NamedTuple):
    """A full block can now be found by its hash. It could not be found before."""

    block_hash: bytes
    parent_hash: bytes | None  # hash of the previous block in the sequence, even if no longer cached; None: the first
    token_ids: Sequence[int]  # tokens of exactly one block
    cache_salt: bytes


class BlockRemoved(NamedTuple):
    """The block that was found by this hash cannot be found any more."""

    block_hash: bytes


class AllBlocksCleared(NamedTuple):
    """No block can be found any more."""


BlockEvent = BlockStored | BlockRemoved | AllBlocksCleared


class BlockEventLog:
    """Events in the order of the steps, kept until they are taken."""

    __slots__ = ("_events",)

    def __init__(self) -> None:
        self._events: list[BlockEvent] = []

    def append(self, event: BlockEvent) -> None:
        self._events.append(event)

    def take(self) -> list[BlockEvent]:
        """Take the events since the last call."""
        events, self._events = self._events, []
        return events


class BlockChanges(NamedTuple):
    """Net change of a run of events. `is_cleared` applies first; no hash is in both lists."""

    is_cleared: bool
    stored: Sequence[bytes]
    removed: Sequence[bytes]

    @staticmethod
    def of(events: Iterable[BlockEvent]) -> "BlockChanges":
        is_cleared, is_there = False, dict[bytes, bool]()
        for event in events:
            if isinstance(event, AllBlocksCleared):
                is_cleared, is_there = True, {}
            else:
                is_there[event.block_hash] = isinstance(event, BlockStored)
        stored = [block_hash for block_hash, there in is_there.items() if there]
        return BlockChanges(is_cleared, stored, [block_hash for block_hash, there in is_there.items() if not there])


def extend_hashes(
    hashes: list[bytes], token_ids: Sequence[int], cache_salt: bytes, block_size: int, num_blocks: int
) -> None:
    """Extend `hashes`, which has the hashes of the first blocks of `token_ids`, to `num_blocks`. All blocks must be
    full.

    The hash is blake2b(hash of the previous block, token ids as int32); the hash of the salt precedes the first block.
    """
    while len(hashes) < num_blocks:
        parent = hashes[-1] if hashes else blake2b(cache_salt, digest_size=HASH_BYTES).digest()
        start = len(hashes) * block_size
        tokens = array("i", token_ids[start : start + block_size]).tobytes()
        hashes.append(blake2b(parent + tokens, digest_size=HASH_BYTES).digest())


NULL_BLOCK = 0


@dataclass(frozen=True, slots=True)
class Shortage:
    """Refusal of blocks by the KV cache manager, which need not search again while the cause lasts."""

    floor: int  # retry once the manager's total of released blocks reaches floor + reserve
    awaited: bytes | None  # also retry once the block with this hash is cached


class BlockHolder(Protocol):
    """Sequence as the manager knows it: its tokens, and the blocks of their keys and values."""

    request: Request
    block_ids: list[int]
    num_freed_blocks: int  # leading entries of `block_ids` that are the null block
    block_hashes: list[bytes]
    num_cached_blocks: int
    shortage: Shortage | None

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def num_skippable_tokens(self) -> int: ...


class KVCacheManager:
    """Allocator of KV blocks by reference counts, with a prefix cache that evicts the least recently freed block.

    A column is an index into a sequence's block table. If all layers have a sliding window, a sequence frees the blocks
    that none of its later tokens reads, and the null block replaces them in their columns.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        sliding_window: int | None = None,  # a token attends to itself and the window - 1 tokens before it
        max_step_tokens: int = 0,  # maximum tokens of one sequence in a step; used with a window only
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has nothing to allocate: block 0 is the null block")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.sliding_window = sliding_window
        self._max_step_tokens = max_step_tokens
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently freed first
        self.num_available = num_blocks - 1  # free blocks, and cached blocks, which can be allocated by eviction
        self.event_log: BlockEventLog | None = None  # gets every change of the prefix cache
        # A chained hash of 256 bits covers the salt and every token up to the block's end: equal hashes, equal content.
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block: list[bytes | None] = [None] * num_blocks  # None: cannot be found
        self.offload: KVOffload | None = None  # tiers that keep blocks outside the pool
        self._num_released = 0  # total number of times that a block became available

    @property
    def num_total(self) -> int:
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_total - self.num_available

    def states(self, stride: int) -> str:
        """Return `h`, `c` or `f` for every `stride`-th block, from the first on: held, cached or free."""
        pairs = zip(self._refs[1::stride], self._hash_of_block[1::stride], strict=True)
        return "".join(["h" if refs else "f" if block_hash is None else "c" for refs, block_hash in pairs])

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def get_computed_blocks(self, seq: BlockHolder, max_tokens: int) -> list[int]:
        """Return the blocks of the longest cached prefix of at most `max_tokens` tokens. Changes nothing.

        At least one token is always left to compute: a step must produce the logits that follow the prompt.
        """
        found: list[int] = []
        if not self.enable_prefix_caching:
            return found
        length = seen = 0  # columns of the prefix; consecutive hits up to here
        for column in range(min(max_tokens, seq.num_tokens - 1) // self.block_size):
            block = self._block_of_hash.get(self._hash_at(seq, column))
            if block is None and self.sliding_window is None:
                break
            seen = 0 if block is None else seen + 1
            found.append(NULL_BLOCK if block is None else block)
            # A hash covers all tokens before it, so blocks outside the window may be missing.
            if block is not None and seen >= column + 1 - self._first_column_in_window(self.block_size * (column + 1)):
                length = column + 1
        del found[length:]
        unread = self._first_column_in_window(self.block_size * length)
        found[:unread] = [NULL_BLOCK] * unread
        return found

    def missing_hashes(self, seq: BlockHolder) -> tuple[int, Iterator[bytes]]:
        """Return the first column of `seq` that the prefix cache lacks, and the hashes of its blocks from there on that
        could be loaded instead of computed."""
        most = min(seq.num_skippable_tokens, seq.num_tokens - 1) // self.block_size
        first = len(self.get_computed_blocks(seq, seq.num_skippable_tokens))
        return first, (self._hash_at(seq, column) for column in range(first, most))

    def can_allocate(self, seq: BlockHolder, reserve: int) -> bool:
        """Return False if an earlier refusal is still valid, so that `allocate` would refuse `seq` again."""
        known = seq.shortage
        return known is None or known.floor + reserve <= self._num_released or known.awaited in self._block_of_hash

    def allocate(self, seq: BlockHolder, max_tokens: int, reserve: int) -> int | None:
        """Give `seq`, which has no blocks, its longest cached prefix of at most `max_tokens` tokens, and blocks for all
        its other tokens; return the prefix's length in tokens. Returns None and changes nothing unless `reserve` blocks
        would be left.

        With a window only the prefix is given, and `allocate_slots` gives the other blocks as they are computed. But
        the number of blocks that it can hold at once must be available.

        A refusal is remembered in `seq.shortage`. Returns None also if host memory has more of the prefix than one step
        may load. The next step then loads a part into the prefix cache, and the caller should try again.
        """
        assert not seq.block_ids
        if not self.can_allocate(seq, reserve):
            return None
        found = self.get_computed_blocks(seq, max_tokens)
        taken = sum(block != NULL_BLOCK and self._refs[block] == 0 for block in found)
        missing = self.blocks_for(seq.num_tokens) - len(found)
        if self.sliding_window is not None:
            missing = min(missing, self.blocks_for(self.sliding_window + self._max_step_tokens) + 1)
        short = taken + missing - self.num_available
        if short + reserve > 0:
            # Blocks of the prefix that other sequences hold cost nothing. Their number grows only if available blocks
            # are allocated, or new blocks cached. So each release lowers `short` by at most one.
            column = len(found)
            may_grow = column < min(max_tokens, seq.num_tokens - 1) // self.block_size
            awaited = self._hash_at(seq, column) if may_grow and self.enable_prefix_caching else None
            seq.shortage = Shortage(short + self._num_released, awaited)
            return None
        seq.shortage = None
        columns = range(len(found), min(max_tokens, seq.num_tokens - 1) // self.block_size)
        # Held before blocks are allocated, so that blocks evicted for them are saved to other slots.
        slots = [] if self.offload is None else self.offload.pin(self._hash_at(seq, column) for column in columns)
        if self.offload is not None and len(slots) > self.offload.num_loads_left:
            self._load_some(self.offload, seq, found, slots)
            return None
        for block in found:
            if block != NULL_BLOCK:
                if self._refs[block] == 0:
                    del self._cached[block]
                    self.num_available -= 1
                    if self.offload is not None:
                        self.offload.save_reused(block, self._hash_of_block[block])
                self._refs[block] += 1
        seq.block_ids += found
        seq.num_cached_blocks = len(found)
        seq.num_freed_blocks = self._first_column_in_window(self.block_size * len(found))
        if self.sliding_window is not None:
            return len(found) * self.block_size
        self.allocate_slots(seq, seq.num_tokens)
        for column, slot in zip(columns, slots, strict=False):
            assert self.offload is not None
            self.offload.load(slot, seq.block_ids[column])
        num_cached = (len(found) + len(slots)) * self.block_size
        self.cache_blocks(seq, num_cached)
        return num_cached

    def _load_some(self, offload: KVOffload, seq: BlockHolder, found: list[int], slots: list[int]) -> None:
        """Load `slots` into the prefix cache, up to the limit of the next step. They are blocks of `seq`, which holds
        none, after the blocks `found` in the cache. No sequence holds them, but they are evicted last."""
        room, own = offload.num_loads_left, [block for block in found if self._refs[block] == 0]
        for block in own:
            del self._cached[block]
        self.num_available -= len(own)
        for column, slot in enumerate(slots[:room], len(found)):
            block_hash = self._hash_at(seq, column)
            if block_hash in self._block_of_hash:  # it follows a block that was evicted
                offload.unpin([slot])
                continue
            block = self._allocate_block()
            offload.load(slot, block)
            self._name(seq, column, block, block_hash)
            own.append(block)
        offload.unpin(slots[room:])
        for block in reversed(own):
            self._refs[block] = 0
            self._cached[block] = None
        self.num_available += len(own)

    def allocate_slots(self, seq: BlockHolder, num_tokens: int) -> list[int] | None:
        """Give `seq` blocks for `num_tokens` tokens in all. Returns the new blocks; None, without a change, if too few
        are available."""
        missing = self.blocks_for(num_tokens) - len(seq.block_ids)
        if missing > self.num_available:
            return None
        new = [self._allocate_block() for _ in range(missing)]
        seq.block_ids += new
        return new

    def allocate_next(self, seq: BlockHolder) -> int:
        """Give `seq` an available block, and return it."""
        block = self._allocate_block()
        seq.block_ids.append(block)
        return block

    def allocate_up_to(self, seq: BlockHolder, num_tokens: int, reserve: int) -> int:
        """Give `seq` blocks for `num_tokens` tokens in all, or for fewer so that `reserve` blocks stay available.
        Return the number of tokens."""
        spare = max(0, self.num_available - reserve)
        num_tokens = min(num_tokens, (len(seq.block_ids) + spare) * self.block_size)
        self.allocate_slots(seq, num_tokens)
        return num_tokens

    def free_out_of_window(self, seq: BlockHolder) -> range:
        """Free the blocks that no uncomputed token of `seq` reads, and replace them by the null block. Return their
        columns."""
        first = seq.num_freed_blocks
        columns = range(first, max(first, self._first_column_in_window(seq.num_computed_tokens)))
        for column in columns:
            self._release(seq.block_ids[column])
            seq.block_ids[column] = NULL_BLOCK
        seq.num_freed_blocks = columns.stop
        return columns

    def cache_blocks(self, seq: BlockHolder, num_tokens: int) -> None:
        """Put the full blocks of the first `num_tokens` tokens of `seq` into the prefix cache. They are not written
        again.

        Within a layer, ranks write the keys and values of the whole step before they read any. So blocks are cached as
        soon as the step that fills them is decided, and can be shared within that step.
        """
        if not self.enable_prefix_caching:
            return
        for column in range(seq.num_cached_blocks, num_tokens // self.block_size):
            # Two sequences may compute the same content at the same time. The first one's block remains in the cache.
            block_hash = self._hash_at(seq, column)
            if block_hash not in self._block_of_hash:
                self._name(seq, column, seq.block_ids[column], block_hash)
            seq.num_cached_blocks = column + 1

    def free(self, seq: BlockHolder) -> None:
        """Free all blocks of `seq`. Its last blocks are evicted first, so that prefixes stay cached longest."""
        for block in reversed(seq.block_ids):
            if block != NULL_BLOCK:
                self._release(block)
        seq.block_ids.clear()
        seq.num_cached_blocks = seq.num_freed_blocks = 0

    def evict_blocks(self, seq: BlockHolder, first_column: int = 0) -> None:
        """Remove the blocks of `seq` from `first_column` on from the prefix cache, including blocks that it freed
        because they were outside its window. Sequences that hold them keep them."""
        for block in seq.block_ids[first_column:]:
            if self._hash_of_block[block] is not None:
                self._uncache(block)
        for block_hash in seq.block_hashes[first_column : seq.num_freed_blocks]:
            block = self._block_of_hash.get(block_hash)
            if block is not None:
                self._forget(block)
        if self.offload is not None:
            self.offload.forget(seq.block_hashes[first_column:])

    def uncache(self, seq: BlockHolder, start: int, end: int) -> None:
        """Remove blocks from the prefix cache whose tokens, from `start` to `end` (exclusive) of `seq`, were not
        computed after all, even if `seq` has ended since. Sequences that hold such blocks keep them."""
        columns = slice(start // self.block_size, end // self.block_size)
        for block_hash in seq.block_hashes[columns]:
            block = self._block_of_hash.get(block_hash)
            if block is not None:
                self._forget(block)
        if self.offload is not None:
            self.offload.forget(seq.block_hashes[columns])
        seq.num_cached_blocks = min(seq.num_cached_blocks, columns.start)

    def holds_window(self, seq: BlockHolder) -> bool:
        """Return whether `seq` still holds every block that its next token reads."""
        return seq.num_freed_blocks <= self._first_column_in_window(seq.num_computed_tokens)

    def cached_blocks(self) -> list[tuple[int, bytes]]:
        """Return the cached blocks that no sequence holds, with their hashes: most recently used first, each prefix
        before its continuation."""
        return [(block, block_hash) for block in reversed(self._cached) if (block_hash := self._hash_of_block[block])]

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache; return the number of blocks in it. Sequences that hold such blocks keep them. Blocks
        in host memory are forgotten as well; files stay."""
        if self.offload is not None:
            self.offload.host.forget_all()
        num_blocks = len(self._block_of_hash)
        for block in self._block_of_hash.values():
            self._hash_of_block[block] = None
        self._block_of_hash.clear()
        self._free.update(self._cached)
        self._cached.clear()
        if self.event_log is not None:
            self.event_log.append(AllBlocksCleared())
        return num_blocks

    def audit(self, holders: Iterable[BlockHolder]) -> None:
        """Raise AssertionError unless every block is in exactly one state and every count is right."""
        counts: Counter[int] = Counter()
        for seq in holders:
            freed = seq.block_ids[: seq.num_freed_blocks]
            assert freed == [NULL_BLOCK] * seq.num_freed_blocks, "a freed block is still in the table"
            counts.update(seq.block_ids[seq.num_freed_blocks :])
        assert NULL_BLOCK not in counts, "the null block was allocated"
        for block in range(1, self.num_blocks):
            states = (block in self._free) + (block in self._cached) + (self._refs[block] > 0)
            assert states == 1, f"block {block} is in {states} states"
            assert counts[block] == self._refs[block], (
                f"block {block}: {counts[block]} holders, {self._refs[block]} counted"
            )
            block_hash = self._hash_of_block[block]
            assert block_hash is None or self._block_of_hash.get(block_hash) == block, f"block {block} cannot be found"
            assert block not in self._cached or block_hash is not None, f"block {block} is cached without a hash"
            assert block not in self._free or block_hash is None, f"block {block} is free but can be found"
        assert NULL_BLOCK not in self._free and NULL_BLOCK not in self._cached
        assert self.num_available == len(self._free) + len(self._cached), "available blocks are counted wrongly"
        assert len(self._block_of_hash) == sum(value is not None for value in self._hash_of_block), (
            "a hash leads nowhere"
        )
        assert self.num_free + self.num_cached + self.num_held == self.num_total

    def _first_column_in_window(self, num_computed: int) -> int:
        """Return the first column that the token at position `num_computed`, or any later token, reads."""
        if self.sliding_window is None:
            return 0
        return max(0, num_computed - self.sliding_window + 1) // self.block_size

    def _allocate_block(self) -> int:
        if self._free:
            block, _ = self._free.popitem(last=False)
        else:
            block, _ = self._cached.popitem(last=False)
            block_hash = self._hash_of_block[block]
            if self.offload is not None and block_hash is not None:
                self.offload.save(block, block_hash)
            self._uncache(block)
        self._refs[block] = 1
        self.num_available -= 1
        return block

    def _release(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            (self._free if self._hash_of_block[block] is None else self._cached)[block] = None
            self._num_released += 1
            self.num_available += 1

    def _name(self, seq: BlockHolder, column: int, block: int, block_hash: bytes) -> None:
        """Enter `block` into the prefix cache as the block of `seq` in `column`. No other block has its hash."""
        self._block_of_hash[block_hash] = block
        self._hash_of_block[block] = block_hash
        if self.event_log is not None:
            self.event_log.append(self._stored(seq, column))

    def _forget(self, block: int) -> None:
        """Remove `block` from the prefix cache. It becomes free if no sequence holds it."""
        self._uncache(block)
        if self._refs[block] == 0:
            del self._cached[block]
            self._free[block] = None

    def _uncache(self, block: int) -> None:
        """Remove the hash of `block`. If the block was cached, the caller moves it to the free blocks."""
        block_hash = self._hash_of_block[block]
        assert block_hash is not None
        del self._block_of_hash[block_hash]
        self._hash_of_block[block] = None
        if self.event_log is not None:
            self.event_log.append(BlockRemoved(block_hash))

    def _stored(self, seq: BlockHolder, column: int) -> BlockStored:
        """Return the event for the full block of `seq` in `column`."""
        parent = seq.block_hashes[column - 1] if column else None
        start = column * self.block_size
        tokens = seq.token_ids[start : start + self.block_size]
        return BlockStored(seq.block_hashes[column], parent, tokens, seq.request.cache_salt)

    def _hash_at(self, seq: BlockHolder, column: int) -> bytes:
        hashes = seq.block_hashes
        if len(hashes) <= column:
            extend_hashes(hashes, seq.token_ids, seq.request.cache_salt, self.block_size, column + 1)
        return hashes[column]
