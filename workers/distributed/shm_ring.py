"""A ring of fixed slots in anonymous shared memory: one writer, N readers, no copying, no pickling.

    header   one cache line for each of N readers: the newest message that it has finished, and how long it worked
             on the last message that it timed
    slots    num_slots x slot_bytes

The writer fills a slot in place and wakes each reader with one byte through its pipe. A blocked reader uses no
processor time. A message may come in two parts: the reader is woken for the first part, and waits for the rest only if
it needs it. The writer sends the rest before the next message. The memory has no name, so a crash leaves no segment
behind. End-of-file on the pipe means that the writer has ended. Message n is in slot n % num_slots, which may be
overwritten once every reader has finished the message.

Does not know the meaning of the bytes.
"""

import contextlib
import mmap
import os
import select
import tempfile
import time
from collections.abc import Generator
from dataclasses import asdict, dataclass

from oarlock.workers.distributed.shm_layout import STORES_KEEP_ORDER, fence

_LINE = 64  # bytes; one counter per cache line, so that readers do not disturb each other
_PAGE = 4096
_LOOK_EVERY_MS = 1
# Values of the byte in the pipe.
_WHOLE, _FIRST_PART, _REST = b"\1", b"\2", b"\3"


class ChannelClosedError(Exception):
    """The other side is gone."""


def anonymous_memory(size: int) -> int:
    """Return a file descriptor of `size` zeroed bytes without a path. It can be inherited and mapped elsewhere."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("oarlock", os.MFD_CLOEXEC)
    else:  # not Linux: an unlinked temporary file maps just as well
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, size)
    return fd


@dataclass(frozen=True, slots=True)
class RingLayout:
    """The sizes that both sides must know; sent as JSON."""

    num_readers: int
    slot_bytes: int
    num_slots: int = 4

    def __post_init__(self) -> None:
        if self.slot_bytes % _PAGE:
            raise ValueError(f"slot_bytes must be a multiple of {_PAGE}, got {self.slot_bytes}")

    @property
    def header_bytes(self) -> int:
        return (self.num_readers * _LINE + _PAGE - 1) // _PAGE * _PAGE

    @property
    def total_bytes(self) -> int:
        return self.header_bytes + self.num_slots * self.slot_bytes

    def to_fields(self) -> dict[str, int]:
        return asdict(self)

    @staticmethod
    def holding(message_bytes: int, num_readers: int, in_flight: int = 1) -> "RingLayout":
        """Return a layout whose slots hold messages of up to `message_bytes`, with at most `in_flight` messages, or 2
        if that is more."""
        slot_bytes = (message_bytes + _PAGE - 1) // _PAGE * _PAGE
        return RingLayout(num_readers, slot_bytes, max(2, in_flight) + 2)


class _Mapping:
    """The mapped memory, on either side."""

    def __init__(self, memory_fd: int, layout: RingLayout) -> None:
        self.layout = layout
        self._map = mmap.mmap(memory_fd, layout.total_bytes)
        self._bytes = memoryview(self._map)
        self._counters = self._bytes[: layout.num_readers * _LINE].cast("Q")  # counter of reader r at index 8 r
        starts = range(layout.header_bytes, layout.total_bytes, layout.slot_bytes)
        self._slots = [self._bytes[start : start + layout.slot_bytes] for start in starts]
        self._num_slots = layout.num_slots
        self._message = 0  # number of the newest message that was sent or received

    def _unmap(self) -> None:
        self._counters.release()
        self._bytes.release()
        # If the caller still holds an array over a slot, the pages are unmapped when the process ends.
        with contextlib.suppress(BufferError):
            for slot in self._slots:
                slot.release()
            self._map.close()


class RingWriter(_Mapping):
    """The writing side. Owns the write ends of the pipes."""

    def __init__(self, memory_fd: int, wake_fds: list[int], layout: RingLayout) -> None:
        super().__init__(memory_fd, layout)
        self._wake_fds = wake_fds
        self._lacks_rest = False  # whether the last message is incomplete

    def next_slot(self) -> memoryview:
        """Return the slot of the next message, to fill before `publish`. Without `publish` nothing is sent.

        Raises `RuntimeError` if a reader still holds the slot because more messages are in flight than there are slots.
        """
        assert not self._lacks_rest, "the rest of the last message was not sent"
        message = self._message + 1
        for reader in range(len(self._wake_fds)):
            if self._counters[reader * _LINE // 8] + self._num_slots < message:
                raise RuntimeError(f"reader {reader} has not finished message {message - self._num_slots}")
        if not STORES_KEEP_ORDER:
            fence()  # the slot is written after the counters were read
        return self._slots[message % self._num_slots]

    def publish(self, *, rest_follows: bool = False) -> None:
        """Send the content of the next slot, and wake every reader. With `rest_follows`, `send_rest` must come before
        the next message. Raises `ChannelClosedError` if a reader is gone."""
        self._message += 1
        self._lacks_rest = rest_follows
        self._wake(_FIRST_PART if rest_follows else _WHOLE)

    @contextlib.contextmanager
    def send(self, *, rest_follows: bool = False) -> Generator[memoryview]:
        """Yield the next slot to fill, and publish it on leaving. Raises as `next_slot` and `publish` do."""
        yield self.next_slot()
        self.publish(rest_follows=rest_follows)

    @contextlib.contextmanager
    def send_rest(self) -> Generator[memoryview]:
        """Yield the slot of the last message again, and wake the readers for the rest of it on leaving."""
        assert self._lacks_rest, "the last message is complete"
        yield self._slots[self._message % self._num_slots]
        self._lacks_rest = False
        self._wake(_REST)

    def _wake(self, kind: bytes) -> None:
        for reader, fd in enumerate(self._wake_fds):
            try:
                os.write(fd, kind)
            except OSError as error:
                raise ChannelClosedError(f"reader {reader} is gone") from error

    def finished(self, reader: int) -> int:
        """Return the number of the newest message that `reader` has finished."""
        return self._counters[reader * _LINE // 8]

    def durations(self) -> list[int]:
        """Return the duration that each reader has noted last, in nanoseconds; 0: none yet."""
        return self._counters[1 :: _LINE // 8].tolist()

    @property
    def sent(self) -> int:
        return self._message

    @property
    def has_room(self) -> bool:
        """Whether every reader has finished the slot of the next message."""
        oldest = self._message + 1 - self._num_slots
        return all(self.finished(reader) >= oldest for reader in range(len(self._wake_fds)))

    def wait_for_room(self, timeout_s: float) -> None:
        """Block until every reader has finished the slot of the next message. Readers send nothing back, so this polls.
        It is for writers that seldom have to wait.

        Raises `ChannelClosedError` if a reader is gone and `TimeoutError` after `timeout_s`.
        """
        if self.has_room:
            return
        gone = select.poll()
        for fd in self._wake_fds:
            gone.register(fd, 0)  # poll always reports an error, here that the read end was closed
        give_up_s = time.monotonic() + timeout_s
        while not self.has_room:
            if gone.poll(_LOOK_EVERY_MS):
                raise ChannelClosedError("a reader is gone")
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"no reader has finished a message within {timeout_s} s")

    def close(self) -> None:
        for fd in self._wake_fds:
            os.close(fd)
        self._wake_fds = []
        self._unmap()


class RingReader(_Mapping):
    """One reading side. `wake_fd` can be given to `select` to wait for several things at once."""

    def __init__(self, memory_fd: int, wake_fd: int, reader: int, layout: RingLayout) -> None:
        super().__init__(memory_fd, layout)
        self.wake_fd = wake_fd
        self._counter = reader * _LINE // 8
        self.lacks_rest = False  # whether the message that was received last is still incomplete

    def receive(self, timeout_s: float | None = None) -> memoryview:
        """Block for the next message and return its slot, which may be overwritten after `finish`.

        Raises `ChannelClosedError` if the writer is gone and `TimeoutError` after `timeout_s`.
        """
        if self.lacks_rest:  # the caller did not wait for the rest of the previous message
            self.wait_for_rest(timeout_s)
        self.lacks_rest = self._next_byte(timeout_s) == _FIRST_PART
        self._message += 1
        return self._slots[self._message % self._num_slots]

    def finish(self) -> None:
        """Let the slot of the message that was received last be overwritten."""
        if not STORES_KEEP_ORDER:
            fence()  # the counter is written after the slot was read
        self._counters[self._counter] = self._message

    @contextlib.contextmanager
    def recv(self, timeout_s: float | None = None) -> Generator[memoryview]:
        """Yield the slot of the next message, and finish it on leaving. Raises as `receive` does."""
        slot = self.receive(timeout_s)
        try:
            yield slot
        finally:
            self.finish()

    def note_duration(self, nanoseconds: int) -> None:
        """Publish to the writer how long this reader has worked on a message."""
        self._counters[self._counter + 1] = nanoseconds

    def wait_for_rest(self, timeout_s: float | None = None) -> None:
        """Block until the message that was received last is complete. Most messages are complete from the start. Raises
        as `receive` does."""
        if self.lacks_rest:
            self._next_byte(timeout_s)
            self.lacks_rest = False

    def _next_byte(self, timeout_s: float | None) -> bytes:
        if timeout_s is not None and not select.select([self.wake_fd], [], [], timeout_s)[0]:
            raise TimeoutError(f"no message within {timeout_s} s")
        kind = os.read(self.wake_fd, 1)
        if not kind:
            raise ChannelClosedError("the writer is gone")
        return kind

    def close(self) -> None:
        os.close(self.wake_fd)
        self._unmap()
