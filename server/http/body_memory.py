"""Memory for the bodies of all requests that are being received or parsed, which no number of connections can exceed.

A body counts as far as it has come, so who only announces a large one takes nothing from others. Large bodies leave a
part of the memory to small ones.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from oarlock.server.errors import HttpError, retry_after

DEFAULT_BYTES = 128 * 2**20
_SMALL = 64 * 1024  # bytes of a body: larger ones leave an eighth of the memory to those
_RETRY_S = 1.0


class BodyMemory:
    """The bytes of all bodies, and their limit."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0

    def open(self) -> HeldBody:
        """A body that begins to come. It counts until the context that it opens is left."""
        return HeldBody(self)


class HeldBody:
    """One body that is being received or parsed."""

    def __init__(self, memory: BodyMemory) -> None:
        self._memory = memory
        self._num_bytes = 0

    def check(self, num_bytes: int) -> None:
        """Raise `HttpError` (503) unless so many more bytes have room. One body alone always has."""
        memory, own = self._memory, self._num_bytes
        limit = memory.max_bytes if own + num_bytes <= _SMALL else memory.max_bytes * 7 // 8
        if memory.num_bytes > own and memory.num_bytes + num_bytes > limit:
            message = (
                f"The bodies of other requests fill the memory for them ({memory.max_bytes} bytes, --body-memory). "
                "Retry in a moment."
            )
            raise HttpError(503, message, code="body_memory_full", headers=retry_after(_RETRY_S))

    def add(self, num_bytes: int) -> None:
        """Count more bytes. Raises `HttpError` (503) when they have no room."""
        self.check(num_bytes)
        self._num_bytes += num_bytes
        self._memory.num_bytes += num_bytes

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._memory.num_bytes -= self._num_bytes
        self._num_bytes = 0
