"""Makes the copies of KV blocks beyond the pool that each step orders; decides nothing itself.

Copies between pages and slots are made at once, in the order of the step, before anything else of it; those between
slots and files by threads (`file_threads.py`).
"""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from os import urandom

from oarlock.workers.attention.backend import LayerKV
from oarlock.workers.config import WorkerConfig
from oarlock.workers.errors import StartupError
from oarlock.workers.fingerprint import kv_key
from oarlock.workers.kv_offload import DIGEST_BYTES, Copy, KVOffloadInfo, KVReportSender
from oarlock.workers.kv_tiers.block_files import drop_from_cache, read_block, write_block
from oarlock.workers.kv_tiers.directory import BlockDirectory
from oarlock.workers.kv_tiers.file_threads import NUM_READERS, FileThreads
from oarlock.workers.kv_tiers.host_slots import bytes_per_block, make_slots
from oarlock.workers.platform.host_memory import human_bytes
from oarlock.workers.protocol import StepMetadata

_MEASURED_BYTES = 32 << 20


class RankOffload:
    """KV offload of one rank: call `start`, then `obey` for each step that has copies, then `close`."""

    def __init__(self, config: WorkerConfig, pages: Sequence[LayerKV], facts: dict[str, str], rank: int) -> None:
        """`config` is resolved. `pages`: of all layers of this rank. `facts`: what decides their content beside
        `config`. Raises `StartupError`."""
        assert config.kv_offload_bytes is not None
        num_ranks = config.tensor_parallel_size * config.pipeline_parallel_size
        size, self._rank, self._num_ranks = bytes_per_block(pages), rank, num_ranks
        num_slots = config.kv_offload_bytes // size
        if num_slots < 2:
            raise StartupError(
                f"kv_offload_memory {human_bytes(config.kv_offload_bytes)} is too little: a block of this model takes "
                f"{human_bytes(size)} on each rank.",
                f"Raise --kv-offload-memory to at least {-(-2 * size // 2**20)}MiB; some hundred blocks are sensible.",
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
        """Measures reading with so many files, written for it and read from the disk as files of blocks are."""
        assert self._files is not None
        path, places = self._files.path, [slot.data for slot in self._slots.memory[:num_blocks]]
        names = [urandom(DIGEST_BYTES) for _ in places]
        try:
            for digest in names:
                write_block(path, digest, places[0])
                drop_from_cache(path, digest)
            with ThreadPoolExecutor(NUM_READERS) as readers:
                begun = time.perf_counter()
                list(readers.map(partial(read_block, path), names, places))
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

    def obey(self, step: StepMetadata) -> None:
        """Make or begin all copies of `step`."""
        digests = step.kv_digests
        copies = enumerate(step.kv_copies.tolist())
        for kind, some in groupby(copies, key=lambda copy: copy[1][0]):
            run = list(some)
            if kind == Copy.SAVE:
                self._slots.save([block for _, (_, block, _) in run], [slot for _, (_, _, slot) in run])
            elif kind == Copy.LOAD:
                slot_of = {block: slot for _, (_, block, slot) in run}  # the last one holds
                self._slots.load(list(slot_of.values()), list(slot_of))
            else:
                assert self._threads is not None
                work = self._threads.write if kind == Copy.WRITE else self._threads.read
                work([(slot, digests[index].tobytes()) for index, (_, _, slot) in run])

    def close(self) -> None:
        if self._threads is not None:
            self._threads.close()
