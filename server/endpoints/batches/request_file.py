"""The file of a batch's requests, as OpenAI's batch API has it: checked whole, then read line by line.

No line stays in memory, and of none more than its place: a batch may have 50,000 lines, and many batches are open.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable
from hashlib import blake2b
from itertools import count
from pathlib import Path

from oarlock.server.endpoints.batches.schema import SHAPE, BatchRequest, WrongBatchError, read_line

ReadLine = Callable[[bytes, int, str], BatchRequest]


class RequestFile:
    """Requests by their number, from 0, in the order of the file."""

    def __init__(
        self,
        path: Path,
        name: str | None = None,
        *,
        url: str | None = None,
        max_requests: int | None = None,
        max_line: int | None = None,
        read: ReadLine = read_line,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """`name`: what errors call it; None: its path. `url`: the only one allowed. `max_line`: bytes of a line.
        `read`: what parses a line. `is_wanted`: when it is not, reading ends with an `InterruptedError`.

        Raises `WrongBatchError` for a file that cannot be read, a wrong line, and an id that is there twice.
        """
        self._name = name or str(path)
        self._max_line = max_line
        self._read = read
        self._starts = array("Q")  # of each request: where its line begins, in bytes
        self._sizes = array("L")  # bytes of its line
        self._lines = array("L")  # number of its line, from 1
        self._ids: dict[bytes, int] | None = {}  # digests of the ids
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise self._unreadable(error) from None
        try:
            self._check(url, max_requests, is_wanted)
        except BaseException as error:
            self.close()
            if isinstance(error, OSError) and not isinstance(error, InterruptedError):
                raise self._unreadable(error) from None
            raise

    def __len__(self) -> int:
        return len(self._starts)

    def find(self, custom_id: str) -> int | None:
        """The request with this id; None: there is none. Not after `forget_ids`."""
        assert self._ids is not None, "ids were forgotten"
        return self._ids.get(_digest(custom_id))

    def forget_ids(self) -> None:
        """Free the memory that `find` needs, which is most of it."""
        self._ids = None

    def size_of(self, request: int) -> int:
        """Bytes of its line."""
        return self._sizes[request]

    def read(self, request: int) -> BatchRequest:
        """One request, read again. Raises `WrongBatchError` where the file was changed."""
        try:
            line = os.pread(self._file.fileno(), self._sizes[request], self._starts[request])
        except OSError as error:
            raise self._unreadable(error) from None
        return self._read(line, self._lines[request], self._name)

    def close(self) -> None:
        """No request is read any more."""
        self._file.close()

    def _check(self, url: str | None, max_requests: int | None, is_wanted: Callable[[], bool]) -> None:
        assert self._ids is not None
        limit, start = -1 if self._max_line is None else self._max_line + 1, 0
        for number in count(1):
            line = self._file.readline(limit)
            if not line:
                break
            if not is_wanted():
                raise InterruptedError
            if self._max_line is not None and len(line) > self._max_line:
                cause = f"Line {number} of {self._name} is longer than {self._max_line} bytes."
                raise WrongBatchError(cause, "Send less, or raise --max-body-size.", number, "line_too_long")
            if line.strip():
                if len(self) == max_requests:
                    cause = f"{self._name} holds more than {max_requests} requests."
                    raise WrongBatchError(cause, "Divide them among several batches.", number, "too_many_requests")
                self._add(self._read(line, number, self._name), number, url)
                self._starts.append(start)
                self._sizes.append(len(line))
                self._lines.append(number)
            start += len(line)
        if not self._starts:
            raise WrongBatchError(f"{self._name} holds no request.", SHAPE, code="empty_file")

    def _add(self, request: BatchRequest, number: int, url: str | None) -> None:
        assert self._ids is not None
        if url is not None and request.url != url:
            cause = f"Line {number} of {self._name} has url {request.url!r}, but the batch is for {url!r}."
            raise WrongBatchError(cause, "Put them into batches of their own.", number, "mismatched_url")
        first = self._ids.setdefault(_digest(request.custom_id), len(self))
        if first < len(self):
            raise WrongBatchError(
                f"Lines {self._lines[first]} and {number} of {self._name} have the same custom_id "
                f"{request.custom_id!r:.80}.",
                "Give each request an id of its own.",
                number,
                "duplicate_custom_id",
            )

    def _unreadable(self, error: OSError) -> WrongBatchError:
        cause = f"The requests {self._name} cannot be read: {error.strerror}."
        return WrongBatchError(cause, "Name a file of JSON lines.", code="unreadable_file")


def _digest(custom_id: str) -> bytes:
    return blake2b(custom_id.encode("utf-8", "replace"), digest_size=16).digest()
