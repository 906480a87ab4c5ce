"""Watches a server: its state and its latencies, prefix hits and preemptions between two looks, as a page or as JSON.

The page has the map of KV blocks. It is pure: the same state gives the same page.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
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
from rich.table import Table
from rich.text import Text

from oarlock.server.cli.remote import Remote, ServerError, fit

_RUNS = re.compile(r"([hcf])(\d+)")
_CELLS = {"h": ("█", "red"), "c": ("▒", "cyan"), "f": ("·", "dim")}  # also without colours
_MAP_ROWS = 6
_STATUS = {"ok": "green", "loading": "yellow", "starting": "yellow", "draining": "yellow", "degraded": "yellow"}
_ROWS_ABOVE = 18  # of a page with one engine: what its list of requests has to leave
_MAX_REQUESTS = 20
_HISTOGRAMS = {"ttft_ms": "vllm:time_to_first_token_seconds", "itl_ms": "vllm:inter_token_latency_seconds"}
_COUNTERS = {
    "queries": "vllm:prefix_cache_queries_total",
    "hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}


def shrink(runs: str, cells: int) -> str:
    """A text of at most `cells` letters `h` (held), `c` (cached) or `f` (free), in the order of the blocks.

    `runs`: such as `h12c40f2000`. Where a letter stands for several blocks it is what most of them are, and `h` before
    `c` before `f` where they are equally many. Raises `ValueError` for anything else.
    """
    lengths = [(letter, int(count)) for letter, count in _RUNS.findall(runs)]
    if "".join(f"{letter}{count}" for letter, count in lengths) != runs:
        raise ValueError(f"not a map of KV blocks: {runs[:60]}")
    total = sum(count for _, count in lengths)
    wide = max(1, -(-total // cells))  # blocks for each letter
    found: list[str] = []
    counts = {"h": 0, "c": 0, "f": 0}
    room = wide
    for letter, count in lengths:
        left = count
        while left:
            taken = min(left, room)
            counts[letter] += taken
            left, room = left - taken, room - taken
            if room == 0:
                found.append(_most(counts))
                counts, room = {"h": 0, "c": 0, "f": 0}, wide
    if room < wide:
        found.append(_most(counts))
    return "".join(found)


def _most(counts: dict[str, int]) -> str:
    return max("hcf", key=lambda letter: counts[letter])  # the first of equals


def page(state: dict[str, Any], url: str, width: int, num_requests: int) -> RenderableType:
    """Page of the live state.

    `state`: of `/v1/state`, with `latencies`. `width`: columns; `num_requests`: how many of each engine at most.
    """
    parts: list[RenderableType] = [_head(state, url), _rates(state)]
    for engine in state["engines"]:
        parts += [Text(""), *_engine(engine, len(state["engines"]) > 1, width, num_requests)]
    if not state["engines"]:
        loading = state.get("loading") or {}
        parts.append(
            _line(f"loading: {loading.get('step', '')} {loading.get('progress', 0.0):.0%} {loading.get('detail', '')}")
        )
    return Group(*parts)


def _head(state: dict[str, Any], url: str) -> Text:
    status = fit(str(state["status"]))
    return Text.assemble(
        (fit(state["model"]), "bold"),
        f"  {fit(url)}  ",
        (status, _STATUS.get(status, "red")),
        (f"  up {duration(state['uptime_s'])}  version {fit(state['version'])}", "dim"),
    )


def _rates(state: dict[str, Any]) -> Text:
    requests, rate, found = state["requests"], state["tokens_per_second"], state["latencies"]
    hits = found["prefix_hit_rate"]
    return Text(
        f"requests  {requests['running']} running, {requests['waiting']} waiting, {requests['finished']} finished, "
        f"{requests['refused']} refused, {requests['invalid']} invalid, {found['preemptions']} preemptions\n"
        f"tokens/s  {rate['generation']:.1f} generated, {rate['prompt']:.1f} of prompts computed"
        f", {'no prompts' if hits is None else f'{hits:.0%} of prompts cached'}\n"
        f"latency   first token {_pair(found['ttft_ms'])}, between tokens {_pair(found['itl_ms'])}"
    )


def _engine(engine: dict[str, Any], several: bool, width: int, num_requests: int) -> list[RenderableType]:
    name = f"engine {engine['engine']}" if several else "engine"
    if engine.get("status", "ready") != "ready":
        return [_line(f"{name} is {engine['status']}", "red")]
    kv, step = engine["kv"], engine["step"]
    title = f"{name}  {engine['running']} running, {engine['waiting']} waiting"
    counts = Text.assemble(
        f"KV blocks of {kv['block_size']} tokens: ",
        *[
            part
            for letter, word in (("h", "held"), ("c", "cached"), ("f", "free"))
            for part in ((_CELLS[letter][0], _CELLS[letter][1]), f" {kv[word]} {word}  ")
        ],
        f"of {kv['total']}",
    )
    times = f"last {step['last_ms']:.1f} ms, median {step['median_ms']:.1f}, p99 {step['p99_ms']:.1f}"
    parts: list[RenderableType] = [
        _line(title, "bold"),
        counts,
        _map(kv["map"], width),
        Text(f"steps  {step['count']}, {times}"),
    ]
    if step["ranks"]:
        parts.append(_ranks(step["ranks"]))
    if engine["slowest"]:
        parts.append(_requests(engine["slowest"][:num_requests]))
    return parts


def _map(runs: str, width: int) -> Text:
    shown = Text()
    for at, letter in enumerate(shrink(runs, max(1, width - 2) * _MAP_ROWS)):
        if at and at % max(1, width - 2) == 0:
            shown.append("\n")
        shown.append(*_CELLS[letter])
    return shown


def _ranks(ranks: list[dict[str, Any]]) -> Text:
    """Each rank's time, and how far the slowest is from the fastest."""
    medians = [rank["median_ms"] for rank in ranks]
    each = ", ".join(f"{rank['rank']}: {rank['last_ms']:.1f} (median {rank['median_ms']:.1f})" for rank in ranks)
    apart = f"; medians {max(medians) - min(medians):.1f} ms apart" if len(ranks) > 1 else ""
    return Text(f"ranks  {each}{apart}")


def _requests(slowest: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("oldest requests", no_wrap=True, overflow="ellipsis")
    table.add_column("state")
    for name in ("age", "prompt", "cached", "output"):
        table.add_column(name, justify="right")
    for one in slowest:
        numbers = (str(one[name]) for name in ("prompt_tokens", "cached_tokens", "output_tokens"))
        table.add_row(Text(fit(one["id"])), Text(fit(one["state"])), duration(one["age_s"]), *numbers)
    return table


def _line(text: str, style: str = "") -> Text:
    return Text(fit(text), style=style)


def _pair(percentiles: dict[str, float | None]) -> str:
    if percentiles["p50"] is None or percentiles["p90"] is None:
        return "-"
    return f"{percentiles['p50']:.1f} ms (p90 {percentiles['p90']:.1f})"


def duration(seconds: float) -> str:
    """Duration as text: `3.2 s`, `4 min 10 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


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
