"""Measures what a server still completes when far more is asked than it can do, and what a refusal costs it.

    python -m benchmarks.overload [--checkout NAME=DIRECTORY ...] [--seconds S] [--rounds N] [--threads N]

The demo model is served with a queue that a few seconds fill. Where other checkouts are named, each with a `.venv` of
its own, their servers take turns with this one's in every round, so that states of the code can be compared.

capacity   requests per second in a closed loop of as many users as sequences may run; the median over all servers
open loop  1, 2 and 5 times as many requests a second as that, at random times: what was completed as a share of the
           capacity, counted once the queue has filled; the 99th percentile of GET /health, asked by another process
refusal    while the queue is full: requests that are refused, and the processor time of the frontend for each of them,
           without that of as many seconds in which none came

The client runs on the same cores as the server, as a client on the same host does.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass, field
from multiprocessing.synchronize import Event
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil

from benchmarks.environments import ROOT
from benchmarks.systems.system import HttpSystem, clean_environment
from oarlock.server.bench.client.http_stream import BrokenError, ConnectError, HttpClient, StatusError, Target
from oarlock.server.bench.workload import arrivals

MODEL = ROOT / "models" / "oarlock-demo"
RUNNING, WAITING = 8, 32  # sequences
PROMPT = "The harbour lay quiet under the morning fog. " * 2
ANSWER_TOKENS = 8
FACTORS = (1, 2, 5)
_FILLING_S = 3.0  # of an open loop, until the queue is as full as it will be
_PROBE_S = 0.05
_NUM_REFUSED, _USERS = 400, 40


@dataclass(slots=True)
class Found:
    """Figures of one server, one number a round."""

    capacity: list[float] = field(default_factory=list)  # completed requests per second
    completed: dict[int, list[float]] = field(default_factory=dict)  # factor -> completed requests per second
    health_p99: dict[int, list[float]] = field(default_factory=dict)  # seconds
    refusal: list[float] = field(default_factory=list)  # seconds of processor time


def start(checkout: Path, threads: int) -> HttpSystem:
    python = checkout / ".venv" / "bin" / "python"
    command = [str(python), "-P", "-m", "oarlock", "serve", str(MODEL), "--port", "{port}", "--log-level", "warning"]
    command += ["--max-num-seqs", str(RUNNING), "--max-waiting-requests", str(WAITING), "--num-threads", str(threads)]
    environment = clean_environment(threads, PYTHONPATH=str(checkout))
    del environment["OMP_NUM_THREADS"]
    return HttpSystem("oarlock", "Oarlock", {}, command, environment, checkout)


def body(number: int, answer_tokens: int = ANSWER_TOKENS) -> bytes:
    """Body of a request; no two share the beginning of a prompt."""
    fields = {"prompt": f"{number} {PROMPT}", "max_tokens": answer_tokens, "temperature": 0, "ignore_eos": True}
    return json.dumps(fields).encode()


async def ask(client: HttpClient, content: bytes) -> int:
    """Send a request and return its status, 0 where none came."""
    try:
        await client.post("/v1/completions", content, lambda at, piece: None)
    except StatusError as error:
        return error.status
    except (ConnectError, BrokenError):
        return 0
    return 200


async def closed_loop(url: str, seconds: float, seed: int) -> float:
    """Completed requests per second of `RUNNING` users."""
    client, ends, began = HttpClient(Target.parse(url)), list[float](), time.perf_counter()

    async def user(number: int) -> None:
        while time.perf_counter() - began < seconds:
            number += RUNNING
            if await ask(client, body(number)) == 200:
                ends.append(time.perf_counter() - began)

    await asyncio.gather(*(user(seed * 1_000_000 + number) for number in range(RUNNING)))
    client.close()
    return len(ends) / max(ends)


async def open_loop(url: str, rate: float, seconds: float, seed: int) -> float:
    """Completed requests per second, from `_FILLING_S` on until the last one is sent; the rest is given up."""
    client, ends = HttpClient(Target.parse(url)), list[float]()
    times = arrivals.constant(round(rate * seconds), rate, 1.0, seed)
    began = time.perf_counter()

    async def one(number: int) -> None:
        if await ask(client, body(number)) == 200:
            ends.append(time.perf_counter() - began)

    tasks = []
    for number, due in enumerate(times):
        while (wait := began + due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.append(asyncio.create_task(one(seed * 1_000_000 + number)))
    last = time.perf_counter() - began
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    client.close()
    return sum(_FILLING_S <= end <= last for end in ends) / (last - _FILLING_S)


def probe(url: str, stop: Event, answers: multiprocessing.SimpleQueue[list[float]]) -> None:
    """Seconds that /health took, each over a connection of its own."""
    host, found = urlsplit(url), list[float]()
    assert host.hostname is not None
    while not stop.wait(_PROBE_S):
        began = time.perf_counter()
        connection = http.client.HTTPConnection(host.hostname, host.port, timeout=60)
        connection.request("GET", "/health")
        connection.getresponse().read()
        connection.close()
        found.append(time.perf_counter() - began)
    answers.put(found)


def overloaded(url: str, rate: float, seconds: float, seed: int) -> tuple[float, float]:
    """Completed requests per second, and the 99th percentile of /health in seconds."""
    context = multiprocessing.get_context("spawn")
    stop, answers = context.Event(), context.SimpleQueue()
    prober = context.Process(target=probe, args=(url, stop, answers))
    prober.start()
    try:
        completed = asyncio.run(open_loop(url, rate, seconds, seed))
    finally:
        stop.set()
    delays = answers.get()
    prober.join()
    return completed, float(np.percentile(delays, 99))


async def refusal_seconds(server: HttpSystem) -> float:
    """Processor time of the frontend for one request that a full queue refuses."""
    frontend = psutil.Process(server.process.child.pid)
    client, holders = HttpClient(Target.parse(server.url)), HttpClient(Target.parse(server.url))

    def spent() -> float:
        times = frontend.cpu_times()
        return times.user + times.system

    async def user(number: int) -> list[int]:
        return [await ask(client, body(number, 1)) for _ in range(_NUM_REFUSED // _USERS)]

    held = [asyncio.create_task(ask(holders, body(-number, 1500))) for number in range(RUNNING + WAITING)]
    try:
        while (await holders.get_json("/load"))["requests_waiting"] < WAITING:
            await asyncio.sleep(0.1)
        before, began = spent(), time.perf_counter()
        statuses = await asyncio.gather(*map(user, range(_USERS)))
        if {status for of_user in statuses for status in of_user} != {429}:
            raise RuntimeError(f"requests beside a full queue got {statuses}")
        seconds, loaded = time.perf_counter() - began, spent() - before
        before = spent()
        await asyncio.sleep(seconds)
        return (loaded - (spent() - before)) / _NUM_REFUSED
    finally:
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        client.close()
        holders.close()


def measure(checkouts: dict[str, Path], threads: int, seconds: float, rounds: int) -> dict[str, Found]:
    found = {name: Found() for name in checkouts}
    servers: dict[str, HttpSystem] = {}
    try:
        for name, checkout in checkouts.items():
            servers[name] = start(checkout, threads)
            asyncio.run(closed_loop(servers[name].url, 2.0, 999))  # warms up
        for turn in range(rounds):
            order = list(servers.items())[:: 1 if turn % 2 else -1]
            for name, server in order:
                found[name].capacity.append(asyncio.run(closed_loop(server.url, seconds / 2, 10 * turn)))
            capacity = statistics.median(rate for one in found.values() for rate in one.capacity)
            for factor in FACTORS:
                for name, server in order:
                    seed = 10 * turn + factor + 100
                    completed, p99 = overloaded(server.url, factor * capacity, seconds, seed)
                    found[name].completed.setdefault(factor, []).append(completed / capacity)
                    found[name].health_p99.setdefault(factor, []).append(p99)
            for name, server in order:
                found[name].refusal.append(asyncio.run(refusal_seconds(server)))
    finally:
        for server in servers.values():
            server.close()
    return found


def table(found: dict[str, Found]) -> str:
    """Table in Markdown: medians over the rounds, with their range for shares."""
    head = ["server", "capacity, requests/s", *(f"completed at {factor} x" for factor in FACTORS)]
    head += [*(f"/health p99 at {factor} x, ms" for factor in FACTORS), "processor time of a refusal, ms"]
    lines = ["| " + " | ".join(head) + " |", "|---|" + "---:|" * (len(head) - 1)]
    for name, one in found.items():
        cells = [name, f"{statistics.median(one.capacity):.1f}"]
        for factor in FACTORS:
            shares = one.completed[factor]
            cells.append(f"{statistics.median(shares):.2f} ({min(shares):.2f} to {max(shares):.2f})")
        cells += [f"{statistics.median(one.health_p99[factor]) * 1e3:.0f}" for factor in FACTORS]
        cells.append(f"{statistics.median(one.refusal) * 1e3:.2f}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", nargs="*", default=[], metavar="NAME=DIRECTORY", help="servers beside this one")
    parser.add_argument("--seconds", type=float, default=12.0, help="of each open loop")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the model")
    arguments = parser.parse_args()
    others = dict(given.split("=", 1) for given in arguments.checkout)
    checkouts = {name: Path(path).resolve() for name, path in others.items()} | {"this checkout": ROOT}
    print(table(measure(checkouts, arguments.threads, arguments.seconds, arguments.rounds)))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
