"""Reports of a result: text for a terminal, and one HTML file with charts as inline SVG that loads nothing."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

from oarlock.server.bench import serve
from oarlock.server.bench.metrics import (
    LATENCIES,
    Result,
    latencies_ms,
    lateness_ms,
    tokens_per_second,
    unasked_lengths,
)

COLUMNS = ("mean", "std", "p50", "p90", "p99")
_LATE_MS = 10.0
_SLOW_SENDING = "The client sent requests up to {:.0f} ms late (p99): the load was less even than requested."


def as_text(result: Result) -> str:
    """Return the figures, the failures by cause, and reasons to doubt them."""
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
    """Return settings of the run and its throughput, as names and values."""
    summary, settings = result.summary, result.settings
    found = [
        ("server", f"{settings['url']}, model {settings['model']}"),
        *([("adapters", str(settings["adapters"]))] if "adapters" in settings else []),
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
    """Return sentences on the reasons to doubt the figures."""
    found = []
    if result.is_interrupted:
        found.append("The run was interrupted: the figures cover the requests up to then.")
    if (text := serve.warning(result.client, (result.summary["itl_ms"] or {"p50": 0.0})["p50"])) is not None:
        found.append(text)
    late = lateness_ms(result.samples)
    if late and (p99 := float(np.percentile(late, 99))) > _LATE_MS:
        found.append(_SLOW_SENDING.format(p99))
    done = [sample for sample in result.samples if sample.failure is None]
    if other := unasked_lengths(result.samples):
        found.append(f"{other} of {len(done)} completions do not have the requested number of tokens.")
    if any(sample.counted_by == "chunks" for sample in done):
        found.append("The server does not report token counts (usage): each chunk is counted as one token.")
    return found


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Align rows of cells, the first column to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if at == 0 else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


WIDTH = 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 22, 26
_PANEL = 110
_GAP = 18
_BINS = 40


@dataclass(frozen=True, slots=True)
class _Panel:
    """A plotting area: `low` and `high` of x and of y (from 0) on a rectangle below `top`."""

    top: float
    x_low: float
    x_high: float
    y_high: float

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return self.top + _PANEL * (1 - value / self.y_high)

    @property
    def bottom(self) -> float:
        return self.top + _PANEL


def distribution(title: str, values: Sequence[float], marks: Sequence[tuple[str, float]]) -> str:
    """Draw a histogram of values in ms over up to 40 parts of their range, and below it the fraction that is at most x.

    `marks`: percentiles to draw as lines. Values beyond p99.5 are left out of the picture, and counted in its title.
    """
    ordered = np.sort(np.asarray(values))
    shown = ordered[ordered <= np.percentile(ordered, 99.5)]
    beyond = len(ordered) - len(shown)
    low, high = float(shown[0]), float(shown[-1])
    if high - low < 1e-9:
        low, high = low - 0.5, high + 0.5
    bins = min(_BINS, max(10, 2 * round(math.sqrt(len(shown)))))
    counts, edges = np.histogram(shown, bins=bins, range=(low, high))
    upper = _Panel(_TOP, low, high, float(counts.max()) * 1.05)
    lower = _Panel(_TOP + _PANEL + _GAP, low, high, 1.0)
    parts = _frame(upper, "requests" if "ITL" not in title else "gaps") + _frame(lower, "share", with_x="ms")
    for count, left, right in zip(counts, edges[:-1], edges[1:], strict=True):
        x, width = upper.x(left), max(upper.x(right) - upper.x(left) - 1, 0.5)
        hint = f"{left:.2f} to {right:.2f} ms: {count}"
        parts.append(
            f'<rect class="bar" x="{x:.1f}" y="{upper.y(count):.1f}" width="{width:.1f}" '
            f'height="{upper.bottom - upper.y(count):.1f}"><title>{hint}</title></rect>'
        )
    at = np.unique(np.linspace(0, len(shown) - 1, 200).astype(int))
    points = [(lower.x(shown[i]), lower.y((i + 1) / len(ordered))) for i in at]
    parts.append(_line(points))
    for name, value in marks:
        if low <= value <= high:
            x = upper.x(value)
            parts.append(f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{upper.top}" y2="{lower.bottom}"/>')
            parts.append(f'<text class="mark" x="{x + 3:.1f}" y="{upper.top + 9}">{escape(name)}</text>')
    said = f"{title} ({beyond} beyond the right edge)" if beyond else title
    return _svg(said, parts, lower.bottom)


def over_time(title: str, values: Sequence[float], step_s: float, unit: str) -> str:
    """Draw one value for each stretch of `step_s` seconds."""
    panel = _Panel(_TOP, 0.0, max(len(values) * step_s, step_s), max([*values, 1e-9]) * 1.05)
    parts = _frame(panel, unit, with_x="s")
    points = []
    for at, value in enumerate(values):
        points += [(panel.x(at * step_s), panel.y(value)), (panel.x((at + 1) * step_s), panel.y(value))]
    parts.append(_line(points))
    return _svg(title, parts, panel.bottom)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Return round numbers in [low, high], about `wanted` of them: steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _frame(panel: _Panel, unit: str, with_x: str | None = None) -> list[str]:
    """Return grid lines with their labels."""
    parts = [f'<text class="unit" x="4" y="{panel.top - 6}">{escape(unit)}</text>']
    for value in ticks(0, panel.y_high, 3):
        y = panel.y(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    if with_x is not None:
        for value in ticks(panel.x_low, panel.x_high):
            parts.append(
                f'<text x="{panel.x(value):.1f}" y="{panel.bottom + 15}" text-anchor="middle">{value:g}</text>'
            )
        parts.append(f'<text class="unit" x="{WIDTH - 4}" y="{panel.bottom + 26}" text-anchor="end">{with_x}</text>')
    return parts


def _line(points: Sequence[tuple[float, float]]) -> str:
    return f'<polyline class="line" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'


def _svg(title: str, parts: Sequence[str], bottom: float) -> str:
    height = bottom + _BOTTOM + 4
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {height:g}" role="img" '
        f'aria-label="{escape(title, quote=True)}">{"".join(parts)}</svg></figure>'
    )


_TITLES = {
    "ttft": "TTFT, time to first token",
    "tpot": "TPOT, time per output token after the first",
    "itl": "ITL, inter-token latency",
    "e2el": "E2EL, end-to-end latency",
}
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #60646c; --line: #d9d9e0; --page: #fcfcfd; --data: #2f6fb3;
  --mark: #b8551c; }
@media (prefers-color-scheme: dark) { :root { --ink: #edeef0; --soft: #b0b4ba; --line: #363a3f; --page: #111113;
  --data: #70b0f0; --mark: #f0a070; } }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { padding: .2rem .9rem .2rem 0; text-align: left; vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
tr { border-bottom: 1px solid var(--line); }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(22rem, 1fr)); gap: 1rem; }
figure { margin: 0; } figcaption { font-weight: 600; } svg { width: 100%; height: auto; }
svg text { fill: var(--soft); font: 11px system-ui, sans-serif; } svg text.mark { fill: var(--mark); }
.grid { stroke: var(--line); } .bar { fill: var(--data); } .line { fill: none; stroke: var(--data); stroke-width: 2; }
line.mark { stroke: var(--mark); stroke-dasharray: 4 3; }
.note { border-left: 3px solid var(--mark); padding-left: .7rem; }
"""
# Restricts the page in a browser, even if a server put markup into a name or an error text.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def as_html(result: Result) -> str:
    """Return the result as one HTML page."""
    title = f"oarlock bench {result.kind}: {result.settings['model']}"
    body = [f"<h1>{escape(title)}</h1>", f"<p>{escape(result.created)}</p>"]
    body += [f'<p class="note">{escape(note)}</p>' for note in notes(result)]
    body += [_facts(result), _latencies(result), _failures(result)]
    body.append(f'<h2>Distributions</h2><div class="charts">{"".join(_distributions(result))}</div>')
    body.append(f'<h2>Over time</h2><div class="charts">{"".join(_over_time(result))}</div>')
    body.append(_settings(result))
    joined = "\n".join(body)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>\n<body>\n{joined}\n</body></html>\n"
    )


def _facts(result: Result) -> str:
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts(result))
    return f"<table>{rows}</table>"


def _latencies(result: Result) -> str:
    head = "".join(f'<th class="n">{column}</th>' for column in COLUMNS)
    rows = []
    for name in LATENCIES:
        values = result.summary[f"{name}_ms"]
        if values:
            cells = "".join(f'<td class="n">{values[column]:.2f}</td>' for column in COLUMNS)
            rows.append(f"<tr><th>{_TITLES[name]}</th>{cells}</tr>")
    return f"<h2>Latencies in ms</h2><table><tr><th></th>{head}</tr>{''.join(rows)}</table>" if rows else ""


def _failures(result: Result) -> str:
    rows = "".join(
        f'<tr><td class="n">{found["count"]}</td><td>{escape(cause)}</td><td>{escape(found["first"])}</td></tr>'
        for cause, found in result.failures.items()
    )
    head = '<tr><th class="n">requests</th><th>cause</th><th>the first one</th></tr>'
    return f"<h2>Failed requests</h2><table>{head}{rows}</table>" if rows else ""


def _distributions(result: Result) -> list[str]:
    done = [sample for sample in result.samples if sample.failure is None]
    charts = []
    for name in LATENCIES:
        if values := latencies_ms(done, name):
            marks = [(f"p{percent}", float(np.percentile(values, percent))) for percent in (50, 90, 99)]
            charts.append(distribution(_TITLES[name], values, marks))
    return charts


def _over_time(result: Result) -> list[str]:
    done = [sample for sample in result.samples if sample.failure is None]
    if not done:
        return []
    duration_s = result.summary["duration_s"]
    rates = tokens_per_second(done, duration_s, max(0.1, duration_s / 120))
    step_s = duration_s / len(rates)
    edges = np.arange(len(rates)) * step_s
    begins = np.sort([sample.sent_s for sample in done])
    ends = np.sort([sample.sent_s + sample.e2el_s for sample in done])
    opened = np.searchsorted(begins, edges, "right") - np.searchsorted(ends, edges, "right")
    return [
        over_time("Output tokens per second", rates, step_s, "per second"),
        over_time("Open requests", [float(value) for value in opened], step_s, "requests"),
    ]


def _settings(result: Result) -> str:
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in result.settings.items()
    )
    return f"<h2>Settings</h2><table>{rows}</table>"
