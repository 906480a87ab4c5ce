"""Messages that tell routers of cache events: vLLM's, which msgpack encodes as maps with a `type`.

A batch is `[time, [messages], data parallel rank]`. Hashes go out as their last 64 bits, an unsigned integer: readers
take them for names of blocks, and find blocks by tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from oarlock.engine.kv_cache.events import AllBlocksCleared, BlockEvent, BlockStored

_POOL = "GPU"  # the memory that attention reads, on whatever device: what routers count as a hit
_GROUP = 0  # all layers share one table of blocks


def short_hash(block_hash: bytes) -> int:
    """The name of a block on the wire."""
    return int.from_bytes(block_hash[-8:], "big")


@dataclass(frozen=True, slots=True)
class Wire:
    """Makes the messages of one engine from its cache events. The fields are common to all its messages."""

    block_size: int
    sliding_window: int | None = None
    has_key_in_salts: bool = False  # the part of a salt before its first `|` names an API key and is left out

    def messages(self, events: Iterable[BlockEvent]) -> list[dict[str, Any]]:
        """One message for each run of blocks that follow each other in a sequence, and for each run of removals."""
        found: list[dict[str, Any]] = []
        newest: BlockEvent | None = None
        for event in events:
            if isinstance(event, BlockStored):
                if isinstance(newest, BlockStored) and event.parent_hash == newest.block_hash:
                    found[-1]["block_hashes"].append(short_hash(event.block_hash))
                    found[-1]["token_ids"] += event.token_ids
                    found[-1]["extra_keys"].append(None)
                else:
                    found.append(self._stored(event))
            elif isinstance(event, AllBlocksCleared):
                found.append({"type": "AllBlocksCleared"})
            elif newest is not None and type(newest) is type(event):
                found[-1]["block_hashes"].append(short_hash(event.block_hash))
            else:
                hashes = [short_hash(event.block_hash)]
                found.append({"type": "BlockRemoved", "block_hashes": hashes, "medium": _POOL, "group_idx": _GROUP})
            newest = event
        return found

    def _stored(self, event: BlockStored) -> dict[str, Any]:
        parent, salt = event.parent_hash, self._told_salt(event)
        message = {
            "type": "BlockStored",
            "block_hashes": [short_hash(event.block_hash)],
            "parent_block_hash": None if parent is None else short_hash(parent),
            "token_ids": list(event.token_ids),
            "block_size": self.block_size,
            "lora_id": None,
            "medium": _POOL,
            "lora_name": None,
            "extra_keys": [[salt] if salt else None],
            "group_idx": _GROUP,
            "kv_cache_spec_kind": "full_attention" if self.sliding_window is None else "sliding_window",
        }
        if self.sliding_window is not None:
            message["kv_cache_spec_sliding_window"] = self.sliding_window
        return message

    def _told_salt(self, event: BlockStored) -> str:
        """Salt to publish with a sequence's first block. Other blocks have none: their parents' hashes cover it."""
        if event.parent_hash is not None:
            return ""
        salt = event.cache_salt.decode()
        return salt.partition("|")[2] if self.has_key_in_salts else salt
