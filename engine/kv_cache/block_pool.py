"""Pool of the KV blocks of one memory group: which are held, cached or free, the names of cached blocks, and eviction.

Knows block ids and hashes. Does not know sequences, tokens, tensors or bytes.

A block is in exactly one of three states: *held* (reference count > 0), *cached* (reference count 0, but its content
can be found by its hash) or *free* (its content is meaningless). Block 0 is the null block and has no state.
"""

from collections import Counter, OrderedDict

from oarlock.engine.kv_cache.block_events import BlockEventLog, BlockRemoved
from oarlock.engine.kv_cache.offload import KVOffload

NULL_BLOCK = 0


class BlockPool:
    """Blocks with reference counts, and a prefix cache that evicts the least recently freed block."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has nothing to allocate: block 0 is the null block")
        self.num_blocks = num_blocks
        self.refs = [0] * num_blocks
        self.free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, num_blocks))
        self.cached: OrderedDict[int, None] = OrderedDict()  # least recently freed first
        self.num_available = num_blocks - 1  # free blocks, and cached blocks, which can be allocated by eviction
        self.num_released = 0  # total number of times that a block became available
        self.block_of_hash: dict[bytes, int] = {}
        self.hash_of_block: list[bytes | None] = [None] * num_blocks  # None: cannot be found
        self.event_log: BlockEventLog | None = None  # gets the removals; callers of `name` append the additions
        self.offload: KVOffload | None = None  # tiers that keep blocks outside the pool

    @property
    def num_total(self) -> int:
        return self.num_blocks - 1

    @property
    def num_held(self) -> int:
        return self.num_total - self.num_available

    def states(self, stride: int) -> str:
        """Return `h`, `c` or `f` for every `stride`-th block, from the first on: held, cached or free."""
        pairs = zip(self.refs[1::stride], self.hash_of_block[1::stride], strict=True)
        return "".join(["h" if refs else "f" if block_hash is None else "c" for refs, block_hash in pairs])

    # -- references

    def allocate(self) -> int:
        """Return an available block, held once. The least recently freed block is evicted if none is free."""
        if self.free:
            block, _ = self.free.popitem(last=False)
        else:
            block, _ = self.cached.popitem(last=False)
            block_hash = self.hash_of_block[block]
            if self.offload is not None and block_hash is not None:
                self.offload.save(block, block_hash)
            self.unname(block)
        self.refs[block] = 1
        self.num_available -= 1
        return block

    def hold(self, block: int) -> None:
        """Count one more holder of `block`, which is held or cached."""
        if self.refs[block] == 0:
            del self.cached[block]
            self.num_available -= 1
            if self.offload is not None:
                self.offload.save_reused(block, self.hash_of_block[block])
        self.refs[block] += 1

    def release(self, block: int) -> None:
        """Count one holder of `block` less."""
        self.refs[block] -= 1
        if self.refs[block] == 0:
            (self.free if self.hash_of_block[block] is None else self.cached)[block] = None
            self.num_released += 1
            self.num_available += 1

    # -- names

    def name(self, block: int, block_hash: bytes) -> None:
        """Let `block`, which is held, be found by `block_hash`. No other block has this hash."""
        self.block_of_hash[block_hash] = block
        self.hash_of_block[block] = block_hash

    def forget(self, block_hash: bytes) -> None:
        """Remove the block of `block_hash`, if there is one, from the prefix cache. It becomes free if nothing holds
        it."""
        block = self.block_of_hash.get(block_hash)
        if block is None:
            return
        self.unname(block)
        if self.refs[block] == 0:
            del self.cached[block]
            self.free[block] = None

    def unname(self, block: int) -> None:
        """Remove the hash of `block`, which has one. If the block was cached, the caller moves it to the free
        blocks."""
        block_hash = self.hash_of_block[block]
        assert block_hash is not None
        del self.block_of_hash[block_hash]
        self.hash_of_block[block] = None
        if self.event_log is not None:
            self.event_log.append(BlockRemoved(block_hash))

    def forget_all(self) -> int:
        """Empty the prefix cache without events; return the number of blocks in it. Held blocks stay held."""
        num_blocks = len(self.block_of_hash)
        for block in self.block_of_hash.values():
            self.hash_of_block[block] = None
        self.block_of_hash.clear()
        self.free.update(self.cached)
        self.cached.clear()
        return num_blocks

    def audit(self, holders: Counter[int]) -> None:
        """Raise AssertionError unless every block is in exactly one state and every count is right.

        `holders`: number of tables with each block.
        """
        assert NULL_BLOCK not in holders, "the null block was allocated"
        for block in range(1, self.num_blocks):
            states = (block in self.free) + (block in self.cached) + (self.refs[block] > 0)
            assert states == 1, f"block {block} is in {states} states"
            assert holders[block] == self.refs[block], (
                f"block {block}: {holders[block]} holders, {self.refs[block]} counted"
            )
            block_hash = self.hash_of_block[block]
            assert block_hash is None or self.block_of_hash.get(block_hash) == block, f"block {block} cannot be found"
            assert block not in self.cached or block_hash is not None, f"block {block} is cached without a hash"
            assert block not in self.free or block_hash is None, f"block {block} is free but can be found"
        assert NULL_BLOCK not in self.free and NULL_BLOCK not in self.cached
        assert self.num_available == len(self.free) + len(self.cached), "available blocks are counted wrongly"
        assert len(self.block_of_hash) == sum(value is not None for value in self.hash_of_block), "a hash leads nowhere"
