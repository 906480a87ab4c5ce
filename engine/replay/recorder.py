"""Executor around another one that writes every step and answer to a file (`oarlock serve --record`).

A step and its masks are written before the ranks get them, so that a step which kills them is in the file. When the
file reaches its limit or the disk is full, recording stops with a line in the log, and serving continues.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from oarlock.engine.replay.recording import ANSWER, MASKS, STEP, Header, RecordingWriter
from oarlock.workers.fingerprint import layout, model_sums, versions
from oarlock.workers.protocol import StepMetadata, StepOutput, output_bytes, pack_output, pack_step, step_bytes

if TYPE_CHECKING:
    from oarlock.workers.executor import Executor

logger = logging.getLogger("oarlock.engine")

_FIRST_BUFFER_BYTES = 1 << 16


class RecordingExecutor:
    """Forwards to `executor` and records. Closing it closes both. `limit_bytes`: of the file, None for no limit."""

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
        logger.info('event=recording path="%s" limit_bytes=%s', writer.path, limit_bytes or "none")

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
            self._write(ANSWER, buffer[: pack_output(output, buffer)])
        return output

    def ping(self) -> None:
        self._executor.ping()

    @property
    def kv_reports(self) -> None:
        """No reports: the content of KV files is no function of the steps and cannot be recorded."""

    def fileno_for_death(self) -> list[int]:
        return self._executor.fileno_for_death()

    def end(self, why: str) -> None:
        """Record nothing more, and write why: the engine will answer no more requests."""
        self._stop(why)

    def close(self, failure: Exception | None = None) -> None:
        self._executor.close(failure)
        self._stop("the server stopped in order" if failure is None else f"the engine failed: {failure}")

    # -- writing

    def _buffer_of(self, size: int) -> memoryview:
        """A buffer of at least `size` bytes, reused. It grows as needed: the largest step can have hundreds of MB."""
        if size > len(self._buffer):
            self._buffer = memoryview(bytearray(1 << (size - 1).bit_length()))
        return self._buffer

    def _write(self, kind: bytes, content: bytes | memoryview) -> None:
        writer = self._writer
        assert writer is not None
        if self._limit is not None and writer.size_with(len(content)) > self._limit:
            logger.warning("event=recording_stopped cause=limit limit_bytes=%d serving=on", self._limit)
            self._stop(f"the limit of {self._limit} bytes was reached; the server went on")
            return
        self._guarded(lambda: writer.write(kind, content))

    def _guarded(self, write: Callable[[], None]) -> None:
        """Write; on an `OSError` the recording ends with a line in the log, and serving continues."""
        try:
            write()
        except OSError as error:
            logger.error('event=recording_stopped cause="%s" serving=on', error.strerror)
            self._stop(f"the file could not be written any further ({error.strerror}); the server went on")

    def _stop(self, why: str) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.end(why)
        except OSError as error:
            logger.error('event=recording_end_lost cause="%s"', error.strerror)
        writer.close()
