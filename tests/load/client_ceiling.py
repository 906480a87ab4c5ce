"""Measures the streamed tokens per second that the client of `oarlock bench` can read on one core.

The server is one that computes nothing, in a process of its own: it streams made-up chunks at a known pace, so that
what a client reports of it can be held against the truth. Once it sends as fast as it can, so that many chunks come in
one read, and once each chunk alone, at a given rate.

    python -m tests.load.client_ceiling
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing  # noqa: TID251 - its own processes
import time
from collections.abc import Sequence
from typing import Any

from oarlock.server.bench.serve import ServePlan, measure

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


def measured(every_s: float, streams: int, tokens: int, requests: int) -> dict[str, float]:
    """Tokens per second of the clock and of the client's processor time, and how late the client was."""
    with PacedServer(0.0, every_s) as server:
        plan = ServePlan(
            server.url, concurrency=streams, num_requests=requests, input_tokens=1, output_tokens=tokens,
            warmup=streams,
        )  # fmt: skip
        result = measure(plan)
    rate, share = result.summary["output_throughput"], result.client["cpu_share"]
    return {"rate": rate, "per_cpu_second": rate / share, "cpu": share, "lag_p99_ms": result.client["lag_ms"]["p99"]}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=400, help="per answer")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument(
        "--rate", type=float, default=20_000, help="tokens per second of all streams, in the second run"
    )
    parser.add_argument("--quick", action="store_true", help="a few, to see that it works")
    args = parser.parse_args(argv)
    if args.quick:
        args.streams, args.tokens, args.requests = 4, 20, 8
    for name, every_s in (("as fast as sent", 0.0), (f"{args.rate:g} per second", args.streams / args.rate)):
        found = measured(every_s, args.streams, args.tokens, args.requests)
        print(
            f"{name:<20} {found['rate']:>8.0f} tokens/s, {found['per_cpu_second']:.0f} per second of the client's "
            f"processor time ({found['cpu']:.0%} of a core), event loop late {found['lag_p99_ms']:.1f} ms (p99)"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
