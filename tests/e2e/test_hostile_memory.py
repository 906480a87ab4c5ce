"""Clients that want memory: a server grows by less than 300 MiB and gives it back, and others are served."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.e2e.running import RunningServer, eventually

pytestmark = pytest.mark.soak

MIB = 2**20
MOST_GROWN = 300 * MIB
MOST_LEFT = 120 * MIB
SERVED_WITHIN_S = 30  # beside other tests; without the bounds it was longer than the attack
TURN = {"role": "user", "content": ""}
PART = {"type": "text", "text": ""}
# (path, body, how many at the same time)
ATTACKS = {
    "bodies of 15 MiB": ("/v1/completions", {"prompt": "word " * (3 * MIB), "max_tokens": 1}, 60),
    "chats of empty messages": ("/v1/chat/completions", {"messages": [TURN] * 4096}, 100),
    "chats of empty parts": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [PART] * 1000}] * 34},
        60,
    ),
    "allowed ids": (
        "/v1/completions",
        {
            "prompt": "x",
            "max_tokens": 2000,
            "ignore_eos": True,
            "allowed_token_ids": [300 + i % 3000 for i in range(MIB // 4)],
        },
        300,
    ),
    "many choices": ("/v1/completions", {"prompt": ["x"] * 16, "n": 128, "max_tokens": 2000, "ignore_eos": True}, 200),
    "messages": ("/v1/messages", {"max_tokens": 1, "messages": [TURN] * 4096}, 100),
    "responses": ("/v1/responses", {"input": [TURN] * 4096}, 100),
    "empty lists": ("/v1/completions", {"prompt": "x", "later": [[]] * (4 * MIB)}, 20),
}


def memory_of(server: RunningServer) -> int:
    """Bytes that the server's processes have for themselves."""
    total = 0
    for process in server.processes():
        with contextlib.suppress(OSError, psutil.Error):  # it has just ended
            if any(part.endswith("worker_process") for part in process.cmdline()):
                continue  # the pages of a rank's KV pool count when they are first used, and belong to no request
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
            total += sum(1024 * int(line.split()[1]) for line in lines if line.startswith("Private_"))
    return total


@contextlib.contextmanager
def watched(server: RunningServer) -> Iterator[list[float]]:
    """Fail if the server grows too much; yields the times that small completions take meanwhile, in seconds."""
    server.text("import ", max_tokens=8)
    before = peak = memory_of(server)
    done, times = threading.Event(), list[float]()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.1):
            peak = max(peak, memory_of(server))

    def ask() -> None:
        while not done.wait(0.05):
            begun = time.monotonic()
            server.text("import ", max_tokens=8)
            times.append(time.monotonic() - begun)

    threads = [threading.Thread(target=watch), threading.Thread(target=ask)]
    for thread in threads:
        thread.start()
    try:
        yield times
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert (peak - before) / MIB < MOST_GROWN / MIB
    eventually(lambda: memory_of(server) - before < MOST_LEFT, 60, "the memory is given back", every_s=1)


def head_of(path: str, body: bytes) -> bytes:
    fields = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    fields += "\r\nAuthorization: Bearer key-of-attackers"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode()


async def post(port: int, path: str, body: bytes, seconds: float) -> int:
    """The status of the answer; 0 if none comes in time, or the connection is reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(head_of(path, body) + body)
        async with asyncio.timeout(seconds):
            await writer.drain()
            return int((await reader.readline()).split()[1])
    except (TimeoutError, ConnectionError, IndexError):
        return 0
    finally:
        writer.transport.abort()


@pytest.fixture(scope="module")
def server():
    with RunningServer(env={"OARLOCK_API_KEY": "key-of-attackers,key-of-others"}) as running:
        running.client.headers["Authorization"] = "Bearer key-of-others"
        yield running


@pytest.mark.parametrize("name", ATTACKS)
def test_many_requests_at_once_stay_within_the_memory_for_them(server, name):
    path, fields, count = ATTACKS[name]
    body = json.dumps(fields, separators=(",", ":")).encode()

    async def attack() -> list[int]:
        return await asyncio.gather(*(post(server.port, path, body, 40) for _ in range(count)))

    with watched(server) as times:
        statuses = asyncio.run(attack())
    assert {*statuses} <= {0, 200, 400, 429, 503}
    assert times and max(times) < SERVED_WITHIN_S


def test_answers_that_nobody_reads_stay_within_the_memory_for_them(server):
    body = json.dumps({"prompt": "a b c " * 8000}).encode()
    with watched(server) as times, contextlib.ExitStack() as opened:
        for _ in range(700):
            client = opened.enter_context(socket.socket())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.settimeout(60)
            client.connect(("127.0.0.1", server.port))
            client.sendall(head_of("/tokenize", body) + body)
        time.sleep(20)
    assert times and max(times) < SERVED_WITHIN_S
