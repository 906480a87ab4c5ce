"""A result as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oarlock.server.bench.client import loop_lag
from oarlock.server.bench.metrics import LATENCIES, unasked_lengths
from oarlock.server.bench.result import Result, lateness_ms

COLUMNS = ("mean", "std", "p50", "p90", "p99")
_LATE_MS = 10.0
_SLOW_SENDING = (
    "The client sent requests up to {:.0f} ms after their time (p99): the load was less even than asked for."
)


def as_text(result: Result) -> str:
    """The figures, the failures by cause, and what makes them doubtful."""
    lines = [f"{name:<28} {value}" for name, value in facts(result)]
    present = [name for name in LATENCIES if result.summary.get(f"{name}_ms")]
    if present:
        lines += ["", f"{'ms':<8}" + "".join(f"{column:>12}" for column in COLUMNS)]
        for name in present:
            values = result.summary[f"{name}_ms"]
            lines.append(f"{name.upper():<8}" + "".join(f"{values[column]:>12.2f}" for column in COLUMNS))
    if result.failures:
        lines += ["", "failed requests"]
        for cause, found in result.failures.items():
            lines.append(f"{found['count']:>6}  {cause}: {found['first']}")
    noted = notes(result)
    return "\n".join([*lines, *([""] if noted else []), *(f"note: {note}" for note in noted)])


def facts(result: Result) -> list[tuple[str, str]]:
    """Settings of the run and its throughput, as names and values."""
    summary, settings = result.summary, result.settings
    found = [
        ("server", f"{settings['url']}, model {settings['model']}"),
        ("load", str(settings["load"])),
        ("prompts", str(settings["prompts"])),
        ("requests", f"{summary['completed']} completed, {summary['failed']} failed"),
        ("duration", f"{summary['duration_s']:.2f} s"),
        ("tokens", f"{summary['input_tokens']} in, {summary['output_tokens']} out"),
        ("requests per second", f"{summary['request_throughput']:.3f}"),
        (
            "output tokens per second",
            f"{summary['output_throughput']:.2f} (peak {summary['peak_output_throughput']:.2f})",
        ),
        ("all tokens per second", f"{summary['total_token_throughput']:.2f}"),
        ("peak concurrency", str(summary["peak_concurrency"])),
    ]
    if "goodput" in summary:
        limits = " ".join(f"{name}:{limit:g}" for name, limit in settings["goodput"].items())
        found.append(("goodput, requests per second", f"{summary['goodput']:.3f} within {limits}"))
    lag = result.client["lag_ms"]
    shown = f"loop late {lag['p50']:.1f} / {lag['p99']:.1f} / {lag['max']:.1f} ms (p50/p99/max)"
    found.append(("client", f"{shown}, {result.client['cpu_share']:.0%} of a core"))
    return found


def notes(result: Result) -> list[str]:
    """Sentences on what makes the figures doubtful."""
    found = []
    if result.is_interrupted:
        found.append("The run was interrupted: these are the figures up to then.")
    if (text := loop_lag.warning(result.client, (result.summary["itl_ms"] or {"p50": 0.0})["p50"])) is not None:
        found.append(text)
    late = lateness_ms(result.samples)
    if late and (p99 := float(np.percentile(late, 99))) > _LATE_MS:
        found.append(_SLOW_SENDING.format(p99))
    done = [sample for sample in result.samples if sample.failure is None]
    if other := unasked_lengths(result.samples):
        found.append(f"{other} of {len(done)} answers have another number of tokens than was asked for.")
    if any(sample.counted_by == "chunks" for sample in done):
        found.append("The server counts no tokens (usage): every chunk is taken for one.")
    return found


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells, the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
