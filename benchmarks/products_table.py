"""The tables of a result of `benchmarks.products`: rates, shares of what the machine allowed, and ratios."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.tables import Result, Spread, best_gemm, ceilings, cell, number, read_rate, spread, table

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
STEP = "step"  # all products of all layers and the head


def size(level: dict[str, Any], part: str) -> int:
    """Elements of all weights of a product, or of the whole step."""
    return sum(p["outputs"] * p["inputs"] * p["count"] for p in level["products"] if part in (STEP, p["name"]))


def parts(level: dict[str, Any], rows: str) -> list[str]:
    """The products that were measured at this number of rows, and the step."""
    return list(next(iter(level["rounds"][0]["seconds"][rows].values())))


def measured(turn: dict[str, Any], rows: str, system: str, part: str) -> float | None:
    """Seconds, or None where a system was too slow to be asked."""
    return turn["seconds"][rows].get(system, {}).get(part)


def ratio(level: dict[str, Any], rows: str, part: str, ours: str, other: str) -> Spread | None:
    """Speed of ours as a multiple of the other's, round by round."""
    pairs = [(measured(t, rows, ours, part), measured(t, rows, other, part)) for t in level["rounds"]]
    return spread(b / a if a and b else None for a, b in pairs)


def line(result: Result, level: dict[str, Any], rows: str, part: str) -> list[str]:
    ours, *others = level["systems"]
    dtype, elements = result["model"]["dtype"], size(level, part)
    if part == STEP and "head" not in parts(level, rows):
        elements -= size(level, "head")
    turns = [(seconds, t) for t in level["rounds"] if (seconds := measured(t, rows, ours, part)) is not None]
    if len(turns) < len(level["rounds"]):
        return [part, rows, *["-"] * (5 + len(others))]
    gigabytes, flops = elements * BYTES[dtype] / 1e9, 2e-9 * elements * int(rows)
    read = spread(gigabytes / seconds / read_rate(turn) for seconds, turn in turns)
    gemm = spread(flops / seconds / best_gemm(turn, dtype) for seconds, turn in turns)
    middle = statistics.median(seconds for seconds, _ in turns)
    rates = [number(1e3 * middle), number(gigabytes / middle), cell(read)]
    ratios = [cell(ratio(level, rows, part, ours, other)) for other in others]
    return [part, rows, *rates, number(flops / middle), cell(gemm), *ratios]


def of_level(result: Result, level: dict[str, Any]) -> str:
    ours, *others = level["systems"]
    head = ["product", "rows", "ms", "GB/s", "of streaming read", "GFLOP/s", "of the fastest product"]
    head += [f"times as fast as {other}" for other in others]
    every = level["rounds"][0]["seconds"]
    lines = [line(result, level, rows, part) for rows in every for part in parts(level, rows)]
    said = f"Level {level['level']}, {ours}: milliseconds are of all layers together. Median (range) of the rounds."
    return "\n\n".join([said, table(head, lines), ceilings(level)])


def products(result: Result) -> str:
    """Everything about one run, as Markdown."""
    here, model = result["machine"], result["model"]
    about = (
        f"{here['processor']}, {here['cores']} cores, torch {here['torch']}, {result['measured']}. The products of "
        f"{model['shape']}, {model['dtype']}, {result['threads']} threads."
    )
    return "\n\n".join([about, *(of_level(result, level) for level in result["levels"])])
