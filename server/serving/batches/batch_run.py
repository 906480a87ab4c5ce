"""Answers the requests of a batch, many at a time, in whatever order they end."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from engine.errors import EngineDeadError, UnavailableError
from server.errors import describe, error_bytes
from server.observability.logs import event, logger
from server.serving.batches.batch_file import AnswerFile, BatchRequest, RequestFile

_PAUSES_S = (0.5, 2.0, 8.0)  # before a request is tried again
_log = logger("batch")
_ResultT = TypeVar("_ResultT")
Answer = Callable[[BatchRequest, str], Awaitable[str]]  # a request and its id; the JSON of the answer


class BatchRun:
    """One run over a batch, until every request has an answer."""

    def __init__(
        self,
        answer: Answer,
        requests: RequestFile,
        answers: AnswerFile,
        disk: ThreadPoolExecutor,
        *,
        num_at_once: int,
        turn: contextlib.AbstractAsyncContextManager[object] | None = None,
    ) -> None:
        """`disk`: of one thread, on which the files are read and written. `turn`: is held while a request is read and
        answered; None: nothing has to be waited for."""
        self._answer = answer
        self._requests = requests
        self._answers = answers
        self._disk = disk
        self._num_at_once = num_at_once
        self._turn = turn or contextlib.nullcontext()
        self.on_answer: Callable[[int], None] = lambda status: None  # is told of each once it is written

    async def run(self) -> None:
        """Raises `EngineDeadError` and `OSError`: what was answered by then is in the file."""
        left = (request for request in self._requests if request.custom_id not in self._answers.done)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self._num_at_once, len(self._requests) - len(self._answers.done))):
                    group.create_task(self._work(left))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _work(self, left: Iterator[BatchRequest]) -> None:
        while True:
            async with self._turn:
                request = await self._on_disk(next, left, None)
                if request is None:
                    return
                request_id = secrets.token_hex(12)
                status, body = await self._answered(request, request_id)
                await self._on_disk(self._answers.write, request, request_id, status, body)
                self.on_answer(status)

    async def _answered(self, request: BatchRequest, request_id: str) -> tuple[int, str]:
        """Its status and body. Raises `EngineDeadError`."""
        try:
            return 200, await self._tried(request, request_id)
        except EngineDeadError:
            raise
        except Exception as error:  # as over HTTP: whatever it is, this request's answer says so
            failure = describe(error)
            if failure.status == 500 and failure.code is None:  # a mistake of ours, of which it has no details
                _log.error(event("request_failed", custom_id=request.custom_id), exc_info=error)
            return failure.status, error_bytes(failure).decode()

    async def _tried(self, request: BatchRequest, request_id: str) -> str:
        """Its answer. What was lost with a replica, or for want of memory, is tried again, but not for ever."""
        for pause_s in _PAUSES_S:
            try:
                return await self._answer(request, request_id)
            except UnavailableError as error:
                if error.code == "aborted":
                    raise
                _log.warning(event("request_tried_again", custom_id=request.custom_id, cause=error.message))
                await asyncio.sleep(pause_s)
        return await self._answer(request, request_id)

    async def _on_disk(self, function: Callable[..., _ResultT], *arguments: object) -> _ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._disk, function, *arguments)
