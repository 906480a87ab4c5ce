"""Names of full KV blocks, and the events of the prefix cache.

The hash of a block is chained over the salt and every token up to the block's end: equal hashes mean equal content, and
anyone can compute the hashes of a prompt's blocks from its tokens and salt. At any time, replaying all events so far in
order gives the hashes by which a new request could find a block: exactly with one memory group, see
`oarlock.engine.kv_cache.sequence_memory` for models with several.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

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


_ADAPTER_MARK = b"\xff"  # in no salt of a client, since these are UTF-8


def salt_with_adapter(cache_salt: bytes, digest: str) -> bytes:
    """Return the salt of requests with the LoRA adapter `digest`: no other content has the same blocks."""
    return cache_salt + _ADAPTER_MARK + bytes.fromhex(digest)


def split_salt(cache_salt: bytes) -> tuple[bytes, str | None]:
    """Return the client's salt, and the digest of the adapter, if there is one."""
    salt, mark, digest = cache_salt.partition(_ADAPTER_MARK)
    return salt, digest.hex() if mark else None


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
