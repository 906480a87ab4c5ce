"""The map of KV blocks, from the runs that `/v1/state` writes to as many cells as a terminal has room for."""

from __future__ import annotations

import re

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
