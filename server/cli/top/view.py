"""The live state as a page of a terminal, with the map of KV blocks: pure, the same state gives the same page."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from oarlock.server.cli.remote import fit

_RUNS = re.compile(r"([hcf])(\d+)")


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


_CELLS = {"h": ("█", "red"), "c": ("▒", "cyan"), "f": ("·", "dim")}  # also without colours
_MAP_ROWS = 6
_STATUS = {"ok": "green", "loading": "yellow", "starting": "yellow", "draining": "yellow", "degraded": "yellow"}


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
