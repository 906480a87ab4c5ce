"""Answers the requests of a batch, as many at a time as keep the engine busy, in whatever order they end."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterator

from engine.errors import EngineDeadError, StartupError
from server.config.hub.transfer_rate import in_words
from server.entrypoints.offline.batch_file import AnswerFile, BatchRequest, RequestFile
from server.entrypoints.offline.offline_engine import OfflineEngine
from server.errors import describe, error_bytes
from server.observability.logs import event, logger
from server.protocol.chat_completion import ChatRequest
from server.protocol.completion import CompletionRequest
from server.protocol.request_body import parse, unknown_parameters

_REPORT_S = 1.0
_EXIT_WORKER_DIED = 5
_log = logger("batch")
Report = Callable[[str, float, str], None]  # phase, fraction, detail


class BatchRun:
    """One run over a batch, until every request has an answer."""

    def __init__(
        self, engine: OfflineEngine, requests: RequestFile, answers: AnswerFile, *, strict_parameters: bool
    ) -> None:
        """`strict_parameters`: unknown fields of a request are refused, else counted in `ignored`."""
        self._engine = engine
        self._requests = requests
        self._answers = answers
        self._is_strict = strict_parameters
        self._done_before = len(answers.done)
        self.ignored: Counter[str] = Counter()  # unknown fields of requests

    async def run(self, report: Report) -> None:
        """Raises `StartupError` when the engine dies: what was answered by then is in the file."""
        left = (request for request in self._requests if request.custom_id not in self._answers.done)
        progress = asyncio.create_task(self._report(report, time.monotonic()))
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._engine.num_at_once):
                    group.create_task(self._work(left))
        except BaseExceptionGroup as failures:
            failure = failures.exceptions[0]
            raise self._stopped(failure) if isinstance(failure, EngineDeadError) else failure from None
        finally:
            progress.cancel()

    async def _work(self, left: Iterator[BatchRequest]) -> None:
        for request in left:  # the workers share it: reading a line takes no turn
            request_id = secrets.token_hex(12)
            try:
                status, body = 200, await self._answer(request, request_id)
            except EngineDeadError:
                raise
            except Exception as error:  # as over HTTP: whatever it is, this request's answer says so
                failure = describe(error)
                if failure.status == 500 and failure.code is None:  # a mistake of ours, of which it has no details
                    _log.error(event("request_failed", custom_id=request.custom_id), exc_info=error)
                status, body = failure.status, error_bytes(failure).decode()
            self._answers.write(request, request_id, status, body)

    async def _answer(self, request: BatchRequest, request_id: str) -> str:
        """The JSON that the server would answer with."""
        schema = CompletionRequest if request.url == "/v1/completions" else ChatRequest
        body = parse(schema, request.body)
        self.ignored.update(unknown_parameters(body, self._is_strict))
        if isinstance(body, CompletionRequest):
            return await self._engine.completions.complete(body, request_id)
        return await self._engine.chat_completions.complete(body, request_id)

    async def _report(self, report: Report, begun: float) -> None:
        while True:
            await asyncio.sleep(_REPORT_S)
            done, total = len(self._answers.done), len(self._requests)
            took = time.monotonic() - begun
            words = f"{done} of {total} requests"
            if self._answers.num_failed:
                words += f", {self._answers.num_failed} failed"
            words += f", {self._engine.generation_tokens / took:.0f} tokens/s"
            if done > self._done_before:
                words += f", {in_words((total - done) * took / (done - self._done_before))} left"
            report("answering", done / total, words)

    def _stopped(self, error: EngineDeadError) -> StartupError:
        done, total = len(self._answers.done), len(self._requests)
        return StartupError(
            f"The engine has stopped: {error}. {done} of {total} requests are answered.",
            "The lines above say why, if any. The same command goes on where this stopped.",
            _EXIT_WORKER_DIED,
        )
