"""A rank's copies of KV blocks outside the pool: slots in host memory, files in a directory, and threads between them.

Copies between pages and slots are made at once, in the order of the step's copies, before the rest of the step. On a
device they are queued among its other work; the host may read a slot after the step's output has arrived. No step waits
for the threads that move blocks between slots and files. Failures of these threads are logged once per kind, reported,
and retried with the next block. The engine recomputes blocks that could not be read.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from os import urandom
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.base.host_memory import human_bytes
from oarlock.workers.attention.backend import LayerKV
from oarlock.workers.config import WorkerConfig
from oarlock.workers.fingerprint import kv_key
from oarlock.workers.kv_offload import DIGEST_BYTES, Copy, KVOffloadInfo, KVReportKind, KVReportSender
from oarlock.workers.kv_tiers.directory import (
    BlockDirectory,
    DamagedFileError,
    drop_from_cache,
    path_of,
    read_block,
    write_block,
)
from oarlock.workers.kv_tiers.keeper import KeeperProcess
from oarlock.workers.platform.huge_pages import huge_page_empty
from oarlock.workers.protocol import StepMetadata

_BLOCKS_AT_ONCE = 32  # blocks per copy through a buffer on the device


class HostSlots(Protocol):
    """Slots in `memory`, uint8 [slots, bytes of a block]: for each layer, the block's page of keys, then of values."""

    memory: np.ndarray

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy each of `blocks` to its slot."""

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy each of `slots` to its block. No block comes twice."""


def bytes_per_block(pages: Sequence[LayerKV]) -> int:
    """Return the bytes of this rank's share of a block, in the layout of the backend that allocated `pages`."""
    return sum(page.shape[1] for page in _as_bytes(pages))


def make_slots(pages: Sequence[LayerKV], num_slots: int) -> HostSlots:
    """Allocate slots. `pages`: of all layers of this rank; the first dimension of each tensor is the block."""
    return (SlotsOfHost if pages[0].k.device.type == "cpu" else SlotsOfDevice)(pages, num_slots)


class SlotsOfHost:
    """Slots for pages in host memory."""

    def __init__(self, pages: Sequence[LayerKV], num_slots: int) -> None:
        self._pages = [page.numpy() for page in _as_bytes(pages)]
        widths = [page.shape[1] for page in self._pages]
        self.memory = huge_page_empty((num_slots, sum(widths)), torch.uint8).numpy()
        self._parts = np.split(self.memory, np.cumsum(widths)[:-1], axis=1)

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        for page, part in zip(self._pages, self._parts, strict=True):
            part[slots] = page[blocks]

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        for page, part in zip(self._pages, self._parts, strict=True):
            page[blocks] = part[slots]


class SlotsOfDevice:
    """Slots for pages on a device, in pinned host memory. Copies pass through a buffer on the device."""

    def __init__(self, pages: Sequence[LayerKV], num_slots: int, *, pinned: bool = True) -> None:
        self._pages, self._pinned = _as_bytes(pages), pinned
        self._widths = [page.shape[1] for page in self._pages]
        self._device = self._pages[0].device
        self._slots = torch.empty((num_slots, sum(self._widths)), dtype=torch.uint8, pin_memory=pinned)
        self.memory = self._slots.numpy()
        self._buffer = torch.empty((_BLOCKS_AT_ONCE, sum(self._widths)), dtype=torch.uint8, device=self._device)

    @torch.inference_mode()
    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
            ids, some = self._on_device(blocks[start:][:_BLOCKS_AT_ONCE]), slots[start:][:_BLOCKS_AT_ONCE]
            buffer = self._buffer[: len(some)]
            for page, part in zip(self._pages, buffer.split(self._widths, 1), strict=True):
                part.copy_(page.index_select(0, ids))
            for slot, content in zip(some, buffer, strict=True):
                self._slots[slot].copy_(content, non_blocking=True)

    @torch.inference_mode()
    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
            ids, some = self._on_device(blocks[start:][:_BLOCKS_AT_ONCE]), slots[start:][:_BLOCKS_AT_ONCE]
            buffer = self._buffer[: len(some)]
            for slot, content in zip(some, buffer, strict=True):
                content.copy_(self._slots[slot], non_blocking=True)
            for page, part in zip(self._pages, buffer.split(self._widths, 1), strict=True):
                page.index_copy_(0, ids, part)

    def _on_device(self, numbers: Sequence[int]) -> Tensor:
        """Return int64 [n] on the device. It is copied from pinned memory, because other copies would wait for the
        device."""
        return torch.tensor(numbers, pin_memory=self._pinned).to(self._device, non_blocking=True)


def _as_bytes(pages: Sequence[LayerKV]) -> list[Tensor]:
    """Return uint8 [blocks, bytes of a page] of each layer's keys, then values."""
    return [tensor.flatten(1).view(torch.uint8) for layer in pages for tensor in (layer.k, layer.v)]


logger = logging.getLogger("oarlock.kv_offload")

NUM_READERS = 4
_AT_ONCE = 8  # blocks that one reader reads before it reports
_LOOK_S = 5.0  # interval of looks at the files that other processes have written
_ROOM_SHARE = 0.02  # fraction of the limit; after writing this much, room is made again
_LAST_WRITES_S = 1.0  # time for pending writes when the rank ends

_Job = Sequence[tuple[int, bytes]] | None  # (slot, digest) of each block; None: the last job


class FileThreads:
    """Threads that read and write files of blocks. `read` and `write` return at once."""

    def __init__(self, files: BlockDirectory, slots: np.ndarray, reports: KVReportSender, *, num_ranks: int) -> None:
        """Start the threads. `slots`: uint8 [slots, bytes of a block]. `num_ranks`: ranks that each write the same
        amount."""
        self._files, self._slots, self._reports = files, slots, reports
        self._num_ranks = num_ranks
        self._reads: SimpleQueue[_Job] = SimpleQueue()
        self._writes: SimpleQueue[_Job] = SimpleQueue()
        self._deadline_s: float | None = None  # None: `close` has not been called
        self._keeper: KeeperProcess | None = None
        self._num_unseen = 0  # bytes written since room was last requested
        self._logged: set[str] = set()
        self._threads = [self._start(self._read_all, f"kv-read-{number}") for number in range(NUM_READERS)]
        self._threads.append(self._start(self._write_all, "kv-write"))

    def keep(self) -> None:
        """Look after the directory: report the files of other processes, and make room."""
        self._keeper = KeeperProcess(self._files, self._reports.fileno(), _LOOK_S)
        self._threads.append(self._start(self._keeper.run, "kv-files"))

    def read(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        for start in range(0, len(blocks), _AT_ONCE):
            self._reads.put(blocks[start : start + _AT_ONCE])

    def write(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        for block in blocks:
            self._writes.put([block])

    def close(self) -> None:
        """Let work in progress finish, and write the remaining blocks as far as time allows."""
        self._deadline_s = time.monotonic() + _LAST_WRITES_S
        for _ in range(NUM_READERS):
            self._reads.put(None)
        self._writes.put(None)
        if self._keeper is not None:
            self._keeper.close()
        for thread in self._threads:
            thread.join(2 * _LAST_WRITES_S)

    def _start(self, work: Callable[[], None], name: str) -> threading.Thread:
        def run() -> None:
            with contextlib.suppress(BrokenPipeError):  # the engine has ended, and this process ends with it
                work()

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def _read_all(self) -> None:
        while (blocks := self._reads.get()) is not None:
            if self._deadline_s is None:
                self._reports.results(KVReportKind.READ, [(slot, self._read(slot, digest)) for slot, digest in blocks])

    def _read(self, slot: int, digest: bytes) -> bool:
        path = path_of(self._files.path, digest)
        try:
            read_block(self._files.path, digest, self._slots[slot].data)
            return True
        except FileNotFoundError:
            self._log_once("missing", path, "this process or another one has removed it")
        except DamagedFileError as error:
            self._log_once("damaged", path, f"{error}; it is removed")
            self._files.remove(digest)
        except OSError as error:
            self._log_once("unreadable", path, str(error.strerror))
        return False

    def _write_all(self) -> None:
        while (blocks := self._writes.get()) is not None:
            if self._deadline_s is None or time.monotonic() < self._deadline_s:
                self._reports.results(
                    KVReportKind.WRITTEN, [(slot, self._write(slot, digest)) for slot, digest in blocks]
                )

    def _write(self, slot: int, digest: bytes) -> bool:
        try:
            try:
                size = write_block(self._files.path, digest, self._slots[slot].data)
            except FileNotFoundError:  # somebody has emptied the directory
                self._files.make_folders()
                size = write_block(self._files.path, digest, self._slots[slot].data)
        except OSError as error:
            self._log_once("unwritable", str(self._files.path), str(error.strerror))
            return False
        self._num_unseen += size * self._num_ranks
        if self._keeper is not None and self._num_unseen > _ROOM_SHARE * self._files.max_bytes:
            self._num_unseen = 0
            self._keeper.make_room()
        return True

    def _log_once(self, kind: str, path: str, cause: str) -> None:
        if kind not in self._logged:
            self._logged.add(kind)
            logger.warning("event=kv_offload_failed kind=%s path=%r cause=%r once=true", kind, path, cause)


_MEASURED_BYTES = 32 << 20


class RankOffload:
    """KV offload of one rank: call `start`, then `run_copies` for each step that has copies, then `close`."""

    def __init__(self, config: WorkerConfig, pages: Sequence[LayerKV], facts: dict[str, str], rank: int) -> None:
        """Allocate the slots, and measure the directory. `config` is resolved. `pages`: of all layers of this rank.
        `facts`: with `config`, they determine the content of the pages. Raises `StartupError`."""
        assert config.kv_offload_bytes is not None
        num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
        size, self._rank, self._num_ranks = bytes_per_block(pages), rank, num_ranks
        num_slots = config.kv_offload_bytes // size
        if num_slots < 2:
            raise StartupError(
                f"kv_offload_memory {human_bytes(config.kv_offload_bytes)} is too little: a block of this model takes "
                f"{human_bytes(size)} on each rank.",
                f"Raise --kv-offload-memory to at least {-(-2 * size // 2**20)}MiB; a few hundred blocks are sensible.",
            )
        self._slots = make_slots(pages, num_slots)
        self._files: BlockDirectory | None = None
        self._threads: FileThreads | None = None
        speed, max_bytes = None, 0
        if config.kv_offload_path is not None:
            assert config.kv_offload_disk_bytes is not None
            max_bytes = config.kv_offload_disk_bytes
            try:
                self._files = BlockDirectory(config.kv_offload_path, kv_key(config, **facts), rank, max_bytes)
                speed = self._bytes_read_per_s(min(num_slots, max(2, _MEASURED_BYTES // size)))
            except OSError as error:
                raise StartupError(
                    f"kv_offload_path {config.kv_offload_path} cannot be used: {error.strerror}.",
                    "Give a directory that this user can write, on a disk with free space.",
                ) from None
        self.info = KVOffloadInfo(num_slots, size, speed, num_ranks, max_bytes)

    def _bytes_read_per_s(self, num_blocks: int) -> float:
        """Measure the reading speed in bytes per second with `num_blocks` files, which are written for it and then read
        from the disk in the same way as blocks."""
        assert self._files is not None
        path, slots = self._files.path, [slot.data for slot in self._slots.memory[:num_blocks]]
        names = [urandom(DIGEST_BYTES) for _ in slots]
        try:
            for digest in names:
                write_block(path, digest, slots[0])
                drop_from_cache(path, digest)
            with ThreadPoolExecutor(NUM_READERS) as readers:
                begun = time.perf_counter()
                list(readers.map(partial(read_block, path), names, slots))
                seconds = time.perf_counter() - begun
        finally:
            for digest in names:
                self._files.remove(digest)
        return num_blocks * self._slots.memory.shape[1] / seconds

    def start(self, reports: KVReportSender) -> None:
        if self._files is not None:
            self._threads = FileThreads(self._files, self._slots.memory, reports, num_ranks=self._num_ranks)
            if self._rank == 0:
                self._threads.keep()

    def run_copies(self, step: StepMetadata) -> None:
        """Make or begin all copies of `step`."""
        digests = step.kv_digests
        copies = enumerate(step.kv_copies.tolist())
        for kind, some in groupby(copies, key=lambda copy: copy[1][0]):
            run = list(some)
            if kind == Copy.SAVE:
                self._slots.save([block for _, (_, block, _) in run], [slot for _, (_, _, slot) in run])
            elif kind == Copy.LOAD:
                slot_of = {block: slot for _, (_, block, slot) in run}  # the last copy to a block wins
                self._slots.load(list(slot_of.values()), list(slot_of))
            else:
                assert self._threads is not None
                work = self._threads.write if kind == Copy.WRITE else self._threads.read
                work([(slot, digests[index].tobytes()) for index, (_, _, slot) in run])

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()
