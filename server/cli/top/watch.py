"""Looks at a server again and again: its state, with latencies, prefix hits and preemptions between two readings of
`/metrics`, on a terminal as one page or as JSON."""

from __future__ import annotations

import asyncio
import contextlib
import json
import select
import sys
import termios
import time
import tty
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from oarlock.server.cli.remote import Remote, ServerError, fit
from oarlock.server.cli.top.view import page

_ROWS_ABOVE = 18  # of a page with one engine: what its list of requests has to leave
_MAX_REQUESTS = 20
_HISTOGRAMS = {"ttft_ms": "vllm:time_to_first_token_seconds", "itl_ms": "vllm:inter_token_latency_seconds"}
_COUNTERS = {
    "queries": "vllm:prefix_cache_queries_total",
    "hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """Sums since the server started, over all engines."""

    buckets: dict[str, dict[float, float]] = field(default_factory=dict)  # name -> upper limit (s) -> observations
    counters: dict[str, float] = field(default_factory=dict)


def read_metrics(text: str) -> Reading:
    """Read the text of `/metrics`. Raises `ValueError` for another text."""
    from prometheus_client.parser import text_string_to_metric_families

    buckets: dict[str, dict[float, float]] = {name: {} for name in _HISTOGRAMS}
    counters = dict.fromkeys(_COUNTERS, 0.0)
    of_bucket = {f"{metric}_bucket": name for name, metric in _HISTOGRAMS.items()}
    of_counter = {metric: name for name, metric in _COUNTERS.items()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if (name := of_bucket.get(sample.name)) is not None:
                limit = float(sample.labels["le"])
                buckets[name][limit] = buckets[name].get(limit, 0.0) + sample.value
            elif (name := of_counter.get(sample.name)) is not None:
                counters[name] += sample.value
    return Reading(buckets, counters)


def between(before: Reading, now: Reading) -> dict[str, Any]:
    """Percentiles in ms, the share of prompt tokens found in the prefix cache, and preemptions. None: nothing happened.

    If the server was started again in between, the figures are those since that start.
    """
    if any(now.counters[name] < before.counters.get(name, 0.0) for name in now.counters):
        before = Reading()
    found: dict[str, Any] = {}
    for name, buckets in now.buckets.items():
        old = before.buckets.get(name, {})
        new = {limit: count - old.get(limit, 0.0) for limit, count in sorted(buckets.items())}
        found[name] = {"p50": percentile(new, 0.5), "p90": percentile(new, 0.9)}
    change = {name: count - before.counters.get(name, 0.0) for name, count in now.counters.items()}
    found["prefix_hit_rate"] = round(change["hits"] / change["queries"], 4) if change["queries"] else None
    found["preemptions"] = int(change["preemptions"])
    return found


def percentile(buckets: dict[float, float], share: float) -> float | None:
    """Percentile in ms, interpolated within a bucket as Prometheus does. `buckets`: cumulative, by limit in s."""
    total = max(buckets.values(), default=0.0)
    if total <= 0:
        return None
    wanted, lower, below = share * total, 0.0, 0.0
    for limit, count in buckets.items():
        if count >= wanted:
            if limit == float("inf"):
                break  # the highest limit is all that is known
            part = (wanted - below) / (count - below) if count > below else 1.0
            return round(1e3 * (lower + part * (limit - lower)), 3)
        lower, below = limit, count
    return round(1e3 * lower, 3)


class Watcher:
    """Watches a server: `look` returns its state, with latencies since the last look, at first since its start."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._before = Reading()

    async def look(self) -> dict[str, Any]:
        """Ask for the state and the metrics. Raises `ServerError`."""
        state = await self._remote.get_json("/v1/state")
        try:
            now = read_metrics((await self._remote.get("/metrics")).decode())
            found = {**state, "latencies": between(self._before, now)}
            page(found, self._remote.url, 80, 1)  # every member that is shown is there
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            cause = f"{self._remote.url} says something else of its state than this version knows ({error!r})."
            raise ServerError(cause, 200) from None
        self._before = now
        return found


def watch(remote: Remote, *, once: bool, as_json: bool, interval_s: float) -> int:
    """Run `oarlock top`; returns the exit code. Raises `StartupError` where the first look fails."""
    watcher = Watcher(remote)
    with asyncio.Runner() as runner:
        try:
            state = runner.run(watcher.look())
        except ServerError as error:
            raise error.as_startup_error() from None
        try:
            if as_json:
                return _write(runner, watcher, state, once, interval_s)
            console = Console(highlight=False)
            if once or not sys.stdout.isatty():
                console.print(page(state, remote.url, console.width, _MAX_REQUESTS))
                return 0
            return _show(runner, watcher, state, console, remote.url, interval_s)
        except KeyboardInterrupt:
            return 0
        finally:
            remote.close()


def _write(runner: asyncio.Runner, watcher: Watcher, state: dict[str, Any], once: bool, interval_s: float) -> int:
    if once:
        print(json.dumps(state, indent=1))
        return 0
    while True:
        print(json.dumps(state), flush=True)
        time.sleep(interval_s)
        try:
            state = runner.run(watcher.look())
        except ServerError as error:
            raise error.as_startup_error() from None


def _show(
    runner: asyncio.Runner, watcher: Watcher, state: dict[str, Any], console: Console, url: str, interval_s: float
) -> int:
    problem = ""
    with _single_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            live.update(_whole(state, problem, console, url), refresh=True)
            if _left_within(interval_s):
                return 0
            try:
                state, problem = runner.run(watcher.look()), ""
            except ServerError as error:  # it may come back
                problem = f"{error.cause} Shown is the last state."


def _whole(state: dict[str, Any], problem: str, console: Console, url: str) -> RenderableType:
    rows = max(1, min(_MAX_REQUESTS, console.height - _ROWS_ABOVE))
    foot = Text(fit(problem), style="red") if problem else Text("q leaves", style="dim")
    return Group(page(state, url, console.width, rows), Text(""), foot)


@contextlib.contextmanager
def _single_keys() -> Generator[None]:
    """Keys arrive one by one and are not shown, where the standard input is a terminal."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _left_within(seconds: float) -> bool:
    """Wait; True as soon as the user presses q."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if not sys.stdin.isatty():
            time.sleep(left)
        elif select.select([sys.stdin], [], [], left)[0] and sys.stdin.read(1) in ("q", "Q", ""):
            return True
    return False
