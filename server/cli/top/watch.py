"""The view of a server: its state, its batches, and latencies, prefix hits and preemptions between two looks.

The page has the map of KV blocks. It is pure: the same state gives the same page. `--json` writes its data.
"""

import asyncio
import json
import os
import re
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from oarlock.server.cli.remote import Remote, ServerError, fit, single_keys
from oarlock.server.launch.child_process import signals_handled

_RUNS = re.compile(r"([hcf])(\d+)")
_CELLS = {"h": ("█", "red"), "c": ("▒", "cyan"), "f": ("·", "dim")}  # characters differ, so that colours are not needed
_MAP_ROWS = 6
_STATUS = {"ok": "green", "loading": "yellow", "starting": "yellow", "draining": "yellow", "degraded": "yellow"}
_ROWS_ABOVE = 18  # rows of a page with one engine that its list of requests has to leave free
_MAX_REQUESTS = 20
_MAX_BATCHES = 5
_MAX_ADAPTERS = 8
_BATCHES = f"/v1/batches?limit={_MAX_BATCHES}"  # the newest
_HISTOGRAMS = {"ttft_ms": "vllm:time_to_first_token_seconds", "itl_ms": "vllm:inter_token_latency_seconds"}
_COUNTERS = {
    "queries": "vllm:prefix_cache_queries_total",
    "hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}


def shrink(runs: str, cells: int) -> str:
    """Return a text of at most `cells` letters `h` (held), `c` (cached) or `f` (free), in the order of the blocks.

    `runs`: such as `h12c40f2000`. If a letter represents several blocks, it is the most frequent of their states, and
    `h` before `c` before `f` among equals. Raises `ValueError` for anything else.
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


def page(state: dict[str, Any], url: str, width: int, num_requests: int, replica: int | None = None) -> RenderableType:
    """Return the page of the live state.

    `state`: from `/v1/state`, with `latencies` and `batches`. `width`: columns; `num_requests`: maximum for each
    engine. `replica`: the replica whose details are shown; None: all.
    """
    parts: list[RenderableType] = [_head(state, url), _rates(state)]
    engines = state["engines"]
    if len(engines) > 1:
        parts += [Text(""), _replicas(engines)]
    for engine in engines:
        if replica is None or engine["engine"] == replica or len(engines) == 1:
            parts += [Text(""), *_engine(engine, len(engines) > 1, width, num_requests)]
    if not engines:
        loading = state.get("loading") or {}
        parts.append(
            _line(f"loading: {loading.get('step', '')} {loading.get('progress', 0.0):.0%} {loading.get('detail', '')}")
        )
    if state["batches"]:
        parts += [Text(""), _batches(state["batches"], state["time"])]
    return Group(*parts)


def _replicas(engines: list[dict[str, Any]]) -> Table:
    table = _table("replica", "state", "running", "waiting", "KV held", "cached", "steps", "last", "median")
    for engine in engines:
        kv, step, total = engine["kv"], engine["step"], engine["kv"]["total"] or 1
        times = (f"{step[name]:.1f} ms" for name in ("last_ms", "median_ms"))
        numbers = (engine["running"], engine["waiting"], f"{kv['held'] / total:.0%}", f"{kv['cached'] / total:.0%}")
        is_up = engine["status"] == "ready"
        status = Text(fit(engine["status"]), style="" if is_up else "red")
        table.add_row(str(engine["engine"]), status, *map(str, numbers), str(step["count"]), *times)
    return table


def _batches(batches: list[dict[str, Any]], now: float) -> Table:
    table = _table("batches", "state", "age", "done", "failed", "of")
    for batch in batches:
        counts = batch["request_counts"]
        numbers = (str(counts[name]) for name in ("completed", "failed", "total"))
        age = duration(max(0.0, now - batch["created_at"]))
        table.add_row(Text(fit(batch["id"])), Text(fit(batch["status"])), age, *numbers)
    return table


def _table(name: str, state: str, *numbers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(name, no_wrap=True, overflow="ellipsis")
    table.add_column(state)
    for number in numbers:
        table.add_column(number, justify="right")
    return table


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
    adapters = engine.get("adapters")  # None: the engine serves none; servers of earlier versions lack it
    if adapters is not None:
        parts += _adapters(adapters)
    if engine["slowest"]:
        parts.append(_requests(engine["slowest"][:num_requests], has_adapters=adapters is not None))
    return parts


def _map(runs: str, width: int) -> Text:
    shown = Text()
    for at, letter in enumerate(shrink(runs, max(1, width - 2) * _MAP_ROWS)):
        if at and at % max(1, width - 2) == 0:
            shown.append("\n")
        shown.append(*_CELLS[letter])
    return shown


def _ranks(ranks: list[dict[str, Any]]) -> Text:
    """Return each rank's time, and the difference between the slowest and the fastest."""
    medians = [rank["median_ms"] for rank in ranks]
    each = ", ".join(f"{rank['rank']}: {rank['last_ms']:.1f} (median {rank['median_ms']:.1f})" for rank in ranks)
    apart = f"; medians {max(medians) - min(medians):.1f} ms apart" if len(ranks) > 1 else ""
    return Text(f"ranks  {each}{apart}")


def _adapters(adapters: dict[str, Any]) -> list[RenderableType]:
    """Return the memory of LoRA adapters, and a table of the used ones."""
    slots, memory = f"{adapters['in_slots']} of {adapters['slots']} slots", adapters["in_host_memory"]
    counts = f"{slots}, {memory} of {adapters['host_limit']} in host memory, {adapters['names']} known"
    parts: list[RenderableType] = [Text(f"adapters  {counts}, {adapters['waiting']} requests wait")]
    used = _used_adapters(adapters)
    if used:
        table = _table("adapter", "memory", "running", "waiting")
        for one in used:
            memory = f"slot {one['slot']}" if one["slot"] else fit(one["state"].replace("_", " "))
            table.add_row(Text(fit(one["name"])), Text(memory), str(one["running"]), str(one["waiting"]))
        parts.append(table)
    return parts


def _rows_of_adapters(engine: dict[str, Any]) -> int:
    return 0 if engine.get("adapters") is None else 2 + len(_used_adapters(engine["adapters"]))


def _used_adapters(adapters: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the first adapters that are in a slot or have requests."""
    shown = [] if adapters is None else adapters["shown"]
    return [one for one in shown if one["slot"] or one["running"] or one["waiting"]][:_MAX_ADAPTERS]


def _requests(slowest: list[dict[str, Any]], *, has_adapters: bool) -> Table:
    table = _table("oldest requests", "state", "age", "prompt", "cached", "output")
    if has_adapters:
        table.add_column("adapter", no_wrap=True, overflow="ellipsis")
    for one in slowest:
        numbers = (str(one[name]) for name in ("prompt_tokens", "cached_tokens", "output_tokens"))
        adapter = [Text(fit(one["adapter"] or "-"))] if has_adapters else []
        table.add_row(Text(fit(one["id"])), Text(fit(one["state"])), duration(one["age_s"]), *numbers, *adapter)
    return table


def _line(text: str, style: str = "") -> Text:
    return Text(fit(text), style=style)


def _pair(percentiles: dict[str, float | None]) -> str:
    if percentiles["p50"] is None or percentiles["p90"] is None:
        return "-"
    return f"{percentiles['p50']:.1f} ms (p90 {percentiles['p90']:.1f})"


def duration(seconds: float) -> str:
    """Return a duration as text: `3.2 s`, `4 min 10 s`, `2 h 5 min`, `3 d 4 h`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = int(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


@dataclass(frozen=True, slots=True)
class MetricSums:
    """Sums since the server started, over all engines."""

    buckets: dict[str, dict[float, float]] = field(default_factory=dict)  # name -> upper limit (s) -> observations
    counters: dict[str, float] = field(default_factory=dict)


def read_metrics(text: str) -> MetricSums:
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
    return MetricSums(buckets, counters)


def between(before: MetricSums, now: MetricSums) -> dict[str, Any]:
    """Return percentiles in ms, the fraction of prompt tokens found in the prefix cache, and preemptions. A value is
    None if nothing happened.

    If the server was restarted in between, the figures are since that start.
    """
    if any(now.counters[name] < before.counters.get(name, 0.0) for name in now.counters):
        before = MetricSums()
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
    """Return a percentile in ms, interpolated within a bucket as in Prometheus. `buckets`: cumulative, by limit in
    s."""
    total = max(buckets.values(), default=0.0)
    if total <= 0:
        return None
    wanted, lower, below = share * total, 0.0, 0.0
    for limit, count in buckets.items():
        if count >= wanted:
            if limit == float("inf"):
                break  # only the highest limit is known
            part = (wanted - below) / (count - below) if count > below else 1.0
            return round(1e3 * (lower + part * (limit - lower)), 3)
        lower, below = limit, count
    return round(1e3 * lower, 3)


class Watcher:
    """Watcher of a server: `look` returns its state, with latencies since the last look, at first since its start."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._before = MetricSums()
        self._has_batches = True

    async def look(self) -> dict[str, Any]:
        """Request the state, the metrics and the batches. Raises `ServerError`."""
        state = await self._remote.get_json("/v1/state")
        try:
            now = read_metrics((await self._remote.get("/metrics")).decode())
            found = {**state, "latencies": between(self._before, now), "batches": await self._batches()}
            page(found, self._remote.url, 80, 1)  # checks that every member that is shown is there
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            cause = f"The state of {self._remote.url} does not have the format that this version reads ({error!r})."
            raise ServerError(cause, 200) from None
        self._before = now
        return found

    async def _batches(self) -> list[dict[str, Any]] | None:
        """Return the newest batches; None if the server keeps none, or not for this key."""
        if not self._has_batches:
            return None
        try:
            listed = (await self._remote.get_json(_BATCHES))["data"]
        except ServerError as error:
            if error.status not in (401, 403, 404):
                raise
            self._has_batches = False
            return None
        return [{name: one[name] for name in ("id", "status", "created_at", "request_counts")} for one in listed]


def watch(remote: Remote, *, once: bool, as_json: bool, interval_s: float) -> int:
    """Run `oarlock top`. Returns the exit code. Raises `StartupError` if the first look fails."""
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
            with signals_handled((signal.SIGTERM, signal.SIGHUP), lambda number, frame: sys.exit(128 + number)):
                runner.run(_Display(watcher, console, remote.url, state).run(interval_s))
            return 0
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


class _Display:
    """The page on a screen of its own, until `q`. Ctrl-Z restores the terminal until the process continues."""

    def __init__(self, watcher: Watcher, console: Console, url: str, state: dict[str, Any]) -> None:
        self._watcher = watcher
        self._console = console
        self._url = url
        self._state = state
        self._problem = ""
        self._replica = 0  # replica whose details are shown
        self._keys: asyncio.Queue[str] = asyncio.Queue()
        self._taken = ExitStack()  # restores the terminal
        self._live = Live(console=console, screen=True, auto_refresh=False)

    async def run(self, interval_s: float) -> None:
        """Look and draw repeatedly."""
        with self._taken:
            self._take()
            while True:
                try:
                    async with asyncio.timeout(interval_s):
                        key = await self._keys.get()
                except TimeoutError:
                    await self._look()
                    key = " "
                if key in ("q", "Q", ""):
                    return
                self._replica = int(key) if key in set("0123456789") else self._replica
                self._draw()

    async def _look(self) -> None:
        try:
            self._state, self._problem = await self._watcher.look(), ""
        except ServerError as error:  # it may come back
            self._problem = f"{error.cause} The last state is shown."

    def _draw(self) -> None:
        console, num_engines = self._console, len(self._state["engines"])
        above = _ROWS_ABOVE + (num_engines + 2 if num_engines > 1 else 0)
        above += len(self._state["batches"]) + 2 if self._state["batches"] else 0
        above += max((_rows_of_adapters(engine) for engine in self._state["engines"]), default=0)
        rows = max(1, min(_MAX_REQUESTS, console.height - above))
        keys = f"q quits, 0 to {min(9, num_engines - 1)} choose a replica" if num_engines > 1 else "q quits"
        foot = Text(fit(self._problem), style="red") if self._problem else Text(keys, style="dim")
        shown = page(self._state, self._url, console.width, rows, self._replica)
        self._live.update(Group(shown, Text(""), foot), refresh=True)

    def _take(self) -> None:
        loop = asyncio.get_running_loop()
        if sys.stdin.isatty():
            self._taken.enter_context(single_keys(sys.stdin))
            loop.add_reader(sys.stdin, self._read_keys)
            self._taken.callback(loop.remove_reader, sys.stdin)
        self._live = self._taken.enter_context(Live(console=self._console, screen=True, auto_refresh=False))
        loop.add_signal_handler(signal.SIGTSTP, self._stop)
        self._taken.callback(loop.remove_signal_handler, signal.SIGTSTP)
        self._draw()

    def _stop(self) -> None:
        """Stop the process, as Ctrl-Z does without a handler. Returns when the shell continues it."""
        self._taken.close()
        signal.raise_signal(signal.SIGTSTP)
        self._take()

    def _read_keys(self) -> None:
        keys = os.read(sys.stdin.fileno(), 64).decode("utf-8", "replace")
        for key in keys or [""]:  # empty if the terminal is gone
            self._keys.put_nowait(key)
