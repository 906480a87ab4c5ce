"""Writes cached blocks to files when the engine ends, so that the next start finds them."""

from collections import deque
from collections.abc import Iterable

from oarlock.engine.kv_cache.offload import KVOffload


class Flush:
    """Writes blocks of host memory and of the pool that no file holds yet. No sequence may run any more."""

    def __init__(self, offload: KVOffload, blocks: Iterable[tuple[int, bytes]]) -> None:
        """`blocks`: those of the pool with their digests, the most wanted first."""
        self._offload = offload
        self._left = deque[tuple[int | None, bytes]]((None, digest) for digest in offload.host.digests)
        self._left.extend(blocks)

    @property
    def num_left(self) -> int:
        """Number of blocks that no step has been asked to copy."""
        return len(self._left)

    def go_on(self) -> bool:
        """Add as many copies to the next step as it has room for. False when all blocks are written."""
        while self._left and self._offload.keep(*self._left[0]):
            self._left.popleft()
        return not self._offload.is_idle
