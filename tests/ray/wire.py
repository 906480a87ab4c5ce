"""The forwarder between a client and a server that misbehaves on purpose, without Ray: what arrives on both sides."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import httpx
import uvicorn
from oarlock_ray.forward import Forwarder

_HEAD = b"HTTP/1.1 200 OK\r\n"
_ANSWERS = {
    "/breaks-off": _HEAD
    + b"content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    + b'9\r\ndata: 1\n\n\r\nb\r\ndata: 2\n\nda\r\n6\r\nta: {"\r\n',
    "/cut": _HEAD + b"content-type: application/json\r\ncontent-length: 100\r\n\r\n{",
    "/gone": b"",
    "/ends": b"HTTP/1.1 503 X\r\nx-should-retry: false\r\ncontent-length: 0\r\n\r\n",
    "/late": b"HTTP/1.1 408 X\r\nx-should-retry: false\r\nx-request-id: 1\r\ncontent-length: 0\r\n\r\n",
}


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """One request on a connection: a fixed answer, or the request itself, body and all."""
    head = await reader.readuntil(b"\r\n\r\n")
    path = head.split()[1].decode()
    body = b""
    if b"transfer-encoding: chunked" in head.lower():
        while size := int(await reader.readline(), 16):
            body += (await reader.readexactly(size + 2))[:-2]
        await reader.readline()
    said = head + b"|" + body
    echo = _HEAD + b"set-cookie: a\r\nset-cookie: b\r\ncontent-length: %d\r\n\r\n" % len(said) + said
    writer.write(_ANSWERS.get(path, echo))
    await writer.drain()
    writer.close()


async def check() -> int:
    """Check the forwarder; return the number of checks. Raises AssertionError."""
    upstream = await asyncio.start_server(_serve, "127.0.0.1", 0)
    forwarder = Forwarder(f"http://127.0.0.1:{upstream.sockets[0].getsockname()[1]}")
    server = uvicorn.Server(uvicorn.Config(forwarder, port=0, log_level="critical"))
    running = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        await _look(client)
    server.should_exit = True
    await running
    await forwarder.close()
    upstream.close()
    return len(_ANSWERS) + 3


async def _look(client: httpx.AsyncClient) -> None:
    events = (await client.get("/breaks-off")).text.split("\n\n")
    assert events[:2] == ["data: 1", "data: 2"] and events[3:] == ["data: [DONE]", ""], events
    assert json.loads(events[2].removeprefix("data: "))["error"]["code"] == "replica_lost"
    gone = await client.get("/gone")
    assert (gone.status_code, gone.headers["retry-after"]) == (503, "1")
    assert "x-should-retry" not in (await client.get("/ends")).headers
    late = await client.get("/late")
    assert late.headers["x-should-retry"] == "false" and "x-request-id" not in late.headers
    for path in ("/metrics", "/%6detrics"):
        assert (await client.get(path)).status_code == 404
    try:
        await client.get("/cut")
    except httpx.RemoteProtocolError as error:
        assert "received 1 bytes, expected 100" in str(error)
    else:
        raise AssertionError("an answer that was cut looks whole")
    echo = await client.get("/echo/a%2Fb?c=%20d&e", headers={"X-Any": "1", "TE": "trailers"})
    assert echo.text.startswith("GET /echo/a%2Fb?c=%20d&e HTTP/1.1\r\n") and echo.text.endswith("\r\n\r\n|")
    assert "x-any: 1" in echo.text.lower() and "\r\nte:" not in echo.text.lower()
    assert echo.headers.get_list("set-cookie") == ["a", "b"]

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield b"x" * 70_000

    assert (await client.post("/echo", content=pieces())).text.split("|")[1] == "x" * 210_000
