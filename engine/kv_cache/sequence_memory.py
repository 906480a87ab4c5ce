"""Memory of sequences over all memory groups of a model: allocation, the prefix cache, and what the scheduler asks.

A model has one group of pages or several, each with its own pool and block tables. A sequence gets a block in every
group for the same columns; a group with a span gets its blocks as tokens are computed, and frees those that no later
token reads, even while other groups are full. A block is stored when its computation is scheduled. If a step is
withdrawn or refused, the blocks that it was to fill are removed.

A prefix hit is the longest prefix on which all groups agree: a group without a span must find every block, a group with
a span only the blocks that the next token reads.

Events and shares follow one group, the *leader*: the smallest group without a span, or else the one with the longest
span. Groups without a span hold the same columns, and those of equal size lose the same blocks. Groups with a span lose
early blocks all the time, without harm to the blocks after them, so nothing is announced for them. With several groups,
a hit may therefore be shorter than the events promise, but not longer than the leader's blocks. Numbers of blocks are
totals over all groups, and the usage is that of the scarcest group.

Knows block ids and token ids. Does not know tensors, bytes, or when a sequence runs.
"""

import sys
from collections.abc import Iterable, Iterator

from oarlock.engine.kv_cache.block_events import AllBlocksCleared, BlockStored
from oarlock.engine.kv_cache.block_pool import NULL_BLOCK
from oarlock.engine.kv_cache.manager import BlockHolder, BlockTable, KVCacheManager, Shortage, TableEntry, hash_at
from oarlock.engine.kv_cache.offload import KVOffload
from oarlock.engine.kv_cache.state_slots import NUM_OWN_SLOTS, StateSlots, checkpoint_lengths
from oarlock.workers.config import GroupInfo, WorkerInfo

UNSENT = -1  # number of a group that ranks do not have: its table entries are not sent
_MOST_COUNTED = 1 << 18  # blocks of a group that only counts tokens
LEAST_AWAITED_TOKENS = 128  # tokens that a checkpoint must save for a sequence that waits for it


def page_groups(info: WorkerInfo, num_rows: int) -> dict[int, GroupInfo]:
    """Return the groups of pages of a model by their numbers.

    A model whose only memory is recurrent state has one group that ranks do not have. Its blocks have no content, but
    their names find states, and the limits of requests follow from it.
    """
    if not info.groups:
        return {0: GroupInfo(info.num_blocks, 0, span=info.sliding_window)}
    pages = {number: group for number, group in enumerate(info.groups) if not group.is_recurrent}
    if not pages:
        width = -(-info.max_model_len // info.block_size)
        return {UNSENT: GroupInfo(1 + max(width, min(num_rows * width, _MOST_COUNTED)), 0)}
    return pages


def num_state_slots(info: WorkerInfo) -> int | None:
    """Return the number of slots of recurrent state, including the null slot; None: the model has no recurrent layers.

    All recurrent layers use the same slot numbers.
    """
    counts = {group.num_blocks for group in info.groups if group.is_recurrent}
    assert len(counts) <= 1, "groups of recurrent layers have different numbers of slots"
    return max(counts, default=None)


class SequenceMemory:
    """Allocator of the memory of sequences, with a prefix cache."""

    def __init__(
        self,
        groups: dict[int, GroupInfo],
        block_size: int,
        *,
        enable_prefix_caching: bool,
        max_step_tokens: int = 0,  # maximum tokens of one sequence in a step; used with a span only
    ) -> None:
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        # Groups with a span first: their tables are the shortest while a prompt is computed.
        ordered = sorted(groups.items(), key=lambda item: item[1].span is None)
        self.managers = tuple(
            KVCacheManager(index, number, group.num_blocks, block_size, group.span, max_step_tokens)
            for index, (number, group) in enumerate(ordered)
        )
        self.pools = tuple(manager.pool for manager in self.managers)
        self._with_span = tuple(manager for manager in self.managers if manager.span is not None)
        self._without_span = self.managers[len(self._with_span) :]
        self.has_spans = bool(self._with_span)
        if self._without_span:
            self.leader = min(self._without_span, key=lambda manager: manager.pool.num_blocks)
        else:
            self.leader = max(self._with_span, key=lambda manager: (manager.span, -manager.pool.num_blocks))
        self.offload: KVOffload | None = None
        self.slots: StateSlots | None = None  # None: the model has no recurrent layers

    def attach(self, offload: KVOffload) -> None:
        """Keep blocks of the only pool in the tiers of `offload` as well."""
        (pool,) = self.pools
        self.offload = pool.offload = offload

    def new_tables(self) -> tuple[BlockTable, ...]:
        """Return the empty block tables of a sequence; the first is never longer than another."""
        return tuple(BlockTable() for _ in self.managers)

    # -- counts

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated in the scarcest group."""
        return min([pool.num_available for pool in self.pools])

    @property
    def num_total(self) -> int:
        return sum([pool.num_total for pool in self.pools])

    @property
    def num_free(self) -> int:
        return sum([len(pool.free) for pool in self.pools])

    @property
    def num_cached(self) -> int:
        return sum([len(pool.cached) for pool in self.pools])

    @property
    def num_held(self) -> int:
        return sum([pool.num_held for pool in self.pools])

    @property
    def usage(self) -> float:
        """Share of the blocks that sequences hold, 0 to 1, in the group with the largest."""
        return max([pool.num_held / pool.num_total for pool in self.pools])

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that the memory can hold.

        A group with a span limits a sequence only if its pool lacks blocks for the span and a step.
        """
        limits = [
            manager.pool.num_total
            for manager in self.managers
            if len(self.managers) == 1 or manager.span is None or manager.pool.num_total < manager.most_held
        ]
        return min(limits) * self.block_size if limits else sys.maxsize

    def states(self, stride: int) -> str:
        """Return the states of the blocks of each group in turn, as `BlockPool.states` does."""
        return "".join([pool.states(stride) for pool in self.pools])

    def share(self, num_blocks: int) -> float:
        """Return the share that `num_blocks` blocks of the leader are of all its blocks."""
        return num_blocks / self.leader.pool.num_total

    def num_blocks_of(self, seq: BlockHolder) -> int:
        """Return the length of the block table of `seq` in the leader."""
        return len(seq.tables[self.leader.index].block_ids)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # -- prefixes

    def find_prefix(self, seq: BlockHolder, max_tokens: int) -> list[list[int]]:
        """Return the blocks of the longest cached prefix of at most `max_tokens` tokens. Changes nothing.

        Each group has an entry for each column; the null block stands for those that are not read.

        At least one token is always left to compute: a step must produce the logits that follow the prompt.
        """
        found: list[list[int]] = [[] for _ in self.managers]
        if not self.enable_prefix_caching:
            return found
        most = min(max_tokens, seq.num_tokens - 1) // self.block_size
        for manager in self._without_span:
            found[manager.index] = manager.find(hash_at(seq, column, self.block_size) for column in range(most))
            most = len(found[manager.index])
        if self.has_spans:
            most = self._find_with_spans(seq, most, found)
        for blocks in found:
            del blocks[most:]
        return found

    def _find_with_spans(self, seq: BlockHolder, most: int, found: list[list[int]]) -> int:
        """Enter into `found` the blocks of the groups with a span for the longest prefix of at most `most` columns on
        which they agree, and return its columns.

        A hash covers all tokens before it, so blocks that are not read may be missing. If a block is missing that is
        read after a prefix, it is also read after each shorter prefix that contains it. So the search goes on with the
        prefix that ends before this block.
        """
        length, size, begins = most, self.block_size, [most] * len(self._with_span)
        is_agreed = False
        while length and not is_agreed:
            is_agreed = True
            for index, manager in enumerate(self._with_span):
                has, first = manager.pool.block_of_hash, min(length - 1, manager.first_column_read(size * length))
                column = min(length, begins[index])  # the columns from here on to `length` have blocks
                while column > first and hash_at(seq, column - 1, size) in has:
                    column -= 1
                begins[index] = column
                if column > first:
                    length, is_agreed = column - 1, False
                    break
        for manager in self._with_span:
            unread = manager.first_column_read(size * length)
            hashes = [hash_at(seq, column, size) for column in range(unread, length)]
            found[manager.index] = [NULL_BLOCK] * unread + manager.find(hashes)
        return length

    def missing_hashes(self, seq: BlockHolder) -> tuple[int, Iterator[bytes]]:
        """Return the first column of `seq` that the prefix cache lacks, and the hashes of its blocks from there on that
        could be loaded instead of computed."""
        most = min(seq.num_skippable_tokens, seq.num_tokens - 1) // self.block_size
        first = len(self.find_prefix(seq, seq.num_skippable_tokens)[0])
        return first, (hash_at(seq, column, self.block_size) for column in range(first, most))

    # -- admission

    def can_allocate(self, seq: BlockHolder, reserve: int) -> bool:
        """Return False if an earlier refusal is still valid, so that `allocate` would refuse `seq` again."""
        if self.slots is not None and self.slots.num_available < NUM_OWN_SLOTS:
            return False
        known = seq.shortage
        if known is None or known.floor + reserve <= self.pools[known.short_group].num_released:
            return True
        return known.awaited in self.pools[known.awaited_group].block_of_hash

    def allocate(self, seq: BlockHolder, max_tokens: int, reserve: int) -> int | None:
        """Give `seq`, which has no blocks, its longest cached prefix of at most `max_tokens` tokens, and blocks for all
        its other tokens; return the prefix's length in tokens. Returns None and changes nothing unless `reserve` blocks
        would be left in each group.

        In groups with a span only the prefix is given, and `grow` gives the other blocks as they are computed. But the
        number of blocks that the sequence can hold at once must be available.

        A refusal is remembered in `seq.shortage`. Returns None also if host memory has more of the prefix than one step
        may load. The next step then loads a part into the prefix cache, and the caller should try again. So it should
        if `seq` awaits a checkpoint.
        """
        assert not seq.tables[0].block_ids
        if self.slots is not None and seq.awaited_checkpoint in self.slots.expected:
            return None
        seq.awaited_checkpoint = None
        if not self.can_allocate(seq, reserve):
            if self.slots is not None:
                self.slots.note_refusal()
            return None
        found = self.find_prefix(seq, max_tokens)
        num_shared = len(found[0])
        if self.slots is not None:
            found = self._up_to_checkpoint(seq, found, self.slots)
            seq.awaited_checkpoint = self._expected_checkpoint(seq, len(found[0]), max_tokens, self.slots)
            if seq.awaited_checkpoint is not None:
                seq.shortage = None
                return None
        num_columns, num_found = self.blocks_for(seq.num_tokens), len(found[0])
        for manager in self.managers:
            needed = manager.num_needed(found[manager.index], num_columns)
            if len(self.managers) > 1:  # blocks of the prefix are freed before more are needed than it holds at once
                needed = min(needed, manager.most_held)
            short = needed - manager.pool.num_available
            if short + reserve > 0:
                seq.shortage = self._shortage(manager, short, seq, num_found, max_tokens)
                return None
        seq.shortage = None
        if self.slots is not None and not self._take_slots(seq, num_found, num_shared, self.slots):
            return None
        columns = range(num_found, min(max_tokens, seq.num_tokens - 1) // self.block_size)
        slots: list[int] = []
        if self.offload is not None and not self.has_spans:
            # Held before blocks are allocated, so that blocks evicted for them are saved to other slots.
            slots = self.offload.pin(hash_at(seq, column, self.block_size) for column in columns)
            if len(slots) > self.offload.num_loads_left:
                self._load_some(self.offload, seq, found[0], slots)
                return None
        for manager in self.managers:
            manager.take(seq.tables[manager.index], found[manager.index])
        seq.num_cached_blocks = num_found
        for manager in self._without_span:
            table = seq.tables[manager.index]
            table.block_ids += [manager.pool.allocate() for _ in range(num_found, num_columns)]
        for column, slot in zip(columns, slots, strict=False):
            assert self.offload is not None
            self.offload.load(slot, seq.tables[0].block_ids[column])
        num_cached = (num_found + len(slots)) * self.block_size
        self.cache_blocks(seq, num_cached)
        return num_cached

    def _shortage(
        self, manager: KVCacheManager, short: int, seq: BlockHolder, num_found: int, max_tokens: int
    ) -> Shortage:
        """Return the refusal of `seq`, for which `manager` lacks `short` blocks with a prefix of `num_found` columns.

        Blocks of the prefix that other sequences hold cost nothing. Their number grows only if available blocks are
        allocated, or new blocks cached. So each release lowers `short` by at most one. The refusal also ends when a
        group caches the block after the prefix that it lacks now. With recurrent state only releases end it, because
        the prefix grows by checkpoints, and `seq` waits before it is refused if a running sequence will leave one.
        """
        floor, index = short + manager.pool.num_released, manager.index
        if not self.enable_prefix_caching or self.slots is not None:
            return Shortage(floor, None, index)
        if num_found >= min(max_tokens, seq.num_tokens - 1) // self.block_size:
            return Shortage(floor, None, index)
        awaited = hash_at(seq, num_found, self.block_size)
        if len(self.managers) == 1:
            return Shortage(floor, awaited)
        lacking = next(other for other in self.managers if awaited not in other.pool.block_of_hash)
        return Shortage(floor, awaited, index, lacking.index)

    def _up_to_checkpoint(self, seq: BlockHolder, found: list[list[int]], slots: StateSlots) -> list[list[int]]:
        """Return the part of the prefix `found` that ends at the last checkpoint on which all groups agree."""
        while (length := slots.longest(seq.block_hashes, len(found[0]))) < len(found[0]):
            found = self.find_prefix(seq, length * self.block_size)
        return found

    def _expected_checkpoint(
        self, seq: BlockHolder, num_found: int, max_tokens: int, slots: StateSlots
    ) -> bytes | None:
        """Return the hash of the last checkpoint that running sequences will leave and that is worth waiting for, or
        None: with it, `seq` has many tokens less to compute than with its prefix of `num_found` columns."""
        if not slots.expected:
            return None
        least = num_found + max(1, -(-LEAST_AWAITED_TOKENS // self.block_size))
        columns = range(min(max_tokens, seq.num_tokens - 1) // self.block_size, least - 1, -1)
        hashes = (hash_at(seq, column - 1, self.block_size) for column in columns)
        return next((block_hash for block_hash in hashes if block_hash in slots.expected), None)

    def _take_slots(self, seq: BlockHolder, num_found: int, num_shared: int, slots: StateSlots) -> bool:
        """Give `seq` its slots of recurrent state, and plan the checkpoints of its prompt. Return False, without a
        change, if there are too few slots.

        `num_found`: columns of its prefix. `num_shared`: columns whose blocks are cached in all groups of pages.
        """
        seq.slots = slots.take(seq.block_hashes[num_found - 1] if num_found else None)
        if seq.slots is None:
            return False
        if self.enable_prefix_caching:
            lengths = seq.num_tokens, num_found * self.block_size, num_shared * self.block_size
            planned = checkpoint_lengths(*lengths, self.block_size)
            seq.checkpoints_at = {
                length: hash_at(seq, length // self.block_size - 1, self.block_size) for length in planned
            }
            slots.expected.update(seq.checkpoints_at.values())
        return True

    def _load_some(self, offload: KVOffload, seq: BlockHolder, found: list[int], slots: list[int]) -> None:
        """Load `slots` into the prefix cache, up to the limit of the next step. They are blocks of `seq`, which holds
        none, after the blocks `found` in the cache. No sequence holds them, but they are evicted last."""
        (pool,) = self.pools
        room, own = offload.num_loads_left, [block for block in found if pool.refs[block] == 0]
        for block in own:
            del pool.cached[block]
        pool.num_available -= len(own)
        for column, slot in enumerate(slots[:room], len(found)):
            block_hash = hash_at(seq, column, self.block_size)
            if block_hash in pool.block_of_hash:  # it follows a block that was evicted
                offload.unpin([slot])
                continue
            block = pool.allocate()
            offload.load(slot, block)
            pool.name(block, block_hash)
            if pool.event_log is not None:
                pool.event_log.append(self._stored(seq, column))
            own.append(block)
        offload.unpin(slots[room:])
        for block in reversed(own):
            pool.refs[block] = 0
            pool.cached[block] = None
        pool.num_available += len(own)

    # -- growth. The blocks' table entries are added to `entries`.

    def grow(self, seq: BlockHolder, num_tokens: int, entries: list[TableEntry]) -> bool:
        """Give `seq` blocks for `num_tokens` tokens in all. Return False, without a change, if a group has too few."""
        columns = self.blocks_for(num_tokens)
        for manager in self.managers:
            if columns - len(seq.tables[manager.index].block_ids) > manager.pool.num_available:
                return False
        for manager in self.managers:
            block_ids = seq.tables[manager.index].block_ids
            for column in range(len(block_ids), columns):
                block_ids.append(manager.pool.allocate())
                entries.append((manager.number, seq.row, column, block_ids[column]))
        return True

    def grow_by_one(self, seq: BlockHolder, entries: list[TableEntry]) -> bool:
        """Give `seq`, whose tables have equal lengths, one more block in each group, like `grow`."""
        for pool in self.pools:
            if not pool.num_available:
                return False
        for manager in self.managers:
            block_ids, block = seq.tables[manager.index].block_ids, manager.pool.allocate()
            entries.append((manager.number, seq.row, len(block_ids), block))
            block_ids.append(block)
        return True

    def grow_up_to(self, seq: BlockHolder, num_tokens: int, reserve: int, entries: list[TableEntry]) -> int:
        """Give `seq` blocks for `num_tokens` tokens in all, or for fewer so that `reserve` blocks stay available in
        each group. Return the number of tokens."""
        for manager in self.managers:
            spare = max(0, manager.pool.num_available - reserve)
            num_tokens = min(num_tokens, (len(seq.tables[manager.index].block_ids) + spare) * self.block_size)
        self.grow(seq, num_tokens, entries)
        return num_tokens

    def free_unread(self, seq: BlockHolder, entries: list[TableEntry]) -> None:
        """Free the blocks that no uncomputed token of `seq` reads. Their entries become the null block."""
        for manager in self._with_span:
            manager.free_unread(seq, entries)

    def all_entries(self, seq: BlockHolder) -> list[TableEntry]:
        """Return all table entries of `seq`, which has just got its row."""
        return [
            (manager.number, seq.row, column, block)
            for manager in self.managers
            for column, block in enumerate(seq.tables[manager.index].block_ids)
        ]

    # -- the prefix cache

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
            block_hash = hash_at(seq, column, self.block_size)
            for manager in self.managers:
                pool, block = manager.pool, seq.tables[manager.index].block_ids[column]
                if block_hash not in pool.block_of_hash and block != NULL_BLOCK:
                    pool.name(block, block_hash)
                    if pool.event_log is not None:
                        pool.event_log.append(self._stored(seq, column))
            seq.num_cached_blocks = column + 1

    def free(self, seq: BlockHolder) -> None:
        """Free all blocks of `seq`, and its slots if it has never run."""
        if self.slots is not None and seq.slots is not None:
            self.slots.give_back(seq.slots, has_started=False)
            self.slots.expect_no_more(seq.checkpoints_at, list(seq.checkpoints_at))
            seq.slots = None
        for manager in self.managers:
            manager.free(seq.tables[manager.index])
        seq.num_cached_blocks = 0

    def evict_blocks(self, seq: BlockHolder, first_column: int = 0) -> None:
        """Remove the blocks of `seq` from `first_column` on from the prefix cache, including blocks that it freed.
        Sequences that hold them keep them."""
        for manager in self.managers:
            manager.evict(seq, first_column)
        if self.offload is not None:
            self.offload.forget(seq.block_hashes[first_column:])
        if self.slots is not None:
            self.slots.forget(seq.block_hashes[first_column:])

    def uncache(self, seq: BlockHolder, start: int, end: int) -> None:
        """Remove blocks from the prefix cache whose tokens, from `start` to `end` (exclusive) of `seq`, were not
        computed after all, even if `seq` has ended since. Sequences that hold such blocks keep them."""
        columns = slice(start // self.block_size, end // self.block_size)
        for block_hash in seq.block_hashes[columns]:
            for pool in self.pools:
                pool.forget(block_hash)
        if self.offload is not None:
            self.offload.forget(seq.block_hashes[columns])
        seq.num_cached_blocks = min(seq.num_cached_blocks, columns.start)

    def holds_context(self, seq: BlockHolder) -> bool:
        """Return whether `seq` still holds every block that its next token reads."""
        num_computed = seq.num_computed_tokens
        return all(
            seq.tables[manager.index].num_freed <= manager.first_column_read(num_computed)
            for manager in self._with_span
        )

    def cached_blocks(self) -> list[tuple[int, bytes]]:
        """Return the cached blocks of the leader that no sequence holds, with their hashes: most recently used first,
        each prefix before its continuation."""
        pool = self.leader.pool
        return [(block, block_hash) for block in reversed(pool.cached) if (block_hash := pool.hash_of_block[block])]

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache; return the number of blocks in it. Sequences that hold such blocks keep them. Blocks
        in host memory are forgotten as well; files stay."""
        if self.offload is not None:
            self.offload.host.forget_all()
        if self.slots is not None:
            self.slots.forget_all()
        num_blocks = sum([pool.forget_all() for pool in self.pools])
        if self.leader.pool.event_log is not None:
            self.leader.pool.event_log.append(AllBlocksCleared())
        return num_blocks

    def audit(self, holders: Iterable[BlockHolder]) -> None:
        """Raise AssertionError unless every block of every group is in exactly one state and every count is right."""
        holders = list(holders)
        for seq in holders:
            lengths = [len(table.block_ids) for table in seq.tables]
            assert len(lengths) == len(self.managers), "a sequence has tables of another model"
            assert lengths[0] == min(lengths), "the first table is longer than another"
        for manager in self.managers:
            manager.audit(holders)

    def _stored(self, seq: BlockHolder, column: int) -> BlockStored:
        """Return the event for the full block of `seq` in `column`."""
        parent = seq.block_hashes[column - 1] if column else None
        start = column * self.block_size
        tokens = seq.token_ids[start : start + self.block_size]
        return BlockStored(seq.block_hashes[column], parent, tokens, seq.request.cache_salt)
