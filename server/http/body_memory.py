"""Memory that requests hold between their first byte and their last event, its limit, and the share of each API key.

While a body arrives, its received bytes count, so a client that only announces a large body takes nothing from others.
Once it is complete, the estimated size of its parsed objects counts too. As soon as its prompts are made, only the part
that still waits for its turn counts. The request releases all of it when it ends. Large bodies leave an eighth of the
memory to small requests, and one key leaves a third of its own use to other keys.
"""

from collections import Counter
from types import TracebackType
from typing import Any, Self

from oarlock.server.errors import HttpError, retry_after

DEFAULT_BYTES = 128 * 2**20
_SMALL = 64 * 1024  # bytes of a small request; larger requests leave an eighth of the memory free
_PART_LEFT = 3  # a key takes at most three times the memory that it leaves free
_RETRY_S = 1.0


class BodyMemory:
    """The bytes held by all requests, and their limit."""

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self.by_client: Counter[str] = Counter()  # label of an API key -> bytes

    def open(self, client: str | None = None) -> "HeldMemory":
        """Begin to count a request. `client`: label of its API key; None: there are no keys, and so no shares."""
        return HeldMemory(self, client)


class HeldMemory:
    """The bytes held by one request."""

    def __init__(self, memory: BodyMemory, client: str | None) -> None:
        self._memory = memory
        self._client = client
        self.num_bytes = 0

    def check(self, num_bytes: int) -> None:
        """Raise `HttpError` (503) unless `num_bytes` more fit. They always fit if no other request holds memory."""
        memory, own = self._memory, self.num_bytes
        limit = memory.max_bytes if own + num_bytes <= _SMALL else memory.max_bytes * 7 // 8
        if memory.num_bytes <= own:
            return
        total = memory.num_bytes + num_bytes
        of_client = 0 if self._client is None else memory.by_client[self._client] + num_bytes
        if total > limit or of_client > _PART_LEFT * (memory.max_bytes - total):
            whose = "your API key" if total <= limit else "other requests"
            message = (
                f"The bodies of {whose} use all the memory for request bodies ({memory.max_bytes} bytes, "
                "--body-memory). Retry in a moment."
            )
            raise HttpError(503, message, code="body_memory_full", headers=retry_after(_RETRY_S))

    def add(self, num_bytes: int) -> None:
        """Count more bytes. Raises `HttpError` (503) if they do not fit."""
        self.check(num_bytes)
        self._count(num_bytes)

    def resize(self, num_bytes: int) -> None:
        """Count `num_bytes` from now on. Raises `HttpError` (503) if these are more than before and do not fit."""
        if num_bytes > self.num_bytes:
            self.check(num_bytes - self.num_bytes)
        self._count(num_bytes - self.num_bytes)

    def close(self) -> None:
        """Release all bytes of the request."""
        self._count(-self.num_bytes)

    def _count(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._memory.num_bytes += num_bytes
        if self._client is not None:
            self._memory.by_client[self._client] += num_bytes
            if not self._memory.by_client[self._client]:
                del self._memory.by_client[self._client]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def held_by(scope: Any, memory: BodyMemory, client: str | None) -> HeldMemory:
    """Return the memory of the request of `scope`. The middleware releases it when the request ends."""
    held = scope["state"].get("held")
    if held is None:
        held = scope["state"]["held"] = memory.open(client)
    return held
