"""The files of a batch, as OpenAI's batch API has them: a line of JSON for each request, and one for each answer.

A file of answers is appended to as they come. One that a killed process left is mended: a torn last line and answers
that another try may change are removed, and all others count as done.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import Any

from engine.errors import StartupError
from server.json_text import dumps

URLS = ("/v1/completions", "/v1/chat/completions")
_MEMBERS = ("custom_id", "method", "url", "body")
_PASSING = (408, 429)  # and those of 500 and above: another try may have another answer
_SHAPE = (
    'Each line is {"custom_id": "…", "method": "POST", "url": "/v1/chat/completions", "body": {…}}; '
    "docs/offline.md has an example."
)


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One line of the file of requests."""

    custom_id: str
    url: str
    body: bytes  # JSON

    @staticmethod
    def of(line: bytes, where: str) -> BatchRequest:
        """Raises `StartupError`, which begins with `where`."""
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise StartupError(f"{where} is not valid JSON: {error}.", _SHAPE) from None
        if not isinstance(value, dict):
            raise StartupError(f"{where} is no JSON object.", _SHAPE)
        missing = [name for name in _MEMBERS if name not in value]
        if missing:
            raise StartupError(f"{where} has no '{missing[0]}'.", _SHAPE)
        custom_id, method, url, body = (value[name] for name in _MEMBERS)
        if not isinstance(custom_id, str) or not custom_id:
            raise StartupError(f"{where} has custom_id {custom_id!r:.80}, which is no text.", _SHAPE)
        if method != "POST":
            raise StartupError(f"{where} has method {method!r:.80}, but only POST is known.", _SHAPE)
        if url not in URLS:
            raise StartupError(f"{where} has url {url!r:.80}, which is not served.", f"Served: {', '.join(URLS)}.")
        if not isinstance(body, dict):
            raise StartupError(f"{where} has a body that is no JSON object.", _SHAPE)
        return BatchRequest(custom_id, url, json.dumps(body).encode())


class RequestFile:
    """The file of requests: checked whole when it is opened, then read line by line."""

    def __init__(self, path: Path) -> None:
        """Raises `StartupError` for a file that cannot be read, a wrong line, and an id that is there twice."""
        self._path = path
        self._lines: dict[str, int] = {}  # of each id
        for number, request in self._requests():
            if request.custom_id in self._lines:
                raise StartupError(
                    f"Lines {self._lines[request.custom_id]} and {number} of {path} have the same custom_id "
                    f"{request.custom_id!r:.80}.",
                    "Give each request an id of its own.",
                )
            self._lines[request.custom_id] = number
        if not self._lines:
            raise StartupError(f"{path} holds no request.", _SHAPE)

    def __len__(self) -> int:
        return len(self._lines)

    def __contains__(self, custom_id: str) -> bool:
        return custom_id in self._lines

    def __iter__(self) -> Iterator[BatchRequest]:
        return (request for _, request in self._requests())

    def _requests(self) -> Iterator[tuple[int, BatchRequest]]:
        try:
            with self._path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        yield number, BatchRequest.of(line, f"Line {number} of {self._path}")
        except OSError as error:
            raise StartupError(
                f"The requests {self._path} cannot be read: {error.strerror}.", "Name a file of JSON lines."
            ) from None


class AnswerFile:
    """The file of answers, locked while it is open: two processes must not answer one batch."""

    def __init__(self, path: Path, requests: RequestFile) -> None:
        """Raises `StartupError` for a file that cannot be written, is in use, or has answers to other requests."""
        self._path = path
        self._file = _opened(path)
        self.done: set[str] = set()  # ids with an answer that stays
        self.num_failed = 0  # of these
        self.num_dropped = 0  # answers that another try may change, and a torn one
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._mend(requests)
        except BlockingIOError:
            self._file.close()
            raise StartupError(
                f"{path} is being written by another process.", "Wait for its end, or name another file of answers."
            ) from None
        except BaseException:
            self._file.close()
            raise

    def write(self, request: BatchRequest, request_id: str, status: int, body: str) -> None:
        """One answer. `body`: its JSON. After a kill at any moment, at most this line is torn."""
        head = dumps({"id": f"batch_req_{request_id}", "custom_id": request.custom_id})[:-1]
        response = f'{{"status_code":{status},"request_id":"{request_id}","body":{body}}}'
        self._file.write(f'{head},"response":{response},"error":null}}\n'.encode("utf-8", "replace"))
        self._file.flush()
        self.done.add(request.custom_id)
        self.num_failed += status != 200

    def close(self) -> None:
        """What was written is on the disk when this returns."""
        os.fsync(self._file.fileno())
        self._file.close()

    def _mend(self, requests: RequestFile) -> None:
        """Keep the answers that stay, moved together in place, and cut off the rest."""
        write_at = 0
        self._file.seek(0)
        while line := self._file.readline():
            next_at = self._file.tell()
            answer = _answer(line)
            if answer is None and line.endswith(b"\n") and line.strip():
                raise StartupError(
                    f"{self._path} holds lines that are no answers of a batch.", "Name another file of answers."
                )
            if answer is not None and answer["custom_id"] not in requests:
                raise StartupError(
                    f"{self._path} holds an answer to {answer['custom_id']!r:.80}, which is no request of this batch.",
                    "Name another file of answers, or the requests that these belong to.",
                )
            status = 0 if answer is None else answer["response"]["status_code"]
            if answer is None or status in _PASSING or status >= 500:
                self.num_dropped += 1
                continue
            self.done.add(answer["custom_id"])
            self.num_failed += status != 200
            if self.num_dropped:  # never past what was read
                self._file.seek(write_at)
                self._file.write(line)
                self._file.seek(next_at)
            write_at += len(line)
        self._file.truncate(write_at)
        self._file.seek(write_at)


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
        is_answer = isinstance(value["custom_id"], str) and type(value["response"]["status_code"]) is int
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return value if is_answer and line.endswith(b"\n") else None
