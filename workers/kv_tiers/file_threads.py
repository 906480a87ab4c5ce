"""Threads of a rank that move blocks between its slots and its files, and tell the engine when they have.

No step waits for them. What fails is logged once for each kind of failure, reported, and tried again with the next
block: the engine then computes what could not be read.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue

import numpy as np

from oarlock.workers.kv_offload import KVReportSender, Report
from oarlock.workers.kv_tiers.block_files import DamagedFileError, path_of, read_block, write_block
from oarlock.workers.kv_tiers.directory import BlockDirectory
from oarlock.workers.kv_tiers.keeper_process import KeeperProcess

logger = logging.getLogger("oarlock.kv_offload")

NUM_READERS = 4
_AT_ONCE = 8  # blocks that one reader reads before it reports
_LOOK_S = 5.0  # between looks at what other processes have written
_ROOM_SHARE = 0.02  # of the limit: after so much is written, room is made again
_LAST_WRITES_S = 1.0  # for what is still to be written when the rank ends

_Job = Sequence[tuple[int, bytes]] | None  # (slot, digest) of each block; None: no more comes


class FileThreads:
    """Threads that read and write files of blocks. `read` and `write` return at once."""

    def __init__(self, files: BlockDirectory, slots: np.ndarray, reports: KVReportSender, *, num_ranks: int) -> None:
        """`slots`: uint8 [slots, bytes of a block]. `num_ranks`: that write as much as this one."""
        self._files, self._slots, self._reports = files, slots, reports
        self._num_ranks = num_ranks
        self._reads: SimpleQueue[_Job] = SimpleQueue()
        self._writes: SimpleQueue[_Job] = SimpleQueue()
        self._deadline_s: float | None = None  # None: no end was asked for
        self._keeper: KeeperProcess | None = None
        self._num_unseen = 0  # bytes that were written since room was asked for
        self._logged: set[str] = set()
        self._threads = [self._start(self._read_all, f"kv-read-{number}") for number in range(NUM_READERS)]
        self._threads.append(self._start(self._write_all, "kv-write"))

    def keep(self) -> None:
        """Look after the directory: tell what other processes have written, and make room."""
        self._keeper = KeeperProcess(self._files, self._reports.fileno(), _LOOK_S)
        self._threads.append(self._start(self._keeper.run, "kv-files"))

    def read(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        for start in range(0, len(blocks), _AT_ONCE):
            self._reads.put(blocks[start : start + _AT_ONCE])

    def write(self, blocks: Sequence[tuple[int, bytes]]) -> None:
        for block in blocks:
            self._writes.put([block])

    def close(self) -> None:
        """Let what was begun come to its end, and write what remains as far as there is time."""
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
                self._reports.results(Report.READ, [(slot, self._read(slot, digest)) for slot, digest in blocks])

    def _read(self, slot: int, digest: bytes) -> bool:
        path = path_of(self._files.path, digest)
        try:
            read_block(self._files.path, digest, self._slots[slot].data)
            return True
        except FileNotFoundError:
            self._log_once("missing", path, "another process or this one has removed it")
        except DamagedFileError as error:
            self._log_once("damaged", path, f"{error}; it is removed")
            self._files.remove(digest)
        except OSError as error:
            self._log_once("unreadable", path, str(error.strerror))
        return False

    def _write_all(self) -> None:
        while (blocks := self._writes.get()) is not None:
            if self._deadline_s is None or time.monotonic() < self._deadline_s:
                self._reports.results(Report.WRITTEN, [(slot, self._write(slot, digest)) for slot, digest in blocks])

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
