"""Recordings of the steps and outputs of ranks: their file format, and the executor that writes one (`--record`).

    magic | record | record | …        record = kind (1 byte), length, CRC-32 of kind and content, content

The first record is the header (JSON). The second has room for the reason why the recording ended. It is blank at first
and overwritten at the end, since a full disk would take no further record. Then come steps and outputs as packed by the
ranks' protocol. Masks that were sent after their step are a separate record between it and the next step: uint32 [G,
W]. Every record is one `write`, so a process that is killed leaves at most one incomplete record, and all records
before it can be read. Nothing is synced to the disk: a power failure may lose more.

Knows bytes and this format. Does not know the meaning of a step.
"""

import contextlib
import fcntl
import json
import logging
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from oarlock.base.errors import StartupError
from oarlock.workers.fingerprint import layout, model_sums, versions
from oarlock.workers.protocol import StepMetadata, StepOutput, output_bytes, pack_output, pack_step, step_bytes
from oarlock.workers.sampling_parameters import STEP_FORMAT

if TYPE_CHECKING:
    from oarlock.workers.executor import Executor


logger = logging.getLogger("oarlock.engine")

FORMAT = STEP_FORMAT
HEADER, STEP, MASKS, OUTPUT, END = b"H", b"S", b"M", b"A", b"E"
_MAGIC = b"oarlock recording\n"
_RECORD = struct.Struct("<cQI")
_END_BYTES = 512
_LARGEST = 1 << 32  # a longer record is a damaged length, not a step


@dataclass(frozen=True, slots=True)
class Header:
    """Facts that a replay needs before the first step. Stored as JSON."""

    worker: dict[str, Any]  # the resolved WorkerConfig
    info: dict[str, Any]  # the WorkerInfo of the ranks
    model: dict[str, str]  # file name -> SHA-256 of config.json and of each safetensors header
    versions: dict[str, str]
    layout: str  # hash of the field names of steps and outputs; steps with another layout cannot be read
    started: str  # UTC, ISO 8601
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class Record:
    kind: bytes
    content: memoryview


class RecordingWriter:
    """Writer of a new file. Raises `StartupError` if the file cannot be created, `OSError` if the disk is full."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.size = 0
        self._end_at: int | None = None  # offset of the room for the reason why it ended
        try:
            # Never overwrites an existing file, which may be the recording of a crash before this start.
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise StartupError(
                f"The recording {path} already exists, and recordings are never overwritten.",
                "Move it, or give --record another name.",
            ) from None
        except OSError as error:
            raise StartupError(
                f"The recording {path} cannot be created: {error.strerror}.",
                "Give --record a path in a writable directory.",
            ) from None
        with contextlib.suppress(OSError):  # without locks in the file system, a reader assumes that the writer is dead
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._put(_MAGIC)

    def write(self, kind: bytes, content: bytes | memoryview) -> None:
        """Write one record. The operating system has it when this returns."""
        self._put(_fixed_part(kind, content), content)

    def write_header(self, header: Header) -> None:
        self.write(HEADER, json.dumps(asdict(header)).encode())
        self.write(END, b" " * _END_BYTES)
        self._end_at = self.size - _RECORD.size - _END_BYTES

    def end(self, why: str) -> None:
        """Write why the recording ended, after the last complete record."""
        os.ftruncate(self._fd, self.size)
        if self._end_at is not None:
            _write_end(self._fd, self._end_at, why)

    def size_with(self, length: int) -> int:
        """Return the file's size after one more record of `length` bytes."""
        return self.size + _RECORD.size + length

    def close(self) -> None:
        os.close(self._fd)

    def discard(self) -> None:
        """Close and remove the file, because nothing was recorded."""
        self.close()
        os.unlink(self.path)

    def _put(self, *parts: bytes | memoryview) -> None:
        left = sum(len(part) for part in parts)
        written = os.writev(self._fd, parts)
        if written < left:  # a nearly full disk takes a part; the next call then raises
            rest = b"".join(parts)[written:]
            while rest:
                rest = rest[os.write(self._fd, rest) :]
        self.size += left


def _fixed_part(kind: bytes, content: bytes | memoryview) -> bytes:
    return _RECORD.pack(kind, len(content), zlib.crc32(content, zlib.crc32(kind)))


def _write_end(fd: int, offset: int, why: str) -> None:
    content = why.encode()[:_END_BYTES].decode(errors="ignore").encode().ljust(_END_BYTES)
    os.pwrite(fd, _fixed_part(END, content) + content, offset)


def end_of_killed(path: str, why: str) -> None:
    """Write why a recording ended whose writer was killed, unless a reason was written before."""
    blank = b" " * _END_BYTES
    try:
        with open(path, "r+b") as file:
            file.seek(len(_MAGIC))
            _, length, _ = _RECORD.unpack(file.read(_RECORD.size).ljust(_RECORD.size, b"\0"))
            offset = file.seek(length, os.SEEK_CUR)
            if file.read(_RECORD.size + _END_BYTES) == _fixed_part(END, blank) + blank:
                _write_end(file.fileno(), offset, why)
    except (OSError, OverflowError) as error:  # moved away meanwhile, or it is another file
        logger.warning('event=recording_end_not_written path="%s" cause="%s"', path, error)


class Recording:
    """A recording opened for reading. Raises `StartupError` if the file is not a recording of this version."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.torn: str | None = None  # description of an incomplete or damaged record, known after `records`
        self.end: str | None = None  # why the recording ended, known after `records`; None: it was not closed
        file = _open(path)
        with file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise StartupError(f"{path} is not a recording.", "Give a file that `oarlock serve --record` wrote.")
            first = next(self._records_from(file), None)
            if first is None or first.kind != HEADER:
                raise StartupError(
                    f"{path} is incomplete or damaged within its header.", "Record again; nothing can be replayed."
                )
        self.header = _read_header(path, bytes(first.content))

    @property
    def is_being_written(self) -> bool:
        """Whether the server that writes it still runs."""
        with _open(self.path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            except OSError:  # a file system without locks
                return False
        return False

    @property
    def size(self) -> int:
        return Path(self.path).stat().st_size

    def records(self) -> Iterator[Record]:
        """Yield steps, masks and outputs in order, up to the first incomplete or damaged record. Sets `torn` and
        `end`."""
        with _open(self.path) as file:
            file.seek(len(_MAGIC))
            for record in self._records_from(file):
                if record.kind == END:
                    self.end = bytes(record.content).decode().strip() or None
                elif record.kind != HEADER:
                    yield record

    def _records_from(self, file: BinaryIO) -> Iterator[Record]:
        while fixed := file.read(_RECORD.size):
            position = file.tell() - len(fixed)
            if len(fixed) < _RECORD.size:
                self.torn = f"its last record, at byte {position}, is incomplete"
                return
            kind, length, checksum = _RECORD.unpack(fixed)
            # `read` returns no more bytes than there are: a damaged length must not allocate all memory.
            content = bytearray(file.read(length) if length <= _LARGEST else b"")  # writable, like ring slots
            if len(content) < length:
                self.torn = f"its last record, at byte {position}, is incomplete"
                return
            if checksum != zlib.crc32(content, zlib.crc32(kind)):
                if kind == END:  # its writer was killed while it overwrote it: the rest is complete
                    continue
                self.torn = f"the record at byte {position} is damaged (checksum)"
                return
            yield Record(kind, memoryview(content))


def _open(path: str) -> BinaryIO:
    try:
        return open(path, "rb")
    except OSError as error:
        raise StartupError(f"{path} cannot be read: {error.strerror}.", "Check the path of the recording.") from None


def _read_header(path: str, content: bytes) -> Header:
    try:
        fields = json.loads(content)
        if fields.get("format") != FORMAT:
            raise StartupError(
                f"{path} has recording format {fields.get('format')}, but this version reads format {FORMAT}.",
                f"Replay it with the version that wrote it: oarlock {fields.get('versions', {}).get('oarlock', '?')}.",
            )
        return Header(**fields)
    except (ValueError, TypeError, AttributeError):
        raise StartupError(
            f"{path} has a header that cannot be read.", "Record again; nothing can be replayed."
        ) from None


_FIRST_BUFFER_BYTES = 1 << 16


class RecordingExecutor:
    """Executor that forwards to `executor` and records. Closing it closes both. `limit_bytes`: of the file; None: none.

    A step and its masks are written before the ranks get them, so that a step which kills them is in the file. If the
    file reaches its limit or the disk is full, recording stops with a line in the log, and serving continues.
    """

    def __init__(self, executor: "Executor", writer: RecordingWriter, limit_bytes: int | None) -> None:
        self.info = executor.info
        self.config = executor.config
        self.max_in_flight = executor.max_in_flight
        self.best_in_flight = executor.best_in_flight
        self._executor = executor
        self._writer: RecordingWriter | None = writer
        self._limit = limit_bytes
        self._buffer = memoryview(bytearray(_FIRST_BUFFER_BYTES))
        header = Header(
            worker=asdict(executor.config),
            info=asdict(executor.info),
            model=model_sums(Path(executor.config.model_path)),
            versions=versions(),
            layout=layout(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self._guarded(lambda: writer.write_header(header))
        logger.info('event=recording_started path="%s" limit_bytes=%s', writer.path, limit_bytes or "none")

    @property
    def rank_pids(self) -> tuple[int, ...]:
        return self._executor.rank_pids

    @property
    def step_times_ns(self) -> Sequence[int]:
        return self._executor.step_times_ns

    def submit(self, step: StepMetadata, *, masks_follow: bool = False) -> None:
        if self._writer is not None:
            buffer = self._buffer_of(step_bytes(step))
            self._write(STEP, buffer[: pack_step(step, buffer)])
        self._executor.submit(step, masks_follow=masks_follow)

    def send_masks(self, bits: np.ndarray) -> None:
        if self._writer is not None:
            self._write(MASKS, bits.astype("<u4").tobytes())
        self._executor.send_masks(bits)

    def collect(self) -> StepOutput:
        output = self._executor.collect()
        if self._writer is not None:
            buffer = self._buffer_of(output_bytes(output))
            self._write(OUTPUT, buffer[: pack_output(output, buffer)])
        return output

    def ping(self) -> None:
        self._executor.ping()

    @property
    def kv_reports(self) -> None:
        """No reports: the content of KV files is not a function of the steps and cannot be recorded."""

    def fileno_for_death(self) -> list[int]:
        return self._executor.fileno_for_death()

    def end(self, why: str) -> None:
        """Stop recording, and write why: the engine will process no more requests."""
        self._stop(why)

    def close(self, failure: Exception | None = None) -> None:
        self._executor.close(failure)
        self._stop("the server stopped normally" if failure is None else f"the engine failed: {failure}")

    # -- writing

    def _buffer_of(self, size: int) -> memoryview:
        """Return a buffer of at least `size` bytes, reused. It grows as needed: the largest step can have hundreds of
        MB."""
        if size > len(self._buffer):
            self._buffer = memoryview(bytearray(1 << (size - 1).bit_length()))
        return self._buffer

    def _write(self, kind: bytes, content: bytes | memoryview) -> None:
        writer = self._writer
        assert writer is not None
        if self._limit is not None and writer.size_with(len(content)) > self._limit:
            logger.warning("event=recording_stopped cause=limit limit_bytes=%d serving=continues", self._limit)
            self._stop(f"the limit of {self._limit} bytes was reached; serving continued")
            return
        self._guarded(lambda: writer.write(kind, content))

    def _guarded(self, write: Callable[[], None]) -> None:
        """Write. On an `OSError` the recording ends with a line in the log, and serving continues."""
        try:
            write()
        except OSError as error:
            logger.error('event=recording_stopped cause="%s" serving=continues', error.strerror)
            self._stop(f"the file could not be written ({error.strerror}); serving continued")

    def _stop(self, why: str) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.end(why)
        except OSError as error:
            logger.error('event=recording_end_not_written cause="%s"', error.strerror)
        writer.close()
