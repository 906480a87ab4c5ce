"""Ranks whose steps and answers are written down on the way: a `Executor` around another one.

A step is written before the ranks get it, so that the step that kills them is in the file. Serving never suffers from
it: when the file reaches its limit or the disk is full, recording stops with a line in the log. Without `--record` none
of this exists.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from engine.replay.fingerprint import layout, model_sums, versions
from engine.replay.recording import ANSWER, END, STEP, Header, RecordingWriter
from workers.protocol import FillMasks, StepMetadata, StepOutput, output_bytes, pack_output, pack_step, step_bytes

if TYPE_CHECKING:
    from workers.executor import Executor

logger = logging.getLogger("oarlock.engine")

_FIRST_BUFFER_BYTES = 1 << 16


class RecordingGroup:
    """Does what `group` does, and remembers it. Closing it closes both."""

    def __init__(self, group: "Executor", writer: RecordingWriter, limit_bytes: int | None) -> None:
        self.info = group.info
        self.config = group.config
        self._group = group
        self._writer: RecordingWriter | None = writer
        self._limit = limit_bytes
        self._buffer = memoryview(bytearray(_FIRST_BUFFER_BYTES))
        header = Header(
            worker=asdict(group.config),
            info=asdict(group.info),
            model=model_sums(Path(group.config.model_path)),
            versions=versions(),
            layout=layout(),
            started=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        self._keep(lambda: writer.write_header(header))
        logger.info('event=recording path="%s" limit_bytes=%s', writer.path, limit_bytes or "none")

    @property
    def rank_pids(self) -> tuple[int, ...]:
        return self._group.rank_pids

    def submit(self, step: StepMetadata, fill_masks: FillMasks | None = None) -> None:
        if self._writer is not None:
            if fill_masks is not None:  # a step without its masks could not be replayed: the ranks wait for them
                fill_masks(step.mask_bits)
                fill_masks = None
            buffer = self._buffer_of(step_bytes(step))
            self._write(STEP, buffer[: pack_step(step, buffer)])
        self._group.submit(step, fill_masks)

    def collect(self) -> StepOutput:
        output = self._group.collect()
        if self._writer is not None:
            buffer = self._buffer_of(output_bytes(output))
            self._write(ANSWER, buffer[: pack_output(output, buffer)])
        return output

    def ping(self) -> None:
        self._group.ping()

    def fileno_for_death(self) -> list[int]:
        return self._group.fileno_for_death()

    def close(self) -> None:
        self._group.close()
        self._stop("the server stopped in order")

    # -- writing

    def _buffer_of(self, size: int) -> memoryview:
        """Room for `size` bytes, kept for the next: the largest step there can be takes hundreds of megabytes."""
        if size > len(self._buffer):
            self._buffer = memoryview(bytearray(1 << (size - 1).bit_length()))
        return self._buffer

    def _write(self, kind: bytes, content: memoryview) -> None:
        writer = self._writer
        assert writer is not None
        if self._limit is not None and writer.size_with(len(content)) > self._limit:
            logger.warning("event=recording_stopped cause=limit limit_bytes=%d serving=on", self._limit)
            self._stop(f"the limit of {self._limit} bytes was reached")
            return
        self._keep(lambda: writer.write(kind, content))

    def _keep(self, write: Callable[[], None]) -> None:
        """A recording is not worth a request: when it cannot be written it ends, and the log says so."""
        try:
            write()
        except OSError as error:
            logger.error('event=recording_stopped cause="%s" serving=on', error.strerror)
            if self._writer is not None:
                self._writer.close()
            self._writer = None

    def _stop(self, why: str) -> None:
        writer, self._writer = self._writer, None
        if writer is None:
            return
        try:
            writer.write(END, why.encode())
        except OSError as error:
            logger.error('event=recording_end_lost cause="%s"', error.strerror)
        writer.close()
