"""One batch of `/v1/batches`: its states and times, and the run in which the endpoints process its requests."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from oarlock.engine.errors import EngineDeadError, UnavailableError
from oarlock.engine.panics import ENDS_TASK
from oarlock.server.endpoints.batches.batch_file import OutputFile, RequestFile
from oarlock.server.endpoints.batches.key_shares import KeyLimiter
from oarlock.server.endpoints.chat.serving import OpenAIServingChatCompletion
from oarlock.server.endpoints.completions import OpenAIServingCompletion
from oarlock.server.endpoints.pooling.serving import OpenAIServingEmbedding
from oarlock.server.endpoints.responses.serving import OpenAIServingResponses
from oarlock.server.errors import describe, error_bytes
from oarlock.server.http.body_cost import takes_long
from oarlock.server.http.large_body import LargeBodies
from oarlock.server.http.request_body import ignored_parameters, parse
from oarlock.server.observability.logs import event, logger
from oarlock.server.schemas.batches import BatchRequest
from oarlock.server.schemas.chat import ChatRequest
from oarlock.server.schemas.generation import CompletionRequest, SamplingFields
from oarlock.server.schemas.pooling import EmbeddingRequest
from oarlock.server.schemas.responses import ResponsesRequest
from oarlock.server.schemas.strict_model import StrictModel

OPEN = ("validating", "in_progress", "cancelling", "finalizing")
# Final state of a batch -> the code and message written for its requests that have no response.
UNANSWERED = {
    "expired": ("batch_expired", "This request did not complete before the completion window ended."),
    "cancelled": ("batch_cancelled", "The batch was cancelled before this request completed."),
}
_INTERNAL_FIELDS = ("owner", "label", "window_s", "output_expires_s", "outcome", "written", "counts")
_PAUSES_S = (0.5, 2.0, 8.0)  # pauses before a request is tried again
_log = logger("batch")
_ResultT = TypeVar("_ResultT")
BatchResponder = Callable[[BatchRequest, str], Awaitable[str]]  # (request, its id) -> JSON of the response
_BodyT = TypeVar("_BodyT", bound=StrictModel)
_PriorityT = TypeVar("_PriorityT", SamplingFields, CompletionRequest, ChatRequest, ResponsesRequest, EmbeddingRequest)


@dataclass(slots=True)
class Batch:
    """Description of a batch, which changes over time. Times are whole seconds since the epoch."""

    id: str
    owner: str | None  # name of the API key on the disk; None: there were no keys
    label: str | None  # label of the owning API key; used for fair scheduling after the key has been removed
    endpoint: str
    input_file_id: str
    completion_window: str
    window_s: int
    model: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_expires_s: int | None = None
    status: str = "validating"
    outcome: str | None = None  # the state after `finalizing`
    written: dict[str, str] = field(default_factory=dict)  # kind -> id of a file that is being published
    counts: tuple[int, int, int] = (0, 0, 0)  # requests: all, answered, failed
    errors: list[dict[str, Any]] | None = None
    usage: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    cancelling_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelled_at: int | None = None

    @property
    def is_open(self) -> bool:
        return self.status in OPEN

    def enter(self, status: str) -> None:
        """Change the batch's state, and record the time."""
        self.status = status
        if getattr(self, f"{status}_at", 0) is None:
            setattr(self, f"{status}_at", int(time.time()))

    def kept(self) -> dict[str, Any]:
        """Return the description as it is kept in the directory."""
        return asdict(self)

    def wire(self) -> dict[str, Any]:
        """Return the API's object."""
        members = {name: value for name, value in asdict(self).items() if name not in _INTERNAL_FIELDS}
        total, completed, failed = self.counts
        members["errors"] = None if self.errors is None else {"object": "list", "data": self.errors}
        members["request_counts"] = {"total": total, "completed": completed, "failed": failed}
        return {"object": "batch", **members}


class BatchRun:
    """One run over a batch, until every request has a response."""

    def __init__(
        self,
        respond: BatchResponder,
        requests: RequestFile,
        results: OutputFile,
        disk: ThreadPoolExecutor,
        limiter: KeyLimiter,
    ) -> None:
        """Prepare a run over `requests` that writes into `results`.

        `disk`: executor with one thread, on which the files are read and written. `limiter`: each request holds a
        permit while it is read and answered.
        """
        self._respond = respond
        self._requests = requests
        self._results = results
        self._disk = disk
        self._limiter = limiter
        # Called with the HTTP status of each response after it is written.
        self.on_result: Callable[[int], None] = lambda status: None

    async def run(self) -> None:
        """Run the batch. Raises `EngineDeadError`, `OSError` and `WrongBatchError`.

        Responses written before an error stay in the file.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for number in self._results.pending():
                    num_bytes = self._requests.size_of(number)
                    await self._limiter.acquire(num_bytes)
                    task = group.create_task(self._work(number))
                    task.add_done_callback(lambda _, num_bytes=num_bytes: self._limiter.release(num_bytes))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _work(self, number: int) -> None:
        request = await self._read(number)
        request_id = secrets.token_hex(12)
        status, body = await self._run_to_end(request, request_id)
        await self._on_disk(self._results.write, number, request, request_id, status, body)
        self.on_result(status)

    async def _read(self, number: int) -> BatchRequest:
        """Return a request. If the process that reads long lines is lost, this tries again a few times."""
        for pause_s in _PAUSES_S:
            try:
                return await self._on_disk(self._requests.read, number)
            except UnavailableError as error:
                _log.warning(event("batch_line_reread", line=number, cause=error.message))
                await asyncio.sleep(pause_s)
        return await self._on_disk(self._requests.read, number)

    async def _run_to_end(self, request: BatchRequest, request_id: str) -> tuple[int, str]:
        """Return the status and body of a response. Raises `EngineDeadError`."""
        try:
            return 200, await self._tried(request, request_id)
        except (EngineDeadError, *ENDS_TASK):
            raise
        except BaseException as error:  # as over HTTP, any error becomes the response to this request
            failure = describe(error)
            if failure.status == 500 and failure.code is None:  # a bug in Oarlock; the response has no details
                _log.error(event("request_failed", custom_id=request.custom_id), exc_info=error)
            return failure.status, error_bytes(failure).decode()

    async def _tried(self, request: BatchRequest, request_id: str) -> str:
        """Return the response. If a replica is lost or lacks memory, the request is tried again a few times."""
        for pause_s in _PAUSES_S:
            try:
                return await self._respond(request, request_id)
            except UnavailableError as error:
                if error.code == "aborted":
                    raise
                _log.warning(event("batch_request_retried", custom_id=request.custom_id, cause=error.message))
                await asyncio.sleep(pause_s)
        return await self._respond(request, request_id)

    async def _on_disk(self, function: Callable[..., _ResultT], *arguments: object) -> _ResultT:
        return await asyncio.get_running_loop().run_in_executor(self._disk, function, *arguments)


class BatchEndpoints:
    """The endpoints that process the requests of a batch, without HTTP."""

    def __init__(
        self,
        completions: OpenAIServingCompletion,
        chat_completions: OpenAIServingChatCompletion,
        responses: OpenAIServingResponses,
        embeddings: OpenAIServingEmbedding,
        large_bodies: LargeBodies | None = None,
    ) -> None:
        """Use `large_bodies` to read large bodies; None: the server's own reader, for which others wait."""
        self._completions = completions
        self._chat_completions = chat_completions
        self._responses = responses
        self._embeddings = embeddings
        self._large_bodies = large_bodies or completions.state.large_bodies

    @property
    def ignored(self) -> Counter[str]:
        """Parameters that had no effect: name -> number of requests."""
        return self._completions.state.ignored_parameters.counts

    async def respond(
        self,
        request: BatchRequest,
        request_id: str,
        *,
        owner: str | None = None,
        label: str | None = None,
        priority: int | None = None,
    ) -> str:
        """Return the JSON that the server would respond with. Raises the same errors as the request's endpoint.

        `owner`, `label`: salt and label of the request's API key. `priority`: used if the request sets none.
        """
        if request.url == "/v1/completions":
            completion = _with_priority(await self._read(CompletionRequest, request.body, label), priority)
            return await self._completions.complete(completion, request_id, owner=owner, label=label)
        if request.url == "/v1/responses":
            response = _with_priority(await self._read(ResponsesRequest, request.body, label), priority)
            return await self._responses.complete_one(response, request_id, owner=owner, label=label)
        if request.url == "/v1/embeddings":
            embedding = _with_priority(await self._read(EmbeddingRequest, request.body, label), priority)
            return await self._embeddings.complete(embedding, request_id, owner=owner, label=label)
        chat = _with_priority(await self._read(ChatRequest, request.body, label), priority)
        return await self._chat_completions.complete(chat, request_id, owner=owner, label=label)

    async def _read(self, schema: type[_BodyT], content: bytes, label: str | None) -> _BodyT:
        is_strict = self._completions.settings.strict_parameters
        if takes_long(content):
            body, ignored, _ = await self._large_bodies.read((schema,), content, is_strict)
        else:
            body = parse(schema, content)
            ignored = ignored_parameters(body, is_strict)
        self._completions.report(ignored, label)
        return body


def _with_priority(body: _PriorityT, priority: int | None) -> _PriorityT:
    if priority is not None and "priority" not in body.model_fields_set:
        body.priority = priority
    return body
