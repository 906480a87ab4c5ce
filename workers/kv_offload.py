"""KV blocks outside the pool: the copies that the engine orders, and the reports of the ranks. Torch-free.

Each rank has *slots* in host memory, each for its share of one block, and may have a directory of files. Only the
engine decides on their content: it numbers the slots, and each step has copies to be made in their order, before the
rest of the step. Copies between pages and slots are finished when the step is. Copies between slots and files are made
by threads of the rank, which report completion through a pipe.
"""

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

DIGEST_BYTES = 32
MAX_COPIES = 1 << 15  # maximum copies in one step
DEFAULT_SLOT_BYTES = 1 << 30  # default size per rank if only a directory is given
_FRAME = struct.Struct("<BHH")  # kind, rank, number of entries
_ENTRY = struct.Struct("<IB")  # slot, whether it succeeded
_USAGE = struct.Struct("<QQ")  # bytes, blocks
_MAX_FRAME_BYTES = 4096  # PIPE_BUF, so that writes of several ranks do not mix
_MAX_RESULTS = (_MAX_FRAME_BYTES - _FRAME.size) // _ENTRY.size
_MAX_DIGESTS = (_MAX_FRAME_BYTES - _FRAME.size) // DIGEST_BYTES


class Copy(IntEnum):
    """Source and destination of a copy of a KV block."""

    SAVE = 0  # the page of a block -> slot
    LOAD = 1  # slot -> the page of a block
    WRITE = 2  # slot -> the file of a digest
    READ = 3  # the file of a digest -> slot


@dataclass(frozen=True, slots=True)
class KVOffloadInfo:
    """Memory and files that a rank has for KV blocks outside the pool."""

    num_slots: int
    bytes_per_block: int  # this rank's share
    read_bytes_per_s: float | None = None  # measured at start, through the same threads; None: no directory
    num_ranks: int = 1  # number of ranks that report
    max_disk_bytes: int = 0  # limit of all files of all ranks and models in the directory


class KVReportKind(IntEnum):
    """Kinds of events that a rank reports about files of KV blocks."""

    READ = 0
    WRITTEN = 1
    APPEARED = 2  # files of other processes, or of an earlier start
    VANISHED = 3
    USAGE = 4


@dataclass(frozen=True, slots=True)
class KVReport:
    """One report of one rank."""

    kind: KVReportKind
    rank: int
    results: list[tuple[int, bool]] = field(default_factory=list)  # (slot, success) of READ and WRITTEN
    digests: list[bytes] = field(default_factory=list)  # digests of APPEARED and VANISHED
    num_bytes: int = 0  # USAGE: bytes in the directory
    num_blocks: int = 0


class KVReportSender:
    """A rank's end of the pipe. Its threads may share it. Raises `BrokenPipeError` if the engine is gone."""

    def __init__(self, fd: int, rank: int) -> None:
        self._fd = fd
        self._rank = rank

    def fileno(self) -> int:
        return self._fd

    def results(self, kind: KVReportKind, results: Sequence[tuple[int, bool]]) -> None:
        for start in range(0, len(results), _MAX_RESULTS):
            some = results[start : start + _MAX_RESULTS]
            self._send(kind, len(some), b"".join(_ENTRY.pack(slot, ok) for slot, ok in some))

    def digests(self, kind: KVReportKind, digests: Sequence[bytes]) -> None:
        for start in range(0, len(digests), _MAX_DIGESTS):
            some = digests[start : start + _MAX_DIGESTS]
            self._send(kind, len(some), b"".join(some))

    def usage(self, num_bytes: int, num_blocks: int) -> None:
        self._send(KVReportKind.USAGE, 1, _USAGE.pack(num_bytes, num_blocks))

    def _send(self, kind: KVReportKind, count: int, payload: bytes) -> None:
        os.write(self._fd, _FRAME.pack(kind, self._rank, count) + payload)  # atomic: shorter than PIPE_BUF


class KVReports:
    """The engine's end of the pipe, for all ranks of its host. Never blocks."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self._fd = fd
        self._pending = b""

    def fileno(self) -> int:
        return self._fd

    def receive(self) -> list[KVReport]:
        """Return the reports that arrived since the last call."""
        while True:
            try:
                data = os.read(self._fd, 1 << 16)
            except BlockingIOError:
                break
            if not data:  # no rank is left, which is noticed elsewhere
                break
            self._pending += data
        reports, start = [], 0
        while (size := _frame_bytes(self._pending, start)) is not None:
            reports.append(_parse(self._pending[start : start + size]))
            start += size
        self._pending = self._pending[start:]
        return reports

    def close(self) -> None:
        os.close(self._fd)


def _frame_bytes(data: bytes, start: int) -> int | None:
    """Return the length of the frame that begins at `start`; None if it is incomplete."""
    if len(data) < start + _FRAME.size:
        return None
    kind, _, count = _FRAME.unpack_from(data, start)
    entry = {KVReportKind.READ: _ENTRY.size, KVReportKind.WRITTEN: _ENTRY.size, KVReportKind.USAGE: _USAGE.size}.get(
        kind, DIGEST_BYTES
    )
    size = _FRAME.size + count * entry
    return size if len(data) >= start + size else None


def _parse(frame: bytes) -> KVReport:
    number, rank, _ = _FRAME.unpack_from(frame)
    kind, payload = KVReportKind(number), frame[_FRAME.size :]
    if kind in (KVReportKind.READ, KVReportKind.WRITTEN):
        return KVReport(kind, rank, results=[(slot, bool(ok)) for slot, ok in _ENTRY.iter_unpack(payload)])
    if kind is KVReportKind.USAGE:
        num_bytes, num_blocks = _USAGE.unpack(payload)
        return KVReport(kind, rank, num_bytes=num_bytes, num_blocks=num_blocks)
    digests = [payload[at : at + DIGEST_BYTES] for at in range(0, len(payload), DIGEST_BYTES)]
    return KVReport(kind, rank, digests=digests)
