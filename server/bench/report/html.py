"""A result as one HTML file that loads nothing: figures, charts as inline SVG, failures and settings."""

from __future__ import annotations

from html import escape

import numpy as np

from oarlock.server.bench.metrics import LATENCIES, latencies_ms, tokens_per_second
from oarlock.server.bench.report import svg
from oarlock.server.bench.report.table import COLUMNS, facts, notes
from oarlock.server.bench.result import Result

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
# What a browser may do with the page, whatever a server has put into a name or an error text.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def as_html(result: Result) -> str:
    """Result as one HTML page."""
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
            charts.append(svg.distribution(_TITLES[name], values, marks))
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
        svg.over_time("Output tokens per second", rates, step_s, "per second"),
        svg.over_time("Open requests", [float(value) for value in opened], step_s, "requests"),
    ]


def _settings(result: Result) -> str:
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(str(value))}</td></tr>" for name, value in result.settings.items()
    )
    return f"<h2>Settings</h2><table>{rows}</table>"
