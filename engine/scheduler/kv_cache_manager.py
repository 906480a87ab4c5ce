"""The pool of KV blocks: who holds which, which free ones still hold a prefix worth finding, and what to evict.

Knows block ids and token ids. Does not know tensors, what a block weighs, or when anyone runs.

A block is in exactly one of three places: *held* (reference count > 0), *cached* (nobody holds it, but its content can
be found again) or *free* (its content means nothing). Block 0 is the null block and is in none of them.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from engine.scheduler.sequence import Sequence, Shortage

NULL_BLOCK = 0
_DIGEST_BYTES = 32


class KVCacheManager:
    """Reference counts, least-recently-freed order and a prefix cache over full blocks.

    With a sliding window, of all layers, a sequence gives back the blocks that none of its tokens to come will read:
    the null block stands in their columns.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool,
        sliding_window: int | None = None,  # a token sees itself and the window - 1 tokens before it
        max_step_tokens: int = 0,  # the most tokens of one sequence in a step; only a window asks
    ) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool of {num_blocks} blocks has nothing to hand out: block 0 is the null block")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.sliding_window = sliding_window
        self._max_step_tokens = max_step_tokens
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict((block, None) for block in range(1, num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently freed first
        # A chained hash of 256 bits stands for the salt and every token up to the block's end: no two are ever alike.
        self._published: dict[bytes, int] = {}  # digest -> block
        self._digest: list[bytes | None] = [None] * num_blocks
        self._num_released = 0  # blocks that became available, ever

    @property
    def num_total(self) -> int:
        return self.num_blocks - 1

    @property
    def num_available(self) -> int:
        """Blocks that can be handed out now: free ones, and cached ones by eviction."""
        return len(self._free) + len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_held(self) -> int:
        return self.num_total - self.num_available

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def get_computed_blocks(self, seq: Sequence, max_tokens: int) -> list[int]:
        """The blocks of the longest cached prefix of at most `max_tokens` tokens. Takes none of them.

        At least one token is always left to compute: a step must produce the logits that follow the prompt.
        """
        found: list[int] = []
        if not self.enable_prefix_caching:
            return found
        length = seen = 0  # columns of the prefix; published ones in a row up to here
        for column in range(min(max_tokens, seq.num_tokens - 1) // self.block_size):
            block = self._published.get(self._digest_at(seq, column))
            if block is None and self.sliding_window is None:
                break
            seen = 0 if block is None else seen + 1
            found.append(NULL_BLOCK if block is None else block)
            # A digest covers all tokens before: behind a window what was forgotten is not missed.
            if block is not None and seen >= column + 1 - self._first_column(self.block_size * (column + 1)):
                length = column + 1
        del found[length:]
        unread = self._first_column(self.block_size * length)
        found[:unread] = [NULL_BLOCK] * unread
        return found

    def may_enter(self, seq: Sequence, reserve: int) -> bool:
        """False when it is known from an earlier refusal that `enter` would refuse `seq`."""
        known = seq.shortage
        return known is None or known.floor + reserve <= self._num_released or known.awaited in self._published

    def enter(self, seq: Sequence, max_tokens: int, reserve: int) -> int | None:
        """Give `seq`, which holds nothing, its longest cached prefix of at most `max_tokens` tokens, and blocks for all
        else it knows; return that prefix's length. None, and no change, unless `reserve` blocks would be left.

        With a window only the prefix is given, and `grow` gives the rest as it is computed; what can be held at once
        must be available.

        A refusal is remembered: it is not worth another search before enough blocks were released or the first block
        that was missed is published.
        """
        assert not seq.block_ids
        if not self.may_enter(seq, reserve):
            return None
        found = self.get_computed_blocks(seq, max_tokens)
        taken = sum(block != NULL_BLOCK and self._refs[block] == 0 for block in found)
        missing = self.blocks_for(seq.num_tokens) - len(found)
        if self.sliding_window is not None:
            missing = min(missing, self.blocks_for(self.sliding_window + self._max_step_tokens) + 1)
        short = taken + missing - self.num_available
        if short + reserve > 0:
            # Blocks of the prefix that others hold come for nothing. They can become more only by being taken from
            # what is available, or published: so `short` falls only by a release for each.
            column = len(found)
            may_grow = column < min(max_tokens, seq.num_tokens - 1) // self.block_size
            awaited = self._digest_at(seq, column) if may_grow and self.enable_prefix_caching else None
            seq.shortage = Shortage(short + self._num_released, awaited)
            return None
        seq.shortage = None
        for block in found:
            if block != NULL_BLOCK:
                if self._refs[block] == 0:
                    del self._cached[block]
                self._refs[block] += 1
        seq.block_ids += found
        seq.num_published_blocks = len(found)
        seq.num_freed_blocks = self._first_column(self.block_size * len(found))
        if self.sliding_window is None:
            self.allocate_slots(seq, seq.num_tokens)
        return len(found) * self.block_size

    def allocate_slots(self, seq: Sequence, num_tokens: int) -> list[int] | None:
        """Give `seq` blocks for `num_tokens` tokens in all. Returns the new ones; None, and no change, if too few."""
        missing = self.blocks_for(num_tokens) - len(seq.block_ids)
        if missing > self.num_available:
            return None
        new = [self._take() for _ in range(missing)]
        seq.block_ids += new
        return new

    def free_unread(self, seq: Sequence) -> range:
        """Take back the blocks that no token of `seq` from the first that is not computed on will read; return their
        columns, in which the null block stands from now on."""
        first = seq.num_freed_blocks
        columns = range(first, max(first, self._first_column(seq.num_computed_tokens)))
        for column in columns:
            self._release(seq.block_ids[column])
            seq.block_ids[column] = NULL_BLOCK
        seq.num_freed_blocks = columns.stop
        return columns

    def cache_blocks(self, seq: Sequence, num_tokens: int) -> None:
        """Let others find the full blocks of the first `num_tokens` tokens of `seq`. They are never written again.

        Ranks write the keys and values of a whole step before they read any: what a step computes may be shared within
        that step. So blocks are published as soon as the step that fills them is decided.
        """
        if not self.enable_prefix_caching:
            return
        for column in range(seq.num_published_blocks, num_tokens // self.block_size):
            digest = self._digest_at(seq, column)
            block = seq.block_ids[column]
            # Two sequences may have computed the same block side by side: the first stays the one to be found.
            if digest not in self._published:
                self._published[digest] = block
                self._digest[block] = digest
            seq.num_published_blocks = column + 1

    def free(self, seq: Sequence) -> None:
        """`seq` holds nothing any more. Its last blocks will be evicted first: prefixes outlive their tails."""
        for block in reversed(seq.block_ids):
            if block != NULL_BLOCK:
                self._release(block)
        seq.block_ids.clear()
        seq.num_published_blocks = seq.num_freed_blocks = 0

    def forget(self, seq: Sequence, first_column: int = 0) -> None:
        """Let nobody find the blocks of `seq` from `first_column` on again, nor those it gave back. It goes on holding
        what it holds."""
        for block in seq.block_ids[first_column:]:
            if self._digest[block] is not None:
                self._forget(block)
        for digest in seq.digests[first_column : seq.num_freed_blocks]:
            block = self._published.get(digest)
            if block is not None:
                self._forget(block)
                if self._refs[block] == 0:
                    del self._cached[block]
                    self._free[block] = None

    def reset_cache(self) -> int:
        """Let nobody find what has been computed so far; return how many blocks that were. Holders go on holding."""
        forgotten = list(self._published.values())
        for block in forgotten:
            self._forget(block)
        self._free.update(self._cached)
        self._cached.clear()
        return len(forgotten)

    def audit(self, holders: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every block is in exactly one place and every count is right."""
        counts: Counter[int] = Counter()
        for seq in holders:
            freed = seq.block_ids[: seq.num_freed_blocks]
            assert freed == [NULL_BLOCK] * seq.num_freed_blocks, "a block that was given back is still in the table"
            counts.update(seq.block_ids[seq.num_freed_blocks :])
        assert NULL_BLOCK not in counts, "the null block was handed out"
        for block in range(1, self.num_blocks):
            places = (block in self._free) + (block in self._cached) + (self._refs[block] > 0)
            assert places == 1, f"block {block} is in {places} places"
            assert counts[block] == self._refs[block], (
                f"block {block}: {counts[block]} holders, {self._refs[block]} counted"
            )
            digest = self._digest[block]
            assert digest is None or self._published.get(digest) == block, f"block {block} cannot be found"
            assert block not in self._cached or digest is not None, f"block {block} is cached without content"
            assert block not in self._free or digest is None, f"block {block} is free but can be found"
        assert NULL_BLOCK not in self._free and NULL_BLOCK not in self._cached
        assert len(self._published) == sum(digest is not None for digest in self._digest), "a digest leads nowhere"
        assert self.num_free + self.num_cached + self.num_held == self.num_total

    def _first_column(self, num_computed: int) -> int:
        """The first column that the token at position `num_computed`, or any later one, reads."""
        if self.sliding_window is None:
            return 0
        return max(0, num_computed - self.sliding_window + 1) // self.block_size

    def _take(self) -> int:
        if self._free:
            block, _ = self._free.popitem(last=False)
        else:
            block, _ = self._cached.popitem(last=False)
            self._forget(block)
        self._refs[block] = 1
        return block

    def _release(self, block: int) -> None:
        self._refs[block] -= 1
        if self._refs[block] == 0:
            (self._free if self._digest[block] is None else self._cached)[block] = None
            self._num_released += 1

    def _forget(self, block: int) -> None:
        digest = self._digest[block]
        assert digest is not None
        del self._published[digest]
        self._digest[block] = None

    def _digest_at(self, seq: Sequence, column: int) -> bytes:
        """blake2b(parent, token ids), whose first parent is the salt's own hash. Remembered by the sequence."""
        digests = seq.digests
        while len(digests) <= column:
            parent = digests[-1] if digests else blake2b(seq.request.cache_salt, digest_size=_DIGEST_BYTES).digest()
            start = len(digests) * self.block_size
            tokens = array("i", seq.token_ids[start : start + self.block_size]).tobytes()
            digests.append(blake2b(parent + tokens, digest_size=_DIGEST_BYTES).digest())
        return digests[column]
