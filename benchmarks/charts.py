"""Charts of stored results as SVG: rows of horizontal bars with their ranges, readable on light and dark pages."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from benchmarks.tables import (
    FIRST_TOKEN,
    Result,
    Spread,
    cell,
    decode,
    first_token,
    is_ours,
    label,
    over_rounds,
    spread,
    values,
)

WIDTH, LABELS, BARS, ROW, HEADING = 820, 200, 430, 20, 34  # pixels; bars begin at LABELS and end at LABELS + BARS
STYLE = """
  .page { fill: #ffffff } text { fill: #1f2328; font: 13px system-ui, sans-serif } .heading { font-weight: 600 }
  .strong { fill: #2166ac } .weak { fill: #a9b1ba } .range { stroke: #1f2328; stroke-width: 1.5 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } text { fill: #e6edf3 } .strong { fill: #4393d9 } .weak { fill: #57606a }
    .range { stroke: #e6edf3 }
  }
"""


@dataclass(frozen=True, slots=True)
class Bar:
    label: str
    value: Spread | None
    is_strong: bool = True  # drawn in colour, else in grey


@dataclass(frozen=True, slots=True)
class Panel:
    """Bars of one unit, on a scale of their own."""

    heading: str
    bars: list[Bar]


def chart(title: str, panels: list[Panel]) -> str:
    """An SVG file of all panels, one below the other. Its description has every figure."""
    height = sum(HEADING + ROW * len(panel.bars) for panel in panels) + 16
    described = "; ".join(
        f"{panel.heading}: {', '.join(f'{bar.label} {cell(bar.value)}' for bar in panel.bars)}" for panel in panels
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title description">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="description">{escape(described)}</desc>',
        f"<style>{STYLE}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
    ]
    top = 0
    for panel in panels:
        lines += _panel(panel, top)
        top += HEADING + ROW * len(panel.bars)
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(panel: Panel, top: int) -> list[str]:
    lines = [f'<text class="heading" x="8" y="{top + 24}">{escape(panel.heading)}</text>']
    most = max((bar.value.high for bar in panel.bars if bar.value), default=1.0)
    for number, bar in enumerate(panel.bars):
        y = top + HEADING + ROW * number
        lines.append(f'<text x="{LABELS - 8}" y="{y + 14}" text-anchor="end">{escape(bar.label)}</text>')
        if bar.value is None:
            continue
        middle, low, high = (BARS * value / most for value in (bar.value.median, bar.value.low, bar.value.high))
        kind = "strong" if bar.is_strong else "weak"
        lines += [
            f'<rect class="{kind}" x="{LABELS}" y="{y + 3}" width="{middle:.1f}" height="{ROW - 6}"/>',
            f'<line class="range" x1="{LABELS + low:.1f}" x2="{LABELS + high:.1f}" y1="{y + 10}" y2="{y + 10}"/>',
            f'<text x="{LABELS + BARS + 12}" y="{y + 14}">{escape(str(bar.value))}</text>',
        ]
    return lines


def peers(result: Result) -> str:
    """Decode speed for each number of clients, and the first token for each length of prompt, of every system."""
    panels = []
    for measure in result["rounds"][0]["measures"]:
        if measure.startswith("first token"):
            heading = f"{measure} {FIRST_TOKEN[0][0]} (less is better)"
            figure = first_token
        else:
            heading = f"{measure} (clients at a time): decode, tokens/s (more is better)"
            figure = decode
        bars = [
            Bar(label(result, name).replace("`", ""), over_rounds(result, measure, name, figure), is_ours(name))
            for name in result["systems"]
        ]
        panels.append(Panel(heading, bars))
    return chart("Oarlock beside other programs: medians, with the range of rounds", panels)


def scaling(result: dict[str, Any]) -> str:
    """Output tokens by the number of sequences, and the first token by the length of the prompt, for each type."""
    panels = []
    for model in result["models"]:
        for what, key, heading in (
            ("batch", "output_tokens_per_s", "output, tokens/s, by sequences at a time (more is better)"),
            ("length", "ttft_ms", "first token, ms, by tokens of prompt (less is better)"),
        ):
            bars = []
            for point, figures in model["rounds"][0]["points"].items():
                if not point.startswith(what):
                    continue
                for ranks in figures:
                    words = f"{int(point.partition(' ')[2]):,}, {ranks} rank{'s' if ranks != '1' else ''}"
                    bars.append(Bar(words, spread(values(model, point, ranks, key)), ranks == "1"))
            if bars:
                panels.append(Panel(f"{model['dtype']}: {heading}", bars))
    return chart("How cost grows with sequences, length and ranks: medians, with the range of rounds", panels)
