"""The files of a batch, as OpenAI's batch API has them: a line of JSON for each request, and one for each answer.

A file of answers is appended to as they come. One that a killed process left is mended: a torn last line and answers
that another try may change are removed, and all others count as done.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedRandom
from itertools import count
from pathlib import Path
from typing import Any

from engine.errors import StartupError
from server.json_text import dumps

URLS = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/embeddings")
_MEMBERS = ("custom_id", "method", "url", "body")
_PASSING = (408, 429)  # and those of 500 and above: another try may have another answer
_SHAPE = (
    'Each line is {"custom_id": "…", "method": "POST", "url": "/v1/chat/completions", "body": {…}}; '
    "docs/offline.md has an example."
)


class WrongBatchError(StartupError):
    """The file of requests is wrong. `line`: the first wrong one, from 1, if it is one; `code`: for programs."""

    def __init__(self, cause: str, fix: str, line: int | None = None, code: str = "invalid_json_line") -> None:
        super().__init__(cause, fix)
        self.line = line
        self.code = code


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the file of requests."""

    custom_id: str
    url: str
    body: bytes  # JSON

    @staticmethod
    def of(line: bytes, number: int, name: str) -> BatchRequest:
        """Line `number` of the file `name`. Raises `WrongBatchError`."""
        where = f"Line {number} of {name}"
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise WrongBatchError(f"{where} is not valid JSON: {error}.", _SHAPE, number) from None
        if not isinstance(value, dict):
            raise WrongBatchError(f"{where} is no JSON object.", _SHAPE, number)
        missing = [member for member in _MEMBERS if member not in value]
        if missing:
            raise WrongBatchError(f"{where} has no '{missing[0]}'.", _SHAPE, number, "missing_member")
        custom_id, method, url, body = (value[member] for member in _MEMBERS)
        if not isinstance(custom_id, str) or not custom_id:
            cause = f"{where} has custom_id {custom_id!r:.80}, which is no text."
            raise WrongBatchError(cause, _SHAPE, number, "invalid_custom_id")
        if method != "POST":
            cause = f"{where} has method {method!r:.80}, but only POST is known."
            raise WrongBatchError(cause, _SHAPE, number, "invalid_method")
        if url not in URLS:
            cause = f"{where} has url {url!r:.80}, which is not served."
            raise WrongBatchError(cause, f"Served: {', '.join(URLS)}.", number, "invalid_url")
        if not isinstance(body, dict):
            raise WrongBatchError(f"{where} has a body that is no JSON object.", _SHAPE, number, "invalid_body")
        return BatchRequest(custom_id, url, json.dumps(body).encode())


class RequestFile:
    """The file of requests: checked whole when it is opened, then read line by line."""

    def __init__(
        self,
        path: Path,
        name: str | None = None,
        *,
        url: str | None = None,
        max_requests: int | None = None,
        max_line: int | None = None,
    ) -> None:
        """`name`: what errors call it; None: its path. `url`: the only one allowed. `max_line`: bytes of a line.

        Raises `WrongBatchError` for a file that cannot be read, a wrong line, and an id that is there twice.
        """
        self._path = path
        self._name = name or str(path)
        self._max_line = max_line
        self._lines: dict[str, int] = {}  # of each id
        for number, request in self._requests():
            if url is not None and request.url != url:
                cause = f"Line {number} of {self._name} has url {request.url!r}, but the batch is for {url!r}."
                raise WrongBatchError(cause, "Put them into batches of their own.", number, "mismatched_url")
            if request.custom_id in self._lines:
                raise WrongBatchError(
                    f"Lines {self._lines[request.custom_id]} and {number} of {self._name} have the same custom_id "
                    f"{request.custom_id!r:.80}.",
                    "Give each request an id of its own.",
                    number,
                    "duplicate_custom_id",
                )
            self._lines[request.custom_id] = number
            if max_requests is not None and len(self._lines) > max_requests:
                cause = f"{self._name} holds more than {max_requests} requests."
                raise WrongBatchError(cause, "Divide them among several batches.", number, "too_many_requests")
        if not self._lines:
            raise WrongBatchError(f"{self._name} holds no request.", _SHAPE, code="empty_file")

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, custom_id: str) -> bool:
        return custom_id in self._lines

    def __iter__(self) -> Iterator[BatchRequest]:
        return (request for _, request in self._requests())

    def ids(self) -> Iterator[str]:
        """Of all requests, in their order."""
        return iter(self._lines)

    def _requests(self) -> Iterator[tuple[int, BatchRequest]]:
        limit = -1 if self._max_line is None else self._max_line + 1
        try:
            with self._path.open("rb") as file:
                for number in count(1):
                    line = file.readline(limit)
                    if not line:
                        return
                    if self._max_line is not None and len(line) > self._max_line:
                        cause = f"Line {number} of {self._name} is longer than {self._max_line} bytes."
                        fix = "Send less, or raise --max-body-size."
                        raise WrongBatchError(cause, fix, number, "line_too_long")
                    if line.strip():
                        yield number, BatchRequest.of(line, number, self._name)
        except OSError as error:
            raise WrongBatchError(
                f"The requests {self._name} cannot be read: {error.strerror}.",
                "Name a file of JSON lines.",
                code="unreadable_file",
            ) from None


class AnswerFile:
    """The file of answers, locked while it is open: two processes must not answer one batch.

    With a second file, what has failed goes there.
    """

    def __init__(
        self,
        path: Path,
        requests: RequestFile,
        failures: Path | None = None,
        reserve: Callable[[int], None] | None = None,
    ) -> None:
        """`reserve`: is told of bytes before they are written, fewer than 0 for what was cut off; it may refuse them
        with an `OSError`.

        Raises `StartupError` for a file that cannot be written, is in use, or has answers to other requests.
        """
        self.done: set[str] = set()  # ids with an answer that stays
        self.num_failed = 0  # of these
        self.num_dropped = 0  # answers that another try may change, and torn ones
        self._requests = requests
        self._files: list[_Lines] = []
        try:
            for each in (path, failures):
                if each is not None:
                    self._files.append(_Lines(each, reserve or (lambda num_bytes: None)))
                    self._files[-1].mend(self._stays)
        except BaseException:
            for file in self._files:
                file.abandon()
            raise

    def write(self, request: BatchRequest, request_id: str, status: int, body: str) -> None:
        """One answer. `body`: its JSON. After a kill at any moment, at most this line is torn.

        Raises `OSError` when it cannot be written; then nothing of it is in the file.
        """
        head = dumps({"id": f"batch_req_{request_id}", "custom_id": request.custom_id})[:-1]
        response = f'{{"status_code":{status},"request_id":"{request_id}","body":{body}}}'
        line = f'{head},"response":{response},"error":null}}\n'
        self._files[0 if status == 200 else -1].append(line.encode("utf-8", "replace"))
        self.done.add(request.custom_id)
        self.num_failed += status != 200

    def write_unanswered(self, code: str, message: str) -> None:
        """A line for each request that has no answer, and gets none. Raises `OSError`."""
        for custom_id in self._requests.ids():
            if custom_id in self.done:
                continue
            line = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id, "response": None}
            line["error"] = {"code": code, "message": message}
            self._files[-1].append(f"{dumps(line)}\n".encode("utf-8", "replace"))
            self.done.add(custom_id)
            self.num_failed += 1

    def close(self) -> None:
        """What was written is on the disk when this returns."""
        for file in self._files:
            file.close()

    def _stays(self, line: bytes, path: Path) -> bool:
        """Whether the line is an answer that another try would not change. Raises `StartupError`."""
        answer = _answer(line)
        if answer is None:
            if line.endswith(b"\n") and line.strip():
                raise StartupError(
                    f"{path} holds lines that are no answers of a batch.", "Name another file of answers."
                )
        elif answer["custom_id"] not in self._requests:
            raise StartupError(
                f"{path} holds an answer to {answer['custom_id']!r:.80}, which is no request of this batch.",
                "Name another file of answers, or the requests that these belong to.",
            )
        status = 0 if answer is None or answer["response"] is None else answer["response"]["status_code"]
        if answer is None or not status or status in _PASSING or status >= 500:
            self.num_dropped += 1
            return False
        self.done.add(answer["custom_id"])
        self.num_failed += status != 200
        return True


class _Lines:
    """One file of answers, open and locked."""

    def __init__(self, path: Path, reserve: Callable[[int], None]) -> None:
        self._path = path
        self._reserve = reserve
        self._file = _opened(path)
        self._size = 0  # bytes of whole lines
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise StartupError(
                f"{path} is being written by another process.", "Wait for its end, or name another file of answers."
            ) from None

    def mend(self, stays: Callable[[bytes, Path], bool]) -> None:
        """Keep the lines that stay, moved together in place, and cut off the rest."""
        write_at = 0
        self._file.seek(0)
        while line := self._file.readline():
            next_at = self._file.tell()
            if not stays(line, self._path):
                continue
            if write_at + len(line) < next_at:  # never past what was read
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
        """Raises `OSError`; then the file is as before."""
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


def _opened(path: Path) -> BufferedRandom:
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    except OSError as error:
        raise StartupError(
            f"The answers cannot be written to {path}: {error.strerror}.", "Name a file in a folder that exists."
        ) from None


def _answer(line: bytes) -> dict[str, Any] | None:
    """None: it is torn, or none of ours."""
    try:
        value = json.loads(line)
        response = value["response"]
        is_answered = isinstance(value["error"], dict) if response is None else type(response["status_code"]) is int
        is_answer = isinstance(value["custom_id"], str) and is_answered
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return value if is_answer and line.endswith(b"\n") else None
