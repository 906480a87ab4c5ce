"""Requests that no client library would send: wrong lengths, broken chunks, heads too large or never finished.

Bytes over plain sockets. The server may answer with a 4xx or close the connection, but not with a 5xx,
nor leave the connection open without an answer.
"""

from __future__ import annotations

import asyncio
import errno

GOOD = b'{"prompt": "import ", "max_tokens": 1}'
_HEAD = b"POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"


def attacks(path: str) -> dict[str, bytes]:
    """Name and bytes of every attack on one POST route. Those that wait for more end when we close our half."""
    head = _HEAD % path.encode()
    length = b"Content-Length: %d\r\n" % len(GOOD)
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
    return {
        "body shorter than declared": head + b"Content-Length: 5000\r\n\r\n" + GOOD,
        "body longer than declared": head + b"Content-Length: 9\r\n\r\n" + GOOD,
        "two lengths": head + length + b"Content-Length: 3\r\n\r\n" + GOOD,
        "length and chunks": head + length + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "negative length": head + b"Content-Length: -1\r\n\r\n" + GOOD,
        "length of 20 digits": head + b"Content-Length: 99999999999999999999\r\n\r\n" + GOOD,
        "chunk with a wrong size": chunked + b"zz\r\n" + GOOD,
        "chunk with a huge size": chunked + b"ffffffffffffffff\r\n" + GOOD,
        "chunks that stop": chunked + b"5\r\n" + GOOD[:5],
        "500 header fields": head
        + b"".join(b"X-%d: y\r\n" % number for number in range(500))
        + length
        + b"\r\n"
        + GOOD,
        "head of 1 MB": head + b"X-Request-Id: " + b"i" * 2**20 + b"\r\n" + length + b"\r\n" + GOOD,
        "request id with line breaks": head + b"X-Request-Id: a\rb\nc: d\r\n" + length + b"\r\n" + GOOD,
        "request id with a NUL": head + b"X-Request-Id: a\x00b\r\n" + length + b"\r\n" + GOOD,
        "no host": b"POST %s HTTP/1.1\r\n" % path.encode() + length + b"\r\n" + GOOD,
        "a foreign host": head.replace(b"127.0.0.1", b"example.com") + length + b"\r\n" + GOOD,
        "absolute target": head.replace(b"POST ", b"POST http://example.com") + length + b"\r\n" + GOOD,
        "target with spaces": head.replace(path.encode(), path.encode() + b" x y") + length + b"\r\n" + GOOD,
        "target with dots": head.replace(path.encode(), b"/.." + path.encode()) + length + b"\r\n" + GOOD,
        "an invented method": head.replace(b"POST", b"BREW") + length + b"\r\n" + GOOD,
        "HTTP/9.9": head.replace(b"HTTP/1.1", b"HTTP/9.9") + length + b"\r\n" + GOOD,
        "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "TLS hello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
        "half a head": head[: len(head) // 2],
        "nothing": b"",
        "two requests at once": (head.replace(b"close", b"keep-alive") + length + b"\r\n" + GOOD) * 2,
        "a request smuggled behind another": head
        + b"Content-Length: 0\r\n\r\nGET /metrics HTTP/1.1\r\nHost: a\r\n\r\n",
    }


async def attack(port: int, content: bytes, within_s: float) -> bytes:
    """Send it, close our half, and return all that comes back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(content)
        try:
            await writer.drain()
            writer.write_eof()
            return await asyncio.wait_for(reader.read(), within_s)
        except OSError as error:  # it closed the connection while we were still sending: that is an answer
            if not isinstance(error, ConnectionError) and error.errno != errno.ENOTCONN:
                raise
            return b""
    finally:
        writer.close()


def problem_of(answer: bytes) -> str | None:
    """Problem with the bytes that came back, or None."""
    for line in answer.split(b"\r\n"):
        if line.startswith(b"HTTP/1.1 5"):
            return f"{answer[:300]!r}"
    if b"c: d" in answer.lower():
        return f"a header of the request came back as one of the answer: {answer[:300]!r}"
    return None
