"""Share of its capacity that a server completes when more requests come than it can serve.

    python -m benchmarks.overload [--model DIRECTORY | --shape 0.5b] [--loads X ...] [--clients N] [--seconds S]
                                  [--rounds N] [--stream] [--tree OTHER_CHECKOUT ...] [--option=OPTION_OF_SERVE ...]

In each round a closed loop of `--clients` clients measures the capacity: each sends its next request when the last one
is answered. Open loops follow, whose requests come at random times (Poisson), at each of `--loads` times that capacity.
Each request has a connection of its own. With `--tree` the servers of several checkouts take turns in each round; one
that is not asked is idle. Only ratios within a round count, since the machine may be shared.

    completed    requests completed per second, counted after the first 40 % of the time, in which queues fill
    of capacity  the same, divided by the capacity of this round
    refused      share of the requests that were answered 429 or 503; `failed` names all others
    rows         sequences that a step continues or begins, and `steps`, per second
    frontend ... milliseconds of processor time per completed request: the process of HTTP, the engine, the ranks
    server       cores that the server gets; compare no loops in which other programs left it different shares
    client       cores that this program uses itself: it must be small

The client reads no more of an answer than its status. Its requests are made before the time begins.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import httpx
import psutil
import uvloop

from benchmarks.checkpoint import ensure, prompts
from benchmarks.systems.system import SERVED_NAME, HttpSystem, clean_environment

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "models" / "oarlock-demo"
_LEAST_VOCABULARY = 4096  # ids below it are in every model that is measured here
_SETTLES = 0.4  # share of the time after which completed requests count
_REFUSED = (429, 503)
_DIFFERENT = 2000  # prompts; no server keeps a prefix cache
_PARTS = {"engine.core": "engine", "worker_process": "ranks"}  # parts of command lines; all else is the frontend
_COUNTERS = ("oarlock:step_seconds_count", "oarlock:engine_generation_tokens_total")


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer to one request, in seconds of `time.perf_counter`. `status` 0: the connection failed."""

    status: int
    sent_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one closed or open loop."""

    sent_per_s: float
    completed_per_s: float
    refused: float  # share of all requests
    failed: dict[int, int]  # other statuses than 200 and those of refusals
    median_s: float  # of completed requests
    steps_per_s: float
    rows: float  # mean of a step
    cpu_ms: dict[str, float]  # of each part of the server, per completed request
    server: float  # cores
    client: float  # cores


class _Exchange(asyncio.Protocol):
    """One request on a connection of its own."""

    def __init__(self, message: bytes) -> None:
        self._message = message
        self._status = 0
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(self._message)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        if not self._status:
            self._status = int(data[9:12])

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.status.done():
            self.status.set_result(0 if exc else self._status)


class Load:
    """Requests to one server, and their answers."""

    def __init__(self, port: int, messages: list[bytes]) -> None:
        self._port = port
        self._messages: Iterator[bytes] = itertools.cycle(messages)
        self.answers: list[Answer] = []

    async def closed(self, clients: int, seconds: float) -> None:
        """Run `clients` clients that each send a request when their last one is answered."""
        end_s = time.perf_counter() + seconds

        async def client() -> None:
            while time.perf_counter() < end_s:
                await self._ask()

        await asyncio.gather(*(client() for _ in range(clients)))

    async def open(self, per_s: float, seconds: float, seed: int) -> None:
        """Send requests at random times, whatever became of those before."""
        draw, due_s = random.Random(seed), time.perf_counter()
        end_s = due_s + seconds
        asking: list[asyncio.Task[None]] = []
        while (due_s := due_s + draw.expovariate(per_s)) < end_s:
            if (wait_s := due_s - time.perf_counter()) > 0:
                await asyncio.sleep(wait_s)
            asking.append(asyncio.create_task(self._ask()))
        await asyncio.gather(*asking)

    async def _ask(self) -> None:
        loop, message, sent_s = asyncio.get_running_loop(), next(self._messages), time.perf_counter()
        try:
            _, exchange = await loop.create_connection(lambda: _Exchange(message), "127.0.0.1", self._port)
            status = await exchange.status
        except OSError:
            status = 0
        self.answers.append(Answer(status, sent_s, time.perf_counter()))


def messages(port: int, seed: int, prompt: int, output: int, *, stream: bool) -> list[bytes]:
    """Make HTTP requests for completions of `output` tokens."""
    made = []
    for ids in prompts(_DIFFERENT, prompt, _LEAST_VOCABULARY, seed):
        body = {"model": SERVED_NAME, "prompt": ids, "max_tokens": output, "ignore_eos": True, "temperature": 0}
        content = json.dumps(body | {"stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
        head += f"Connection: close\r\nContent-Length: {len(content)}\r\n\r\n"
        made.append(head.encode() + content)
    return made


def processor_s(system: HttpSystem) -> Counter[str]:
    """Read the processor seconds that each part of a server has used."""
    found: Counter[str] = Counter()
    parent = psutil.Process(system.process.child.pid)
    for process in [parent, *parent.children(recursive=True)]:
        times, command = process.cpu_times(), " ".join(process.cmdline())
        part = next((part for text, part in _PARTS.items() if text in command), "frontend")
        found[part] += times.user + times.system
    return found


def counters(system: HttpSystem) -> list[float]:
    """Read `_COUNTERS` from the server's metrics."""
    lines = httpx.get(f"{system.url}/metrics", timeout=60, trust_env=False).text.splitlines()
    return [
        sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name) for name in _COUNTERS
    ]


def measure(system: HttpSystem, arguments: argparse.Namespace, per_s: float | None, seed: int) -> Figures:
    """Run one loop until its last answer. `per_s`: requests per second of an open loop; None: the closed loop."""
    port = httpx.URL(system.url).port
    assert port is not None
    made = messages(port, seed, arguments.input_tokens, arguments.output_tokens, stream=arguments.stream)
    load = Load(port, made)
    if per_s is None:
        loop = load.closed(arguments.clients, arguments.seconds)
    else:
        loop = load.open(per_s, arguments.seconds, seed)
    cpu_s, counted, own_s, begun_s = processor_s(system), counters(system), time.process_time(), time.perf_counter()
    uvloop.run(loop)
    own_s, whole_s = time.process_time() - own_s, time.perf_counter() - begun_s
    cpu_s = processor_s(system) - cpu_s
    steps, tokens = (after - before for after, before in zip(counters(system), counted, strict=True))
    completed = [answer for answer in load.answers if answer.status == 200]
    first_s, last_s = begun_s + _SETTLES * arguments.seconds, begun_s + arguments.seconds
    others = Counter(answer.status for answer in load.answers if answer.status not in (200, *_REFUSED))
    return Figures(
        sent_per_s=sum(answer.sent_s < last_s for answer in load.answers) / arguments.seconds,
        completed_per_s=sum(first_s <= answer.ended_s < last_s for answer in completed) / (last_s - first_s),
        refused=sum(answer.status in _REFUSED for answer in load.answers) / len(load.answers),
        failed=dict(others),
        median_s=statistics.median(answer.ended_s - answer.sent_s for answer in completed) if completed else 0.0,
        steps_per_s=steps / whole_s,
        rows=tokens / max(1.0, steps),
        cpu_ms={part: 1e3 * seconds / max(1, len(completed)) for part, seconds in cpu_s.items()},
        server=cpu_s.total() / whole_s,
        client=own_s / whole_s,
    )


def start(checkout: Path, arguments: argparse.Namespace) -> HttpSystem:
    """Start the server of `checkout`, in the environment of its `.venv` if it has one."""
    own = checkout / ".venv" / "bin" / "python"
    interpreter = str(own) if checkout != ROOT and own.exists() else sys.executable
    command = [interpreter, "-P", "-m", "oarlock", "serve", str(arguments.model), "--port", "{port}"]
    command += ["--served-model-name", SERVED_NAME, "--no-enable-prefix-caching", *arguments.option]
    env = clean_environment(os.cpu_count() or 1, PYTHONPATH=str(checkout))
    del env["OMP_NUM_THREADS"]
    return HttpSystem(checkout.name, "Oarlock", {}, command, env, checkout)


def row(name: str, load: str, figures: Figures, capacity: float) -> str:
    """Write one line of the table."""
    ms = " | ".join(f"{figures.cpu_ms.get(part, 0.0):.1f}" for part in ("frontend", "engine", "ranks"))
    failed = f" {figures.failed}" if figures.failed else ""
    return (
        f"| {name} | {load} | {figures.sent_per_s:.1f} | {figures.completed_per_s:.1f} | "
        f"{figures.completed_per_s / capacity:.2f} | {figures.refused:.0%}{failed} | {figures.median_s:.2f} | "
        f"{figures.steps_per_s:.0f} | {figures.rows:.1f} | {ms} | {figures.server:.2f} | {figures.client:.2f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO)
    parser.add_argument("--shape", help="a checkpoint of benchmarks/checkpoint.py instead of --model")
    parser.add_argument("--loads", type=float, nargs="+", default=[1.0, 2.0, 5.0], help="times the capacity")
    parser.add_argument("--clients", type=int, default=64, help="of the closed loop")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each loop, without its last answers")
    parser.add_argument("--input-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stream", action="store_true")
    parser.add_argument("--tree", type=Path, action="append", default=[], help="another checkout, measured in turns")
    parser.add_argument("--option", action="append", default=[], help="of `oarlock serve`, such as --num-threads=1")
    arguments = parser.parse_args()
    if arguments.shape:
        arguments.model = ensure(arguments.shape)
    arguments.model = arguments.model.resolve()
    ratios: dict[tuple[str, float], list[float]] = {}
    with ExitStack() as stack:
        systems = [stack.enter_context(closing(start(tree.resolve(), arguments))) for tree in (ROOT, *arguments.tree)]
        print("| server | load | sent/s | completed/s | of capacity | refused | median s | steps/s | rows ", end="")
        print("| frontend ms | engine ms | ranks ms | server | client |\n|---|---|" + "---:|" * 12, flush=True)
        for number in range(arguments.rounds):
            for system in systems:
                closed = measure(system, arguments, None, 10 * number)
                capacity = closed.completed_per_s
                if not capacity:
                    raise SystemExit("No request was completed in time. Give it longer: --seconds.")
                print(row(system.name, f"closed loop, {arguments.clients}", closed, capacity), flush=True)
                for load in arguments.loads:
                    found = measure(system, arguments, load * capacity, 10 * number + 1)
                    print(row(system.name, f"{load:g} x capacity", found, capacity), flush=True)
                    ratios.setdefault((system.name, load), []).append(found.completed_per_s / capacity)
    for (name, load), found in ratios.items():
        print(
            f"{name} at {load:g} x: {statistics.median(found):.2f} of the capacity ({min(found):.2f}-{max(found):.2f})"
        )


if __name__ == "__main__":
    main()
