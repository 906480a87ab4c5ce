"""Pictures of docs/ that are drawn from what they show: the real scheduler's steps and blocks, and tables of the pages.

`make docs` writes them, with the charts of results; the tests compare.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.house.rules import ROOT
from tests.unit.engine.engine_fakes import VOCAB, Driver, make_config, make_request
from tools import weight_pictures
from tools.drawing import WIDTH, cell, svg, text


class Scene:
    """Four requests on a small engine: what each step computes of each, and who holds which blocks meanwhile."""

    BUDGET, BLOCK, BLOCKS = 12, 4, 25
    PROMPTS = (range(100, 110), range(200, 226), (*range(100, 108), *range(300, 314)), range(400, 407))
    ARRIVALS = (0, 1, 2, 5)  # the steps before which they come
    ANSWERS = (9, 6, 5, 4)
    LOOK = 6  # the step after which blocks are looked at

    def __init__(self) -> None:
        config = make_config(max_num_batched_tokens=self.BUDGET, block_size=self.BLOCK)
        self.steps: list[dict[int, int]] = []  # tokens of each request
        self.first = [0] * 4  # the step of each request's first token
        self.cached = [0] * 4  # tokens found in the prefix cache
        driver = Driver(config, num_blocks=self.BLOCKS)
        while len(self.steps) < max(self.ARRIVALS) or driver.scheduler.has_work:
            for number, arrival in enumerate(self.ARRIVALS):
                if arrival == len(self.steps):
                    prompt = [token % VOCAB for token in self.PROMPTS[number]]
                    driver.add(make_request(number, prompt, max_tokens=self.ANSWERS[number]))
            assert driver.step() is not None
            self.steps.append({item.seq.request_id: item.num_tokens for item in driver.items})
            for item in driver.items:
                if sum(number in step for step in self.steps for number in [item.seq.request_id]) == 1:
                    self.cached[item.seq.request_id] = item.start
            if len(self.steps) == self.LOOK:
                self._look(driver)

    def _look(self, driver: Driver) -> None:
        running = {item.seq.request_id: item.seq for item in driver.items}
        manager = driver.scheduler.memory
        self.tables = {number: (seq.block_ids[:], seq.num_computed_tokens) for number, seq in sorted(running.items())}
        self.cached_blocks = set(manager.leader.pool.cached)
        self.num_free = manager.num_free


def step_timeline() -> str:
    """Steps from left to right, a row for each request: how many of its tokens the scheduler put into each."""
    scene = Scene()
    left, top, height = 150, 44, 30
    width = (WIDTH - left - 10) / len(scene.steps)
    parts = [
        text(
            left, 18, "steps of at most 12 tokens: answers first, then as much of prompts as there is room for", "small"
        )
    ]
    said = []
    for number, prompt in enumerate(scene.PROMPTS):
        y, todo = top + height * number, len(prompt) - scene.cached[number]
        found = f", {scene.cached[number]} cached" if scene.cached[number] else ""
        parts.append(text(8, y + 18, f"{len(prompt)} of prompt{found}", "small"))
        last = max(at for at, step in enumerate(scene.steps) if number in step)
        for at, step in enumerate(scene.steps):
            x, tokens = left + width * at, step.get(number, 0)
            if tokens:
                is_prompt = todo > 0
                todo -= tokens
                inset = 0 if is_prompt else 7
                parts += cell(
                    x + 1, y + inset, width - 2, height - 4 - 2 * inset, f"r{number}", tokens if is_prompt else ""
                )
                said.append(
                    f"step {at + 1}: {tokens} {'prompt' if is_prompt else 'answer'} tokens of request {number + 1}"
                )
            elif scene.ARRIVALS[number] <= at < last:
                parts += cell(x + 1, y, width - 2, height - 4, "wait")
    y = top + height * len(scene.PROMPTS)
    for at, step in enumerate(scene.steps):
        parts.append(text(left + width * (at + 0.5), y + 14, sum(step.values()), "small mid"))
    parts.append(text(8, y + 14, "tokens of the step", "small"))
    parts.append(
        text(
            8,
            y + 34,
            "tall: tokens of a prompt, with their number; flat: one token of an answer; dashed: it waits",
            "small",
        )
    )
    return svg("Steps of four requests", "; ".join(said), y + 44, parts)


def kv_blocks() -> str:
    """The pool after one of these steps, and the block tables that name its blocks."""
    scene = Scene()
    holders: dict[int, list[int]] = {}
    for number, (table, _) in scene.tables.items():
        for block in table:
            holders.setdefault(block, []).append(number)
    size, left = (WIDTH - 158) / (scene.BLOCKS - 1), 150
    parts = [text(8, 30, f"{scene.BLOCKS - 1} blocks of {scene.BLOCK} tokens", "small")]
    for block in range(1, scene.BLOCKS):
        x, who = left + size * (block - 1), holders.get(block, [])
        for part, number in enumerate(who):
            parts += cell(x + 1, 12 + 28 / len(who) * part, size - 2, 28 / len(who), f"r{number}")
        if not who:
            parts += cell(x + 1, 12, size - 2, 28, "band" if block in scene.cached_blocks else "empty")
        parts.append(text(x + size / 2, 54, block, "small mid"))
    y = 74
    for number, (table, computed) in scene.tables.items():
        parts.append(text(8, y + 17, f"table of request {number + 1}", "small"))
        for column, block in enumerate(table):
            x, share = left + size * column, min(1.0, max(0.0, computed / scene.BLOCK - column))
            parts += cell(x + 1, y, size - 2, 24, "empty")
            parts += cell(x + 1, y, (size - 2) * share, 24, f"r{number}")
            parts.append(text(x + size / 2, y + 16, block, "on" if share > 0.5 else "small mid"))
        parts.append(text(left + size * len(table) + 8, y + 17, f"{computed} tokens", "small"))
        y += 32
    shared = sum(len(who) > 1 for who in holders.values())
    parts.append(
        text(
            8, y + 12, f"two colours: {shared} blocks of a beginning that two requests share; the rest is free", "small"
        )
    )
    tables = "; ".join(
        f"request {number + 1} holds {', '.join(map(str, table))}" for number, (table, _) in scene.tables.items()
    )
    return svg(
        "KV blocks and block tables", f"After step {scene.LOOK}: {tables}; {scene.num_free} are free.", y + 24, parts
    )


LANES = ("client", "server: text", "engine: tokens, blocks", "workers: tensors")
_HOP = re.compile(r"^\| (\d+) \| `((server|engine|workers)/[\w/]*?(\w+)\.py)`", re.MULTILINE)


def request_life() -> str:
    """The hops of the table of docs/overview.md, each in the lane of its package, under the name of its first file."""
    hops = [(int(hop[1]), hop[2], hop[3], hop[4]) for hop in _HOP.finditer((ROOT / "docs" / "overview.md").read_text())]
    assert [hop[0] for hop in hops] == list(range(1, len(hops) + 1)) and all((ROOT / hop[1]).is_file() for hop in hops)
    left, top, lane = 40.0, 30, 70
    step = (WIDTH - 2 * left) / (len(hops) + 1)
    places = [(left, top)]
    for number, _, package, _ in hops:
        row = 1 + ("server", "engine", "workers").index(package)
        places.append((left + step * number, top + lane * row))
    places.append((WIDTH - left, top))
    parts = []
    for number, name in enumerate(LANES):
        parts.append(f'<rect class="band" x="0" y="{top + lane * number - 22}" width="{WIDTH}" height="{lane - 8}"/>')
        parts.append(text(6, top + lane * number - 10, name, "small"))
    parts.append(f'<polyline class="way" points="{" ".join(f"{x:.0f},{y:g}" for x, y in places)}"/>')
    back = [hop[1] for hop in hops].index("engine/core/engine_core.py") + 1
    forth = [hop[1] for hop in hops].index("engine/scheduler/scheduler.py") + 1
    (x0, y0), (x1, _) = places[back], places[forth]
    curve = f"M {x0:.0f} {y0} C {x0:.0f} {y0 - 70} {x1:.0f} {y0 - 70} {x1:.0f} {y0}"
    parts.append(f'<path class="way" stroke-dasharray="4 4" d="{curve}"/>')
    parts.append(text((x0 + x1) / 2, y0 - 57, "once for each step", "small mid"))
    for (number, _, _, stem), (x, y) in zip(hops, places[1:-1], strict=True):
        parts.append(f'<circle class="r0" cx="{x:.0f}" cy="{y}" r="10"/>')
        parts.append(text(round(x), y + 4, number, "on"))
        words = stem.split("_", 1)
        below = y + 22 if number % 2 else y - 3 - 11 * len(words)  # names of neighbours would touch
        parts += [text(round(x), below + 11 * at, word.replace("_", " "), "small mid") for at, word in enumerate(words)]
    said = "; ".join(f"{number}: {file}" for number, file, _, _ in hops)
    return svg("The life of a request", said, top + lane * len(LANES) - 20, parts)


def pictures() -> dict[Path, str]:
    """All of them, by their files."""
    made = {
        "step-timeline": step_timeline,
        "kv-blocks": kv_blocks,
        "request-life": request_life,
        "sum-tree": weight_pictures.sum_tree,
        "shards": weight_pictures.shards,
        "plan-memory": weight_pictures.plan_memory,
        "drafts": weight_pictures.drafts,
    }
    return {ROOT / "docs" / f"{name}.svg": make() for name, make in made.items()}
