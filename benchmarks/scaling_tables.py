"""The tables of a result of `benchmarks/scaling.py`: how cost grows with batch, length and ranks."""

from __future__ import annotations

from typing import Any

from benchmarks.tables import cell, spread, table


def scaling(result: dict[str, Any]) -> str:
    """A heading and two tables per model and type."""
    parts = []
    for model in result["models"]:
        parts.append(f"**Qwen2.5-{model['shape'].upper()}'s shape, {model['dtype']}**")
        names = list(model["rounds"][0]["points"])
        for what, sweep in (("batch", _batch_table), ("length", _length_table)):
            if chosen := [name for name in names if name.startswith(what)]:
                parts.append(sweep(model, chosen))
    return "\n\n".join(parts)


def _values(model: dict[str, Any], point: str, ranks: str, key: str) -> list[float]:
    figures = [turn["points"][point][ranks] for turn in model["rounds"]]
    return [one[key]["p50"] if isinstance(one[key], dict) else one[key] for one in figures]


def _batch_table(model: dict[str, Any], names: list[str]) -> str:
    first, *more = model["rounds"][0]["points"][names[0]]
    rows = []
    for name in names:
        speeds = {ranks: _values(model, name, ranks, "output_tokens_per_s") for ranks in (first, *more)}
        ratios = [spread(a / b for a, b in zip(speeds[ranks], speeds[first], strict=True)) for ranks in more]
        tpot, speed = spread(_values(model, name, first, "tpot_ms")), spread(speeds[first])
        rows.append([name.partition(" ")[2], cell(tpot), cell(speed), *map(cell, ratios)])
    head = ["sequences at a time", "ms per token", "output tokens/s"]
    return table([*head, *(f"output with {ranks} ranks, as a multiple" for ranks in more)], rows)


def _length_table(model: dict[str, Any], names: list[str]) -> str:
    first, *more = model["rounds"][0]["points"][names[0]]
    rows = []
    for name in names:
        length = int(name.partition(" ")[2])
        waits = {ranks: _values(model, name, ranks, "ttft_ms") for ranks in (first, *more)}
        ratios = [spread(b / a for a, b in zip(waits[ranks], waits[first], strict=True)) for ranks in more]
        rate = spread(1e3 * length / wait for wait in waits[first])
        tpot = spread(_values(model, name, first, "tpot_ms"))
        rows.append([f"{length:,}", cell(spread(waits[first])), cell(rate), cell(tpot), *map(cell, ratios)])
    head = ["tokens of prompt", "first token, ms", "prompt tokens/s", "ms per token at that context"]
    return table([*head, *(f"prompt speed with {ranks} ranks, as a multiple" for ranks in more)], rows)
