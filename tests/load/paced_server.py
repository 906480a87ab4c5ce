"""A server that computes nothing: it streams made-up chunks at a known pace, from a separate process.

What a client reports of it can be held against the truth.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import time
from typing import Any

_MODELS = b'{"object": "list", "data": [{"id": "paced", "object": "model", "vocab_size": 4096}]}'


class PacedServer:
    """Use as a context manager. The first token comes after `first_s`, every other `every_s` later; 0: at once."""

    def __init__(self, first_s: float, every_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        self._port = context.Value("i", 0)
        self._process = context.Process(target=_serve, args=(self._port, first_s, every_s), daemon=True)

    def __enter__(self) -> PacedServer:
        self._process.start()
        while not self._port.value:
            if not self._process.is_alive():
                raise RuntimeError("the paced server ended")
            time.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._port.value}"
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()


def _serve(port: Any, first_s: float, every_s: float) -> None:
    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await _answer(reader, writer, first_s, every_s)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        port.value = server.sockets[0].getsockname()[1]
        await server.serve_forever()

    import uvloop

    uvloop.run(main())


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, first_s: float, every_s: float) -> None:
    """One request: the list of models for GET, a stream for POST. The last token carries the finish reason."""
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = head.partition(b"content-length:")[2].split()
    body = await reader.readexactly(int(length[0]) if length else 0)
    if head.startswith(b"get"):
        json_type = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
        writer.write(json_type + b"Content-Length: %d\r\n\r\n%b" % (len(_MODELS), _MODELS))
        return
    fields = json.loads(body)
    wanted, prompt = fields["max_tokens"], fields["prompt"]
    due = time.perf_counter() + first_s
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    for number in range(wanted):
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        writer.write(_LAST if number == wanted - 1 else _TOKEN)
        due += every_s
    counted = len(prompt) if isinstance(prompt, list) else len(prompt.split())
    usage = {"prompt_tokens": counted, "completion_tokens": wanted, "total_tokens": counted + wanted}
    end = {"id": "c", "object": "text_completion", "model": "paced", "choices": [], "usage": usage}
    writer.write(_framed(b"data: " + json.dumps(end).encode() + b"\n\ndata: [DONE]\n\n") + b"0\r\n\r\n")
    await writer.drain()


def _chunk(finish: str | None) -> bytes:
    """One event, as long as our server's, in HTTP's chunked encoding."""
    body: dict[str, Any] = {
        "id": "cmpl-b1cfc91f269ff8c8f1b6e368", "object": "text_completion", "created": 1795303624, "model": "paced",
        "system_fingerprint": "fp_c81acd2b373a",
        "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": finish}], "usage": None,
    }  # fmt: skip
    return _framed(b"data: " + json.dumps(body).encode() + b"\n\n")


def _framed(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


_TOKEN, _LAST = _chunk(None), _chunk("length")
