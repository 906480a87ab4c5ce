"""The file of a batch's answers, as OpenAI's batch API has it: a line of JSON for each, appended as they come.

One that a killed process left is mended: a torn last line and answers that another try may change are removed, and all
others count as done.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Callable, Iterator
from io import BufferedRandom
from pathlib import Path
from typing import Any

from oarlock.engine.errors import StartupError
from oarlock.server.endpoints.batches.request_file import RequestFile
from oarlock.server.endpoints.batches.schema import BatchRequest
from oarlock.server.json_text import dumps

_PASSING = (408, 429)  # and those of 500 and above: another try may have another answer


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
        *,
        is_private: bool = False,
    ) -> None:
        """`reserve`: is told of bytes before they are written, fewer than 0 for what was cut off; it may refuse them
        with an `OSError`. `is_private`: only this user may read them.

        Raises `StartupError` for a file that cannot be written, is in use, or has answers to other requests. Ids are
        not looked up afterwards.
        """
        self.num_done = 0  # requests with an answer that stays
        self.num_failed = 0  # of these
        self.num_dropped = 0  # answers that another try may change, and torn ones
        self._is_done = bytearray(len(requests))
        self._requests = requests
        self._files: list[_Lines] = []
        try:
            for each in (path, failures):
                if each is not None:
                    mode = 0o600 if is_private else 0o666
                    self._files.append(_Lines(each, reserve or (lambda num_bytes: None), mode))
                    self._files[-1].mend(self._stays)
        except BaseException:
            for file in self._files:
                file.abandon()
            raise
        requests.forget_ids()

    def pending(self) -> Iterator[int]:
        """The numbers of requests without an answer, in order; those that get one meanwhile are left out."""
        number = -1
        while (number := self._is_done.find(0, number + 1)) >= 0:
            yield number

    def write(self, number: int, request: BatchRequest, request_id: str, status: int, body: str) -> None:
        """The answer to request `number`. `body`: its JSON. After a kill at any moment, at most this line is torn.

        Raises `OSError` when it cannot be written; then nothing of it is in the file.
        """
        head = dumps({"id": f"batch_req_{request_id}", "custom_id": request.custom_id})[:-1]
        response = f'{{"status_code":{status},"request_id":"{request_id}","body":{body}}}'
        line = f'{head},"response":{response},"error":null}}\n'
        self._files[0 if status == 200 else -1].append(line.encode("utf-8", "replace"))
        self._count(number, is_failed=status != 200)

    def write_unanswered(self, code: str, message: str) -> None:
        """A line for each request that has no answer, and gets none. Raises `OSError` and `WrongBatchError`."""
        for number in self.pending():
            custom_id = self._requests.read(number).custom_id
            line = {"id": f"batch_req_{secrets.token_hex(12)}", "custom_id": custom_id, "response": None}
            line["error"] = {"code": code, "message": message}
            self._files[-1].append(f"{dumps(line)}\n".encode("utf-8", "replace"))
            self._count(number, is_failed=True)

    def close(self) -> None:
        """Flushes what was written to the disk before it returns."""
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
            self.num_dropped += 1
            return False
        number = self._requests.find(answer["custom_id"])
        if number is None:
            raise StartupError(
                f"{path} holds an answer to {answer['custom_id']!r:.80}, which is no request of this batch.",
                "Name another file of answers, or the requests that these belong to.",
            )
        status = 0 if answer["response"] is None else answer["response"]["status_code"]
        if not status or status in _PASSING or status >= 500:
            self.num_dropped += 1
            return False
        self._count(number, is_failed=status != 200)
        return True

    def _count(self, number: int, *, is_failed: bool) -> None:
        self.num_done += not self._is_done[number]
        self.num_failed += is_failed
        self._is_done[number] = 1


class _Lines:
    """One file of answers, open and locked."""

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


def _opened(path: Path, mode: int) -> BufferedRandom:
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, mode), "r+b")
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


def usage_of(path: Path) -> dict[str, Any]:
    """The tokens of all answers of a file, as the API counts them."""
    prompt = cached = generated = thoughts = 0
    with path.open("rb") as file:
        for line in file:
            usage = json.loads(line)["response"]["body"]["usage"]
            new = "input_tokens" in usage  # as responses have it, else as completions
            prompt += usage["input_tokens" if new else "prompt_tokens"]
            generated += usage.get("output_tokens" if new else "completion_tokens", 0)  # none of vectors
            cached += usage["input_tokens_details" if new else "prompt_tokens_details"]["cached_tokens"]
            details = usage.get("output_tokens_details" if new else "completion_tokens_details") or {}
            thoughts += details.get("reasoning_tokens", 0)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached},
        "output_tokens": generated,
        "output_tokens_details": {"reasoning_tokens": thoughts},
        "total_tokens": prompt + generated,
    }
