"""The two files of a batch, as in OpenAI's batch API: lines of requests, and lines of responses as they complete.

All requests are checked first, then read line by line. Only the position of each line is kept in memory, since a batch
may have 50,000 lines, and many batches are open. A file of responses that a killed process left is repaired: a torn
last line and responses that another try may change are removed, and all others count as done.
"""

import fcntl
import json
import os
import secrets
from array import array
from collections.abc import Callable, Iterator
from hashlib import blake2b
from io import BufferedRandom
from itertools import count
from pathlib import Path
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.server.json_text import dumps
from oarlock.server.schemas.batches import SHAPE, BatchRequest, WrongBatchError, read_line

ReadLine = Callable[[bytes, int, str], BatchRequest]
_TRANSIENT_STATUSES = (408, 429)  # another try may change these statuses, and all from 500


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
        """Open and check the file. Raises `WrongBatchError` if it cannot be read, has a wrong line, or has an id twice.

        `name`: used in error messages (default: the path). `url`: the URL that every line must have. `max_line`: bytes
        of a line. `read`: parses a line. `is_wanted`: if it returns False, reading ends with an `InterruptedError`.
        """
        self._name = name or str(path)
        self._max_line = max_line
        self._read = read
        self._starts = array("Q")  # start of each request's line, in bytes
        self._sizes = array("L")  # bytes of each request's line
        self._lines = array("L")  # number of each request's line, from 1
        self._ids: dict[bytes, int] | None = {}  # digest of an id -> number of its request
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
        """Return the number of the request with this id, or None. It cannot be called after `forget_ids`."""
        assert self._ids is not None, "ids were forgotten"
        return self._ids.get(_digest(custom_id))

    def forget_ids(self) -> None:
        """Free the memory that only `find` needs, which is most of the object's memory."""
        self._ids = None

    def size_of(self, request: int) -> int:
        """Return the bytes of a request's line."""
        return self._sizes[request]

    def read(self, request: int) -> BatchRequest:
        """Read and return one request. Raises `WrongBatchError` if the file was changed."""
        try:
            line = os.pread(self._file.fileno(), self._sizes[request], self._starts[request])
        except OSError as error:
            raise self._unreadable(error) from None
        return self._read(line, self._lines[request], self._name)

    def close(self) -> None:
        """Close the file. No request can be read afterwards."""
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
                raise WrongBatchError(cause, "Shorten it, or raise --max-body-size.", number, "line_too_long")
            if line.strip():
                if len(self) == max_requests:
                    cause = f"{self._name} contains more than {max_requests} requests."
                    raise WrongBatchError(cause, "Split them into several batches.", number, "too_many_requests")
                self._add(self._read(line, number, self._name), number, url)
                self._starts.append(start)
                self._sizes.append(len(line))
                self._lines.append(number)
            start += len(line)
        if not self._starts:
            raise WrongBatchError(f"{self._name} contains no request.", SHAPE, code="empty_file")

    def _add(self, request: BatchRequest, number: int, url: str | None) -> None:
        assert self._ids is not None
        if url is not None and request.url != url:
            cause = f"Line {number} of {self._name} has url {request.url!r}, but the batch is for {url!r}."
            raise WrongBatchError(cause, "Send requests for other URLs in other batches.", number, "mismatched_url")
        first = self._ids.setdefault(_digest(request.custom_id), len(self))
        if first < len(self):
            raise WrongBatchError(
                f"Lines {self._lines[first]} and {number} of {self._name} have the same custom_id "
                f"{request.custom_id!r:.80}.",
                "Give each request its own custom_id.",
                number,
                "duplicate_custom_id",
            )

    def _unreadable(self, error: OSError) -> WrongBatchError:
        cause = f"The requests in {self._name} cannot be read: {error.strerror}."
        return WrongBatchError(cause, "Give a file of JSON lines.", code="unreadable_file")


def _digest(custom_id: str) -> bytes:
    return blake2b(custom_id.encode("utf-8", "replace"), digest_size=16).digest()


class OutputFile:
    """The file of responses, locked while it is open, so that two processes cannot process the same batch.

    If there is a second file, failed requests go there.
    """

    def __init__(
        self,
        path: Path,
        requests: RequestFile,
        failures: Path | None = None,
        reserve: Callable[[int], None] | None = None,
        *,
        is_private: bool = False,
    ) -> None:
        """Lock and repair the files. Raises `StartupError` if a file is not writable, in use, or for other requests.

        `reserve`: called with a number of bytes before they are written, or below 0 after bytes were cut off; it may
        refuse them with an `OSError`. `is_private`: only this user may read the files. Ids of requests cannot be looked
        up afterwards.
        """
        self.num_done = 0  # requests with a final response
        self.num_failed = 0  # number of these requests that failed
        self.num_dropped = 0  # removed responses: torn, or another try may change them
        self._is_done = bytearray(len(requests))
        self._requests = requests
        self._files: list[_Lines] = []
        try:
            for each in (path, failures):
                if each is not None:
                    mode = 0o600 if is_private else 0o666
                    self._files.append(_Lines(each, reserve or (lambda num_bytes: None), mode))
                    self._files[-1].keep_lines(self._is_kept)
        except BaseException:
            for file in self._files:
                file.abandon()
            raise
        requests.forget_ids()

    def pending(self) -> Iterator[int]:
        """Yield the numbers of requests without a response, in order. Requests that get one meanwhile are left out."""
        number = -1
        while (number := self._is_done.find(0, number + 1)) >= 0:
            yield number

    def write(self, number: int, request: BatchRequest, request_id: str, status: int, body: str) -> None:
        """Write the response to request `number`. `body`: its JSON. A kill at any moment tears at most this line.

        Raises `OSError` if it cannot be written; then the file has no part of it.
        """
        head = dumps({"id": f"batch_req_{request_id}", "custom_id": request.custom_id})[:-1]
        response = f'{{"status_code":{status},"request_id":"{request_id}","body":{body}}}'
        line = f'{head},"response":{response},"error":null}}\n'
        self._files[0 if status == 200 else -1].append(line.encode("utf-8", "replace"))
        self._count(number, is_failed=status != 200)

    def write_incomplete(self, code: str, message: str) -> None:
        """Write a line for each request that has no response and gets none. Raises `OSError` and `WrongBatchError`."""
        for number in self.pending():
            custom_id = self._requests.read(number).custom_id
            line = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id, "response": None}
            line["error"] = {"code": code, "message": message}
            self._files[-1].append(f"{dumps(line)}\n".encode("utf-8", "replace"))
            self._count(number, is_failed=True)

    def close(self) -> None:
        """Flush the written lines to the disk and close the files."""
        for file in self._files:
            file.close()

    def _is_kept(self, line: bytes, path: Path) -> bool:
        """Return whether the line is a response that another try would not change. Raises `StartupError`."""
        entry = _entry(line)
        if entry is None:
            if line.endswith(b"\n") and line.strip():
                raise StartupError(
                    f"{path} contains lines that are not responses of a batch.", "Give another output file."
                )
            self.num_dropped += 1
            return False
        number = self._requests.find(entry["custom_id"])
        if number is None:
            raise StartupError(
                f"{path} contains a response to {entry['custom_id']!r:.80}, which is not a request of this batch.",
                "Give another output file, or the requests that these responses belong to.",
            )
        status = 0 if entry["response"] is None else entry["response"]["status_code"]
        if not status or status in _TRANSIENT_STATUSES or status >= 500:
            self.num_dropped += 1
            return False
        self._count(number, is_failed=status != 200)
        return True

    def _count(self, number: int, *, is_failed: bool) -> None:
        self.num_done += not self._is_done[number]
        self.num_failed += is_failed
        self._is_done[number] = 1


class _Lines:
    """One file of responses, open and locked."""

    def __init__(self, path: Path, reserve: Callable[[int], None], mode: int) -> None:
        self._path = path
        self._reserve = reserve
        self._file = _opened(path, mode)
        self._size = 0  # bytes of whole lines
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise StartupError(
                f"{path} is being written by another process.", "Wait until it ends, or give another output file."
            ) from None

    def keep_lines(self, is_kept: Callable[[bytes, Path], bool]) -> None:
        """Keep the lines for which `is_kept` is true, moved together in place, and cut off the rest."""
        write_at = 0
        self._file.seek(0)
        while line := self._file.readline():
            next_at = self._file.tell()
            if not is_kept(line, self._path):
                continue
            if write_at + len(line) < next_at:  # never writes past the lines that were read
                self._file.seek(write_at)
                self._file.write(line)
                self._file.seek(next_at)
            write_at += len(line)
        dropped = self._file.tell() - write_at
        self._file.truncate(write_at)
        self._file.flush()
        self._reserve(-dropped)
        self._size = write_at

    def append(self, line: bytes) -> None:
        """Append a line. Raises `OSError`; then the file is as before."""
        self._reserve(len(line))
        written = 0
        try:
            while written < len(line):
                written += os.pwrite(self._file.fileno(), line[written:], self._size + written)
        except OSError:
            os.ftruncate(self._file.fileno(), self._size)
            self._reserve(-len(line))
            raise
        self._size += written

    def close(self) -> None:
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        self._file.close()


def _opened(path: Path, mode: int) -> BufferedRandom:
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, mode), "r+b")
    except OSError as error:
        raise StartupError(
            f"The responses cannot be written to {path}: {error.strerror}.", "Give a file in an existing folder."
        ) from None


def _entry(line: bytes) -> dict[str, Any] | None:
    """Return the response in a line, or None if the line is torn or is not a response."""
    try:
        value = json.loads(line)
        response = value["response"]
        is_answered = isinstance(value["error"], dict) if response is None else type(response["status_code"]) is int
        is_answer = isinstance(value["custom_id"], str) and is_answered
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return value if is_answer and line.endswith(b"\n") else None


def usage_of(path: Path) -> dict[str, Any]:
    """Return the tokens of all responses of a file, as the API counts them."""
    prompt = cached = generated = reasoning = 0
    with path.open("rb") as file:
        for line in file:
            usage = json.loads(line)["response"]["body"]["usage"]
            new = "input_tokens" in usage  # field names of the Responses API, else of completions
            prompt += usage["input_tokens" if new else "prompt_tokens"]
            generated += usage.get("output_tokens" if new else "completion_tokens", 0)  # embeddings have none
            cached += usage["input_tokens_details" if new else "prompt_tokens_details"]["cached_tokens"]
            details = usage.get("output_tokens_details" if new else "completion_tokens_details") or {}
            reasoning += details.get("reasoning_tokens", 0)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + generated,
    }
