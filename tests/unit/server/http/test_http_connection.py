"""One connection, fed byte by byte on a loop without sockets: framing, offers to upgrade, limits and deadlines."""

from __future__ import annotations

import asyncio
import json
import math

import pytest
import uvicorn

from oarlock.server.http import connection
from oarlock.server.http.connection import (
    HEAD_TIMEOUT_S,
    KEEP_ALIVE_S,
    LINGER_TIMEOUT_S,
    MAX_HEAD_BYTES,
    UNREAD_TIMEOUT_S,
    BoundedProtocol,
    Connections,
)

BODY = b'{"prompt": "x"}'
# As the HTTP client of Java's standard library writes it, when it may use HTTP/2 and the address is not https.
JDK = (
    b"POST /v1/completions HTTP/1.1\r\n"
    b"Connection: Upgrade, HTTP2-Settings\r\n"
    b"%s\r\n"
    b"Host: 127.0.0.1:8000\r\n"
    b"HTTP2-Settings: AAEAAEAAAAIAAAAAAAMAAAAAAAQBAAAAAAUAAEAABgAGAAA\r\n"
    b"Upgrade: h2c\r\n"
    b"User-Agent: Java-http-client/21.0.2\r\n"
    b"Content-Type: application/json\r\n\r\n"
)
WHOLE = JDK % (b"Content-Length: %d" % len(BODY)) + BODY
CHUNKED = JDK % b"Transfer-encoding: chunked" + b"6\r\n" + BODY[:6] + b"\r\n9\r\n" + BODY[6:] + b"\r\n0\r\n\r\n"
POST = b"POST /p HTTP/1.1\r\nHost: localhost\r\n"


class FakeTransport(asyncio.Transport):
    """The client's side: what was written, and whether the connection is still open."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.closed = self.half_closed = self.aborted = False
        self.paused = False
        self.unsent = self.writes = 0

    def write(self, data):
        self.sent += data
        self.writes += 1

    def can_write_eof(self):
        return True

    def write_eof(self):
        self.half_closed = True

    def close(self):
        self.closed = True

    def abort(self):
        self.closed = self.aborted = True

    def is_closing(self):
        return self.closed

    def pause_reading(self):
        self.paused = True

    def resume_reading(self):
        self.paused = False

    def get_write_buffer_size(self):
        return self.unsent


released: set[str] = set()  # paths that answer now


async def echo(scope, receive, send):
    """Answers with the request's method, the names of its fields, and its body; `/early` before it has read that,
    `/slow` when it is released, and `/head` too, but it sends its head before."""
    if scope["path"] == "/head":
        await send({"type": "http.response.start", "status": 200, "headers": []})
    while scope["path"] in ("/slow", "/head") and scope["path"] not in released:
        await asyncio.sleep(0)
    if scope["path"] == "/head":
        await send({"type": "http.response.body", "body": b""})
        return
    body, more = b"", scope["path"] != "/early"
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body, more = body + message["body"], message["more_body"]
    seen = {"method": scope["method"], "fields": [name.decode() for name, _ in scope["headers"]], "body": body.decode()}
    answer = json.dumps(seen).encode()
    length = [(b"content-length", b"%d" % len(answer))]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    await send({"type": "http.response.body", "body": answer})


class Client:
    def __init__(self, limit=10, connections=None):
        self.config = uvicorn.Config(echo, http=BoundedProtocol, ws="none", lifespan="off", log_config=None)
        self.connections = connections or Connections(limit)
        self.transport = FakeTransport()
        self.protocol = BoundedProtocol(self.config, self.connections, {}, asyncio.get_running_loop())
        self.protocol.connection_made(self.transport)

    async def feed(self, *pieces):
        for piece in pieces:
            if not self.transport.closed:
                self.protocol.data_received(piece)
        for _ in range(16):
            await asyncio.sleep(0)
        return self.answers()

    def answers(self):
        """(status, JSON body) of everything that came back."""
        found, rest = [], bytes(self.transport.sent)
        while rest:
            head, _, rest = rest.partition(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            found.append((int(head.split()[1]), json.loads(rest[:length])))
            rest = rest[length:]
        return found

    @property
    def left_s(self):
        return self.protocol.deadline - asyncio.get_running_loop().time()

    def expire(self):
        self.connections.expire(asyncio.get_running_loop().time() + self.left_s + 1)


def run(scenario):
    return asyncio.run(scenario())


@pytest.mark.parametrize("data", [WHOLE, CHUNKED], ids=["length", "chunks"])
def test_an_offer_of_http2_is_ignored_and_the_body_read_wherever_it_is_cut(data):
    async def scenario():
        for cut in range(len(data)):
            client = Client()
            await client.feed(data[:cut], data[cut:])
            answers = await client.feed(data)  # on the same connection
            assert [(status, answer["body"]) for status, answer in answers] == [(200, BODY.decode())] * 2, cut
        client = Client()
        for byte in data:
            answers = await client.feed(bytes([byte]))
        assert answers[0][1]["body"] == BODY.decode()
        two = await Client().feed(data + POST + b"Content-Length: 2\r\n\r\n{}")  # ahead of its turn
        assert [answer["body"] for _, answer in two] == [BODY.decode(), "{}"]

    run(scenario)


def test_a_websocket_request_is_answered_as_a_plain_get():
    async def scenario():
        head = b"GET /chat HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
        key = b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
        client = Client()
        (answer,) = await client.feed(head + key)
        assert (answer[0], answer[1]["method"], answer[1]["body"]) == (200, "GET", "")
        assert len(await client.feed(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n")) == 2

    run(scenario)


@pytest.mark.parametrize(
    "body", [b"Content-Length: 5\r\nTransfer-Encoding: chunked", b"Transfer-Encoding: gzip", b"Content-Length: -1"]
)
def test_an_offer_does_not_hide_a_body_of_unclear_length(body):
    async def scenario():
        client = Client()
        (answer,) = await client.feed(JDK % body + b"0\r\n\r\n")
        assert answer[0] == 400
        assert client.transport.half_closed or client.transport.closed

    run(scenario)


def test_trailers_are_read_and_are_not_fields_of_the_request():
    async def scenario():
        head = POST + b"TE: trailers\r\nConnection: TE\r\nTrailer: X-A\r\nTransfer-Encoding: chunked\r\n\r\n"
        client = Client()
        (answer,) = await client.feed(head + b"2;ext=1\r\n{}\r\n0\r\nX-A: 1\r\nHost: evil.example\r\n\r\n")
        assert answer[0] == 200
        assert answer[1]["fields"] == ["host", "te", "connection", "trailer", "transfer-encoding"]
        assert answer[1]["body"] == "{}"
        assert len(await client.feed(POST + b"\r\n")) == 2

    run(scenario)


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 2**20 + b"\r\n\r\n", 431),
        (b"GET /" + b"x" * 40_000 + b" HTTP/1.1\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 16_000 + b"\r\nY: " + b"z" * 17_000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 101 + b"\r\n", 431),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: " + b"x" * 2**20 + b"\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\n2;x=" + b"x" * 2**20 + b"\r\n{}\r\n0\r\n\r\n", 400),
        (POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (POST + b"Transfer-Encoding: gzip\r\n\r\n{}", 400),
    ],
)
def test_large_bodies_are_refused_before_they_are_fully_parsed(data, status, monkeypatch):
    async def scenario():
        client = Client()
        parsed = []
        feed = client.protocol._feed
        monkeypatch.setattr(client.protocol, "_feed", lambda piece: parsed.append(len(piece)) or feed(piece))
        (answer,) = await client.feed(data)
        assert (answer[0], set(answer[1]["error"])) == (status, {"message", "type", "param", "code"})
        assert sum(parsed) <= 2 * (MAX_HEAD_BYTES + 1)
        assert client.transport.half_closed

    run(scenario)


def test_a_refusal_waits_for_a_client_that_is_still_writing():
    async def scenario():
        client = Client()
        close = b"POST /early HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: 1000\r\n\r\n"
        ((status, _),) = await client.feed(close, b"x" * 10)
        assert (status, client.transport.half_closed, client.transport.closed) == (200, True, False)
        await client.feed(b"x" * 500)
        assert not client.transport.closed
        assert 0 < client.left_s <= LINGER_TIMEOUT_S
        client.expire()
        assert client.transport.aborted

    run(scenario)


def test_a_connection_that_the_client_has_reset_is_closed_at_once(monkeypatch):
    def reset(self):
        raise OSError(107, "not connected")

    async def scenario():
        monkeypatch.setattr(FakeTransport, "write_eof", reset)
        client = Client()
        await client.feed(b"NONSENSE\r\n\r\n")
        assert client.transport.aborted

    run(scenario)


def test_requests_sent_ahead_wait_unparsed_and_each_has_a_turn_of_its_own():
    async def scenario():
        client = Client()
        get, post = b"GET /%d HTTP/1.1\r\nHost: h\r\n\r\n", POST + b"Content-Length: 2\r\n\r\n{}"
        client.protocol.data_received(b"".join(get % number for number in range(20)) + post + get % 20)
        answered = []
        while len(answered) < 22:
            await asyncio.sleep(0)
            assert len(client.answers()) - len(answered) <= 1  # in one turn of the loop
            assert not client.protocol.pipeline
            answered = client.answers()
        assert [(status, answer["method"]) for status, answer in answered[-3:]] == [
            (200, "GET"),
            (200, "POST"),
            (200, "GET"),
        ]
        assert client.left_s > HEAD_TIMEOUT_S  # waits for the next one as any kept connection does

    run(scenario)


@pytest.mark.slow
def test_requests_sent_ahead_may_be_cut_anywhere():
    async def scenario():
        two = POST + b"Content-Length: 6\r\n\r\n\r\n\r\n{}" + b"GET / HTTP/1.1\r\nHost: h\r\n\r\n"
        for cut in range(1, 2 * len(two)):
            client = Client()
            data = two + two
            answers = await client.feed(data[:cut], data[cut:])
            for _ in range(8):
                answers = await client.feed()
            assert [answer["method"] for _, answer in answers] == ["POST", "GET"] * 2, cut

    run(scenario)


@pytest.mark.slow
def test_no_more_is_read_while_much_is_sent_ahead():
    async def scenario():
        released.clear()
        client = Client()
        await client.feed(b"GET /slow HTTP/1.1\r\nHost: h\r\n\r\n")
        client.protocol.data_received(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" * 500)
        assert not client.transport.paused
        client.protocol.data_received(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" * 4000)
        assert client.transport.paused
        released.add("/slow")
        while client.transport.sent.count(b"HTTP/1.1 200 OK") < 4501:
            for _ in range(500):
                await asyncio.sleep(0)
        assert not client.transport.paused
        assert not client.transport.closed

    run(scenario)


def test_requests_behind_chunks_are_bounded():
    async def scenario():
        client = Client()
        chunked = POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        await client.feed(chunked + b"GET / HTTP/1.1\r\nHost: h\r\n\r\n" * 100)
        assert client.transport.closed
        assert len(client.protocol.pipeline) <= 32

    run(scenario)


def test_a_whole_answer_is_one_write_and_a_head_alone_does_not_wait():
    async def scenario():
        released.clear()
        client = Client()
        for request in (
            b"GET / HTTP/1.1\r\nHost: h\r\n\r\n",
            b"POST /early HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\n{}  ",
        ):
            await client.feed(request)
        assert client.transport.writes == 2
        client.protocol.data_received(b"GET /head HTTP/1.1\r\nHost: h\r\n\r\n")  # a stream without data yet
        while not client.transport.sent.endswith(b"transfer-encoding: chunked\r\n\r\n"):
            await asyncio.sleep(0)
        released.add("/head")
        while not client.transport.sent.endswith(b"0\r\n\r\n"):
            await asyncio.sleep(0)

    run(scenario)


def test_every_state_but_answering_has_a_deadline():
    async def scenario():
        client = Client()
        assert client.left_s <= HEAD_TIMEOUT_S
        await client.feed(b"GET / HT")
        assert client.left_s <= HEAD_TIMEOUT_S
        await client.feed(b"TP/1.1\r\nHost: h\r\n\r\n")
        assert HEAD_TIMEOUT_S < client.left_s <= KEEP_ALIVE_S
        await client.feed(POST + b"Content-Length: 4\r\n\r\n{")
        assert client.left_s == math.inf  # reading the body has a limit of its own
        await client.feed(b"   ")
        assert client.left_s <= KEEP_ALIVE_S
        await client.feed(b"POST /early HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\n")  # the body is to come
        assert client.left_s <= LINGER_TIMEOUT_S
        await client.feed(b"{")
        assert client.left_s <= LINGER_TIMEOUT_S
        await client.feed(b"   GET / HT")
        assert client.left_s <= KEEP_ALIVE_S
        client.expire()
        assert client.answers()[-1][0] == 408

    run(scenario)


def test_a_body_that_comes_too_late_after_its_answer_ends_the_connection():
    async def scenario():
        client = Client()
        await client.feed(b"POST /early HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\n")
        await client.feed(b"{}")
        client.expire()
        assert client.transport.closed

    run(scenario)


def test_a_client_that_reads_nothing_is_dropped_and_a_slow_one_is_not():
    async def scenario():
        client = Client()
        client.transport.unsent = 100_000
        client.protocol.pause_writing()
        assert client.left_s <= UNREAD_TIMEOUT_S
        client.transport.unsent = 60_000
        client.expire()
        assert not client.transport.closed
        client.expire()
        assert client.transport.aborted

    run(scenario)


def test_beyond_the_limit_the_longest_idle_is_closed_and_the_busy_are_not():
    async def scenario():
        first = Client(limit=2)
        share = {"connections": first.connections}
        busy = Client(**share)
        await busy.feed(POST + b"Content-Length: 4\r\n\r\n{")
        third = Client(**share)
        assert (first.transport.closed, busy.transport.closed, third.transport.closed) == (True, False, False)
        first.protocol.connection_lost(None)
        await third.feed(POST + b"Content-Length: 4\r\n\r\n{")
        crowded = []
        for _ in range(40):  # no other connection is idle now: the next one replaces the one before
            crowded.append(Client(**share))
            assert not crowded[-1].transport.closed
            assert crowded[-1].protocol.is_crowded
            for each in crowded[:-1]:
                assert each.transport.closed
                each.protocol.connection_lost(None)
        at_once = [Client(**share) for _ in range(40)]  # before the loop has seen any of them go
        assert sum(each.transport.closed for each in at_once) == 39
        assert not busy.transport.closed
        assert not third.transport.closed

    run(scenario)


def test_unread_answers_are_bounded_over_all_connections(monkeypatch):
    """While they take too much, who has read nothing for two seconds is dropped; who reads slowly is not."""
    monkeypatch.setattr(connection, "MAX_UNREAD_BYTES", 250_000)

    async def scenario():
        first = Client()
        clients = [first, *(Client(connections=first.connections) for _ in range(4))]
        begun = asyncio.get_running_loop().time()
        for client in clients:
            await client.feed(POST + b"Content-Length: 0\r\n\r\n")
            client.transport.unsent, client.protocol._num_written = 100_000, 200_000
        first.connections.expire(begun)
        slow = clients[-1]
        slow.transport.unsent = 90_000
        first.connections.expire(begun + 1)
        assert not any(client.transport.closed for client in clients)
        first.connections.expire(begun + 2.5)
        dropped = [client.transport.aborted for client in clients]
        assert sum(dropped) == 3 and not slow.transport.closed

    run(scenario)


def test_very_many_unread_answers_are_dropped_at_once(monkeypatch):
    """The bytes that are written count, so the next look at the deadlines need not come first."""
    monkeypatch.setattr(connection, "MAX_UNREAD_AT_ALL_BYTES", 250_000)
    monkeypatch.setattr(connection, "MAX_UNREAD_BYTES", 250_000)
    monkeypatch.setattr(connection, "_COUNT_EVERY_BYTES", 0)

    async def scenario():
        first = Client()
        clients = [first, *(Client(connections=first.connections) for _ in range(4))]
        for client in clients:
            client.transport.unsent = 100_000
        await clients[-1].feed(POST + b"Content-Length: 0\r\n\r\n")
        assert sum(client.transport.aborted for client in clients) == 3

    run(scenario)


@pytest.mark.parametrize("sent", ["beginning of a head", "sent ahead"])
def test_unparsed_bytes_are_bounded_over_all_connections(monkeypatch, sent):
    monkeypatch.setattr(connection, "MAX_UNPARSED_BYTES", 50_000)

    async def scenario():
        first = Client()
        clients = [first, *(Client(connections=first.connections) for _ in range(4))]
        for client in clients[1:]:
            ahead = b"" if sent == "beginning of a head" else b"POST /slow HTTP/1.1\r\nHost: x\r\n\r\n"
            await client.feed(ahead + POST + b"X: " + b"x" * 20_000)
        first.connections.expire(asyncio.get_running_loop().time())
        assert [client.transport.aborted for client in clients].count(True) == 2
        assert not first.transport.closed

    run(scenario)


def test_a_connection_that_is_kept_open_does_not_keep_the_head_of_its_request():
    async def scenario():
        client = Client()
        assert (await client.feed(POST + b"X: " + b"x" * 20_000 + b"\r\nContent-Length: 0\r\n\r\n"))[0][0] == 200
        assert not client.protocol.headers and not client.protocol.scope and not client.protocol.cycle.scope
        assert len(await client.feed(POST + b"Content-Length: 0\r\n\r\n")) == 2

    run(scenario)
