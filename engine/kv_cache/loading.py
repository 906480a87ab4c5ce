"""Keeps sequences that wait for files to be read outside the queue, so that those behind them need not wait as well.

Knows a queue and who is in it; does not know why a sequence may run.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic, Protocol, TypeVar

from oarlock.engine.kv_cache.offload import KVOffload

LOOKED_AHEAD = 8  # sequences at the head of the queue that may begin to read files


class WaitingSequence(Protocol):
    """Fields of a waiting sequence that loading reads and sets."""

    request_id: int
    has_asked_files: bool  # since it last began to wait


S = TypeVar("S", bound=WaitingSequence)


class Queue(Protocol[S]):
    """The waiting sequences, in the order in which they are admitted."""

    def __iter__(self) -> Iterator[S]: ...

    def push(self, seq: S) -> None: ...

    def remove(self, seq: S) -> None: ...


class LoadingSequences(Generic[S]):
    """Takes sequences out of the queue while their files are read, and puts each back into its place afterwards."""

    def __init__(
        self, offload: KVOffload, queue: Queue[S], missing_hashes: Callable[[S], tuple[int, Iterator[bytes]]]
    ) -> None:
        """`missing_hashes(seq)`: the first column of its prefix that the pool lacks, and the hashes from it on."""
        self._offload = offload
        self._queue = queue
        self._missing_hashes = missing_hashes
        self._seqs: dict[int, S] = {}  # by request id

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[S]:
        return iter(self._seqs.values())

    def follow(self, now: float) -> None:
        """Queue sequences whose blocks are read or will not come, and begin to read those of the next in turn."""
        if not self._offload.has_disk:
            return
        for request_id in self._offload.take_ready(now):
            self._queue.push(self._seqs.pop(request_id))
        for seq in [seq for seq in islice(self._queue, LOOKED_AHEAD) if not seq.has_asked_files]:
            seq.has_asked_files = True
            first_column, digests = self._missing_hashes(seq)
            if self._offload.begin_load(seq.request_id, digests, first_column, now):
                self._queue.remove(seq)
                self._seqs[seq.request_id] = seq

    def remove(self, seq: S) -> None:
        """Remove `seq`, which has ended, from the queue or from the loading sequences."""
        if self._seqs.pop(seq.request_id, None) is None:
            self._queue.remove(seq)
        self._offload.release(seq.request_id)
