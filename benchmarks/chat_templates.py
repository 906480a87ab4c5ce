"""Measures what it costs a chat request that its template is rendered in another process, beside rendering it in place.

    python -m benchmarks.chat_templates [--turns 1 8 100] [--rounds 400]

The demo model's template and conversations of so many turns of 400 characters. `in place`: Jinja in this thread;
`thread`: the same in another thread, which keeps the event loop free; `process`: as the server renders. All three are
measured in turn. Figures are microseconds, the median and the ninth decile of all rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from oarlock.server.llm.chat_template import ChatTemplate, read_template
from oarlock.server.llm.jinja_sandbox import Renderer
from tests.e2e.running import DEMO

TEXT = "A sentence of forty characters, and so. " * 10
LIMIT = 1 << 24  # characters


def conversation(turns: int) -> list[dict[str, Any]]:
    """Conversation of so many turns of user and assistant."""
    return [{"role": ("user", "assistant")[number % 2], "content": TEXT} for number in range(turns)]


async def measure(source: str, turns: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each round, by the way of rendering."""
    messages, renderer, template = conversation(turns), Renderer({"default": source}, {}), ChatTemplate(source, {})
    variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}

    async def in_place() -> str:
        return renderer.render("default", variables, LIMIT)

    async def in_thread() -> str:
        return await asyncio.get_running_loop().run_in_executor(pool, renderer.render, "default", variables, LIMIT)

    async def in_process() -> str:
        return await template.render(messages, True, LIMIT)

    ways: dict[str, Callable[[], Awaitable[str]]] = {
        "in place": in_place,
        "thread": in_thread,
        "process": in_process,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    with ThreadPoolExecutor(1) as pool:
        assert len({await way() for way in ways.values()}) == 1
        for _ in range(rounds):
            for name, way in ways.items():
                started = time.perf_counter()
                await way()
                times[name].append((time.perf_counter() - started) * 1e6)
    template.close()
    return times


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(prog="benchmarks.chat_templates", description=__doc__)
    parser.add_argument("--turns", type=int, nargs="+", default=[1, 8, 100])
    parser.add_argument("--rounds", type=int, default=400)
    arguments = parser.parse_args()
    source = read_template(DEMO / "chat_template.jinja")
    print("| turns | way | median µs | ninth decile | beside in place |\n|---|---|---|---|---|")
    for turns in arguments.turns:
        times = asyncio.run(measure(source, turns, arguments.rounds))
        base = statistics.median(times["in place"])
        for name, values in times.items():
            median, tail = statistics.median(values), statistics.quantiles(values, n=10)[-1]
            print(f"| {turns} | {name} | {median:.0f} | {tail:.0f} | {median / base:.1f} |")


if __name__ == "__main__":
    main()
