"""Responses as server-sent events, and responses in one piece. Both stop when the client disconnects.

The JSON inside comes from a `GenerationWriter`.
"""

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, ClassVar, TypeVar

from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import AppStatus, EventSourceResponse, SendTimeoutError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from oarlock.engine.panics import ENDS_TASK
from oarlock.server.errors import ClientGoneError, HttpError, describe
from oarlock.server.http.request_record import FULL_S, RequestRecord
from oarlock.server.llm.generation import Generation
from oarlock.server.llm.loop_turns import turn
from oarlock.server.llm.output_processor import Delta
from oarlock.server.observability.logs import event, logger

PING_INTERVAL_S = 15
_WHOLE_CHARACTERS = 1 << 20  # longest plain response that is sent in one piece, with its length
SEND_TIMEOUT_S = 60.0  # a client that reads nothing for this long is disconnected
_T = TypeVar("_T")
_log = logger("streaming")

# The library would cut every open stream at the first SIGTERM; the supervisor drains instead.
AppStatus.disable_automatic_graceful_drain()


class GenerationWriter(ABC):
    """Serializer of one generation: events for a stream, one body for a plain response."""

    end: ClassVar[bytes] = b""  # the last bytes of every stream

    @property
    @abstractmethod
    def response_id(self) -> str:
        """The `id` of the response."""

    @abstractmethod
    def opening(self, num_choices: int) -> Iterable[bytes]:
        """Return the events that precede any text."""

    @abstractmethod
    def chunk(self, delta: Delta) -> bytes | None:
        """Return the events of one piece, or None if it has nothing to show."""

    @abstractmethod
    def closing(self, generation: Generation) -> Iterable[bytes]:
        """Return the events after the last piece."""

    @abstractmethod
    def failure(self, error: HttpError) -> bytes:
        """Return the event that ends a stream with an error."""

    @abstractmethod
    def whole(self, deltas: Sequence[Sequence[Delta]], generation: Generation) -> Iterator[str]:
        """Yield the plain response, made from all pieces of every choice; a long response in many parts."""


class EventStream(EventSourceResponse):
    """One generation as events. The generation is closed when the stream ends for any reason."""

    def __init__(
        self,
        generation: Generation,
        writer: GenerationWriter,
        headers: Mapping[str, str],
        record: RequestRecord,
    ) -> None:
        super().__init__(
            _events(generation, writer, record),
            headers={"Cache-Control": "no-cache", **headers},
            media_type="text/event-stream",
            ping=PING_INTERVAL_S,
            sep="\n",
            ping_message_factory=lambda: ServerSentEvent(comment="ping", sep="\n"),
            data_sender_callable=self._watch_reader,
        )
        self._generation = generation
        self._record = record
        self._send_began: float | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def timed_send(message: Message) -> None:
            self._send_began = began = time.monotonic()
            await send(message)
            self._send_began = None
            self._record.num_sent += 1
            if (seconds := time.monotonic() - began) > FULL_S:
                self._record.sent_slowly(seconds)

        try:
            await super().__call__(scope, receive, timed_send)
        except SendTimeoutError:
            _log.warning(event("slow_client_dropped", request_id=self._record.request_id, seconds=SEND_TIMEOUT_S))
            abort = scope.get("state", {}).get("abort_connection")
            if abort is not None:
                abort()
        finally:
            self._generation.close()

    async def _send_with_timeout(self, send: Send, message: Message) -> None:
        """Send without the library's timer per chunk: `_watch_reader` is one timer per stream, at a fraction of the
        cost.
        """
        await send(message)

    async def _watch_reader(self) -> None:
        while True:
            await asyncio.sleep(SEND_TIMEOUT_S / 4)
            if self._send_began is not None and time.monotonic() - self._send_began > SEND_TIMEOUT_S:
                raise SendTimeoutError


async def _events(generation: Generation, writer: GenerationWriter, record: RequestRecord) -> AsyncIterator[bytes]:
    """Yield the writer's events for all pieces, then its end marker. An error is one event before the end marker."""
    for opening in writer.opening(len(generation.choices)):
        yield opening
    try:
        async for delta in generation.deltas():
            chunk = writer.chunk(delta)
            if chunk is not None:
                yield chunk
            if not delta.num_tokens:  # part of a long prompt's scores
                await turn()
        for closing in writer.closing(generation):
            yield closing
    except ENDS_TASK:
        raise
    except BaseException as error:  # the status 200 is sent, so an error can only travel inside the stream
        problem = describe(error)
        record.failed(problem)
        unexpected = problem.status == 500 and problem.code is None
        line = event("stream_failed", request_id=record.request_id, status=problem.status, cause=type(error).__name__)
        _log.log(logging.ERROR if problem.status >= 500 else logging.INFO, line, exc_info=unexpected)
        yield writer.failure(problem)
    if writer.end:
        yield writer.end


async def whole_response(parts: Iterator[str], headers: Mapping[str, str]) -> Response:
    """Return a JSON body, written part by part so that other tasks can run. A large body is also sent in parts."""
    written: list[str] = []
    size = 0
    for part in parts:
        if written:
            await turn()
        written.append(part)
        size += len(part)
        if size > _WHOLE_CHARACTERS:
            rest = _in_turns(chain(("".join(written),), parts))
            return StreamingResponse(rest, 200, headers, "application/json")
    return Response("".join(written), 200, headers, "application/json")


async def _in_turns(parts: Iterator[str]) -> AsyncIterator[str]:
    for part in parts:
        yield part
        await turn()


async def until_disconnect(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """Return the result of `work`. Raises `ClientGoneError` as soon as the client closes the connection.

    The framework does not cancel a plain handler, so the two are raced. The body must have been read before.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGoneError
    finally:
        gone.cancel()
        if not task.done():
            task.cancel()
        # The traceback of the task's error refers to this frame. Deleting the task here avoids a cycle that would keep
        # the whole request until the garbage collector finds it.
        del task, gone


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
