"""One HTTP/1.1 connection: uvicorn's protocol with limits, deadlines and an orderly close.

Heads and the framing of chunked bodies are bounded before they are parsed. Offers to upgrade the protocol are ignored
and the body is kept. Every state has a deadline except while a response is generated. A refusal reaches clients that
are still writing. Pipelined requests wait unparsed: each is parsed in its own iteration of the event loop, so other
connections are served in between.
"""

import asyncio
import math
from collections.abc import Callable
from operator import itemgetter
from typing import Any, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from oarlock.server.errors import HttpError, error_bytes
from oarlock.server.http.request_head import head_error
from oarlock.server.observability.logs import event, logger

HEAD_TIMEOUT_S = 20.0
KEEP_ALIVE_S = 65.0  # above the usual 60 s of proxies, so that they close idle connections before the server does
LINGER_TIMEOUT_S = 20.0  # time to receive the rest of a request that has already been answered
UNREAD_TIMEOUT_S = 90.0  # limit for a client that reads no byte of its response; streams have their own, shorter limit
MAX_HEAD_BYTES = 32 * 1024
MAX_HEAD_FIELDS = 100
MAX_LINGER_BYTES = 256 * 2**20
# requests parsed from one piece of data; their ends are unknown beforehand if they follow a chunked body
_MAX_PIPELINED = 32
_MAX_HELD_BYTES = 64 * 1024  # pipelined bytes that are kept before reading is paused
_MAX_JOINED_BYTES = 64 * 1024  # longest body that is written together with its head
# Limits for the bytes of all connections that clients have not read, or that are not parsed yet. Above
# MAX_UNREAD_BYTES, clients that have read nothing for two seconds are dropped. Above MAX_UNREAD_AT_ALL_BYTES, any
# client may be dropped, beginning with the client that has read nothing for the longest time.
MAX_UNREAD_BYTES = 48 * 2**20
MAX_UNREAD_AT_ALL_BYTES = 160 * 2**20
MAX_UNPARSED_BYTES = 64 * 2**20
_STALLED_S = 2.0
_COUNT_EVERY_BYTES = 8 * 2**20  # unread bytes are counted each time this many bytes were written
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_END_OF_HEAD = b"\r\n\r\n"
_RESERVED = 16  # connections above the limit: they may send probes, every other request gets 503
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}
_log = logger("http")
_FRAMING = frozenset({b"content-length", b"transfer-encoding"})


class Connections(ServerState):
    """All connections of one server, their limit, and the connections that wait for a request."""

    connections: set[Any]

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit
        # connections that wait for a request head, the longest wait first
        self.waiting: dict[BoundedProtocol, None] = {}
        self._num_written = 0  # bytes written since the unread bytes were last counted

    def make_room(self, newcomer: "BoundedProtocol") -> bool:
        """Close the connection that has waited longest for a request. Return whether that makes room."""
        for oldest in self.waiting:
            if oldest is not newcomer and not oldest.transport.get_write_buffer_size():
                del self.waiting[oldest]
                self.connections.discard(oldest)  # no longer counted, although the loop closes it later
                oldest.transport.abort()
                return not oldest.is_crowded
        return False

    def expire(self, now: float) -> None:
        """Handle connections that have passed their deadline. `now`: the loop's clock, in seconds."""
        for connection in [each for each in self.connections if each.deadline < now]:
            connection.expire(now)
        self.bound_unread(now)
        self._bound_unparsed()

    def wrote(self, num_bytes: int, loop: asyncio.AbstractEventLoop) -> None:
        """Count written bytes, and check the unread bytes from time to time."""
        self._num_written += num_bytes
        if self._num_written > _COUNT_EVERY_BYTES:
            self.bound_unread(loop.time())

    def bound_unread(self, now: float) -> None:
        """Drop clients that do not read if the unread responses exceed the limits."""
        self._num_written = 0
        unread = [(each.unread_since(now), each.num_unread, each) for each in self.connections]
        total = sum(num_bytes for _, num_bytes, _ in unread)
        if total <= MAX_UNREAD_BYTES:
            return
        num_dropped = 0
        for since, num_bytes, connection in sorted(unread, key=itemgetter(0)):
            is_dropped = total > MAX_UNREAD_BYTES and now - since > _STALLED_S
            if num_bytes and (is_dropped or total > MAX_UNREAD_AT_ALL_BYTES):
                connection.drop()
                total -= num_bytes
                num_dropped += 1
        if num_dropped:
            _log.warning(event("unread_responses_dropped", connections=num_dropped, unread_bytes=total))

    def _bound_unparsed(self) -> None:
        """Drop the connections with the most unparsed bytes until the total is within its limit."""
        unparsed = [(each.num_unparsed, each) for each in self.connections]
        total = sum(num_bytes for num_bytes, _ in unparsed)
        if total <= MAX_UNPARSED_BYTES:
            return
        num_dropped = 0
        for num_bytes, connection in sorted(unparsed, key=itemgetter(0), reverse=True):
            if total <= MAX_UNPARSED_BYTES:
                break
            connection.drop()
            total -= num_bytes
            num_dropped += 1
        _log.warning(event("unparsed_requests_dropped", connections=num_dropped))


class _CycleTransport:
    """The transport as seen by one response.

    The head is held back until the body begins, so that a short response is a single write. Closing waits for a client
    that is still writing.
    """

    def __init__(
        self,
        transport: asyncio.Transport,
        close: Callable[[], None],
        loop: asyncio.AbstractEventLoop,
        wrote: Callable[[int], None],
    ) -> None:
        self.is_closing = transport.is_closing
        self._transport = transport
        self._wrote = wrote
        self._close = close
        self._loop = loop
        self._head = b""
        self._has_head = False

    def write(self, data: bytes) -> None:
        if self._has_head:
            if self._head and len(data) <= _MAX_JOINED_BYTES:
                data, self._head = self._head + data, b""
            elif self._head:
                self.flush()
            self._send(data)
        elif data == _CONTINUE:
            self._transport.write(data)
        else:
            self._has_head, self._head = True, data
            self._loop.call_soon(self.flush)  # the body may follow much later, or never

    def flush(self) -> None:
        """Write a head that is still held back."""
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._send(head)

    def close(self) -> None:
        self.flush()
        self._close()

    def _send(self, data: bytes) -> None:
        self._transport.write(data)
        self._wrote(len(data))


class BoundedProtocol(HttpToolsProtocol):
    """One connection, with a limit for every head and a deadline in every state except answering."""

    server_state: Connections
    parser: httptools.HttpRequestParser
    deadline = math.inf  # seconds on the loop's clock
    is_crowded = False  # accepted above the limit of connections
    _in_head = False  # waiting for a request head, or in the middle of one
    _lingering = False  # answered and half closed; further bytes are dropped
    _replaying = False  # the parser reads a head for the second time
    _upgrade_offered = False
    _head_problem: str | None = None  # reason to refuse the last head, if any
    _head_size = 0
    _unframed = 0  # bytes since the last complete head, piece of a body, or end of a request
    _num_dropped = 0
    _num_unsent = 0
    num_unread = 0  # unread bytes of responses, at the last count
    _num_written = 0
    _num_read = 0
    _unread_since = 0.0
    _held = b""  # pipelined bytes that are not parsed yet
    _tail = b""  # last bytes of an incomplete head
    _body_left: int | None = None  # bytes of the body still to come; None: it is chunked
    _response: _CycleTransport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        state = self.server_state
        excess = len(state.connections) - state.limit
        if excess > 0 and not state.make_room(self):
            self.is_crowded = True
            if excess > _RESERVED:
                transport.close()
                return
        self._await_head(HEAD_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self.server_state.waiting.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingering:
            self._drop(len(data))
            return
        if self._held or self._is_responding_whole:
            self._hold(data)
        else:
            self._take(data)

    def _take(self, data: bytes) -> None:
        """Parse up to the end of a complete request, and hold the rest until it is answered."""
        if self._in_head and not self._unframed and not self._is_responding:
            self.deadline = min(self.deadline, self.loop.time() + HEAD_TIMEOUT_S)
        rest = data if len(data) <= MAX_HEAD_BYTES else memoryview(data)
        while rest:
            if self._is_responding_whole:
                self._hold(rest)
                return
            piece = rest[: MAX_HEAD_BYTES + 1 - self._unframed]  # a head that is too large is never parsed completely
            piece = piece[: self._num_of_request(piece)]
            self._unframed += len(piece)
            rest = rest[self._feed(piece) :]
            if self.transport.is_closing() or self._lingering:
                return
            if self._unframed > MAX_HEAD_BYTES:
                self._refuse_framing()
                return

    def _num_of_request(self, piece: bytes | memoryview) -> int:
        """Return how many of these bytes belong to the current head or body, as far as this can be known."""
        if not self._in_head:
            return self._body_left or len(piece)
        seen = self._tail + piece
        at = seen.find(_END_OF_HEAD)
        if at < 0:
            self._tail = seen[1 - len(_END_OF_HEAD) :]
            return len(piece)
        num_before, self._tail = len(self._tail), b""
        return at + len(_END_OF_HEAD) - num_before

    def _hold(self, data: bytes | memoryview) -> None:
        """Keep pipelined bytes until their turn, and stop reading if there are many."""
        self._held += data
        if len(self._held) > _MAX_HELD_BYTES:
            self.transport.pause_reading()  # directly, since the application resumes `flow`

    def _take_held(self) -> None:
        """Parse the pipelined bytes whose turn has come."""
        held, self._held = self._held, b""
        if self.transport.is_closing() or self._lingering:
            return
        self._take(held)
        if len(held) > _MAX_HELD_BYTES >= len(self._held):
            self.transport.resume_reading()
        if not self._is_responding and self._in_head:  # it was an incomplete head
            self._await_head(HEAD_TIMEOUT_S)

    def _feed(self, piece: bytes | memoryview) -> int:
        """Parse a piece and return the number of bytes taken: all, unless a head that offers an upgrade ends in it."""
        try:
            self.parser.feed_data(piece)
        except httptools.HttpParserUpgrade as offer:
            self._replay_head()
            return offer.args[0]
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        return len(piece)

    def _replay_head(self) -> None:
        """Continue after a head that offers another protocol, and stay with HTTP/1.1, as RFC 9110, 7.8 allows.

        The parser assumes that such a request has no body, so a new parser reads its framing fields again.
        """
        framing = [b"%s: %s\r\n" % (name, value) for name, value in self.headers if name in _FRAMING]
        self._upgrade_offered, self._replaying = False, True
        self.parser = httptools.HttpRequestParser(self)
        self._feed(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")

    def on_message_begin(self) -> None:
        if self._replaying:
            return
        super().on_message_begin()
        self._in_head = True
        self._unframed = max(self._unframed, 1)  # the request may have begun directly after another one
        self._head_size = 0
        state = self.scope["state"]
        # For a stream whose client is gone: only the transport can drop data that is already buffered.
        state["abort_connection"] = self.transport.abort
        if self.is_crowded:
            state["crowded"] = True

    def on_url(self, url: bytes) -> None:
        if not self._replaying:
            super().on_url(url)
            self._head_size += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._replaying or not self._in_head:  # trailers of a chunked body are dropped
            return
        super().on_header(name, value)
        self._head_size += len(name) + len(value) + 4
        if len(self.headers) > MAX_HEAD_FIELDS or self._head_size > MAX_HEAD_BYTES:
            raise ValueError("too large a head")  # the parser turns it into its own error

    def on_headers_complete(self) -> None:
        self._unframed = 0
        if self._replaying:
            self._replaying = False
            return
        if self.parser.get_method() == b"CONNECT" or len(self.pipeline) >= _MAX_PIPELINED:
            raise ValueError("CONNECT, or too many pipelined requests")
        self._head_problem = head_error(self.parser.get_http_version(), self.url, self.headers)
        if self._head_problem is not None:
            raise ValueError(self._head_problem)
        super().on_headers_complete()
        self._in_head = False
        self._body_left = self._declared_length()
        self._upgrade_offered = self.parser.should_upgrade()
        self.server_state.waiting.pop(self, None)
        self.deadline = math.inf
        self._response = _CycleTransport(self.transport, self._close_after_response, self.loop, self._wrote)
        self.cycle.transport = cast(asyncio.Transport, self._response)

    def _declared_length(self) -> int | None:
        """Return the body's length in bytes according to its head; None if chunked. Only a hint: the parser decides."""
        fields = [(name, value) for name, value in self.headers if name in _FRAMING]
        if not fields:
            return 0
        name, value = fields[0]
        return int(value) if name == b"content-length" and value.isdigit() else None

    def on_body(self, body: bytes) -> None:
        self._unframed = 0
        if self._body_left:
            self._body_left = max(0, self._body_left - len(body))
        if self.cycle.response_complete:
            self._drop(len(body))
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrade_offered:  # the body is still to come
            return
        self._unframed = 0
        self.cycle.more_body = False
        self._in_head = True
        if self.cycle.response_complete:
            self._await_head(KEEP_ALIVE_S)
        else:
            super().on_message_complete()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if not self.pipeline and self._in_head:  # an idle connection does not keep its request head in memory
            self.headers = []
            self.scope = self.cycle.scope = cast(Any, {})
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self._lingering:
            return
        if self.pipeline:
            cycle, app = self.pipeline.pop()
            self._start_asgi_task(cycle, app)
        elif self.cycle.more_body:
            self._num_dropped = 0
            self.deadline = self.loop.time() + LINGER_TIMEOUT_S
        elif self._held:
            self.deadline = self.loop.time() + HEAD_TIMEOUT_S
            self.loop.call_soon(self._take_held)
        else:
            self._await_head(HEAD_TIMEOUT_S if self._unframed else KEEP_ALIVE_S)

    def send_400_response(self, msg: str) -> None:
        if self._in_head and len(self.headers or ()) > MAX_HEAD_FIELDS:
            self._refuse(431, f"The request head has more than {MAX_HEAD_FIELDS} fields.")
        elif self._in_head and self._head_size > MAX_HEAD_BYTES:
            self._refuse_framing()
        else:
            self._refuse(400, self._head_problem or msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._num_unsent = self.transport.get_write_buffer_size()
        self.deadline = min(self.deadline, self.loop.time() + UNREAD_TIMEOUT_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._is_responding:
            self.deadline = math.inf

    def expire(self, now: float) -> None:
        """Act on a deadline that has passed."""
        num_unsent = self.transport.get_write_buffer_size()
        if num_unsent and num_unsent < self._num_unsent:  # the client is slow, but it reads
            self._num_unsent = num_unsent
            self.deadline = now + UNREAD_TIMEOUT_S
        elif num_unsent or self._lingering or self.transport.is_closing():
            self.transport.abort()
        elif self._in_head and self._unframed:
            self._refuse(408, f"No complete request head arrived within {HEAD_TIMEOUT_S:.0f} seconds.")
        else:  # idle connection: no request waits for a response
            self.transport.close()

    def unread_since(self, now: float) -> float:
        """Count the unread bytes. Return the time since which the client has read none of them."""
        self.num_unread = self.transport.get_write_buffer_size()
        num_read = self._num_written - self.num_unread
        if not self.num_unread or num_read > self._num_read:
            self._unread_since = now
        self._num_read = num_read
        return self._unread_since

    def _wrote(self, num_bytes: int) -> None:
        self._num_written += num_bytes
        self.server_state.wrote(num_bytes, self.loop)

    @property
    def num_unparsed(self) -> int:
        """Received bytes that no request has consumed: parts of a head, parts of a body, or pipelined requests."""
        num_bytes = len(self._held) + (self._head_size + self._unframed if self._in_head else 0)
        return num_bytes if self.cycle is None else num_bytes + len(self.cycle.body)

    def drop(self) -> None:
        """Close at once and discard unread data."""
        self.transport.abort()

    @property
    def _is_responding(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_responding_whole(self) -> bool:
        """Whether a request that was received completely is being answered."""
        return self._is_responding and not self.cycle.more_body

    def _await_head(self, seconds: float) -> None:
        self._in_head = True
        self.deadline = self.loop.time() + seconds
        self._num_unsent = self.transport.get_write_buffer_size()
        self.server_state.waiting[self] = None

    def _drop(self, num_bytes: int) -> None:
        """Count dropped bytes of a request that has been answered."""
        self._num_dropped += num_bytes
        if self._num_dropped > MAX_LINGER_BYTES:
            self.transport.abort()

    def _close_after_response(self) -> None:
        if self.cycle.response_complete and self.cycle.more_body:
            self._linger()
        else:
            self._close()

    def _close(self) -> None:
        """Close as soon as the client has read the written data."""
        if self._response is not None:
            self._response.flush()
        self._num_unsent = self.transport.get_write_buffer_size()
        self.deadline = self.loop.time() + UNREAD_TIMEOUT_S
        self.transport.close()

    def _linger(self) -> None:
        """Close the sending half, and read on until the client closes its half.

        If bytes were left unread, the kernel would respond to them with a reset, and a client that writes first and
        reads later would never see the response.
        """
        if self.transport.is_closing():
            return
        self.server_state.waiting.pop(self, None)
        self._lingering = True
        self._num_dropped = 0
        self._num_unsent = self.transport.get_write_buffer_size()
        self.deadline = self.loop.time() + LINGER_TIMEOUT_S
        try:
            if self.transport.can_write_eof():  # TLS has no half-closed connections, so `Connection: close` must do
                self.transport.write_eof()
        except OSError:  # the client has reset the connection
            self.transport.abort()
            return
        self.flow.resume_reading()

    def _refuse_framing(self) -> None:
        if self._in_head:
            self._refuse(431, f"The request head is larger than {MAX_HEAD_BYTES} bytes.")
        else:
            self._refuse(400, f"The body has more than {MAX_HEAD_BYTES} bytes of trailers or chunk extensions.")

    def _refuse(self, status: int, message: str) -> None:
        if self._is_responding:
            if self._in_head or self.cycle.response_started or self.pipeline:
                self._close()  # a refusal written now would be in the middle of another response
                return
            self.cycle.disconnected = True  # the body that the cycle waits for will not arrive
            self.cycle.message_event.set()
        body = error_bytes(HttpError(status, message))
        head = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, _REASONS[status], len(body)) + body)
        self._linger()
