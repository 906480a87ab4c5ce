"""Charts as SVG text: a histogram over its distribution function, and steps over time. Colours come from the page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import numpy as np

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
    """Histogram of values in ms over up to 40 parts of their range, and below, the share that is at most x.

    `marks`: percentiles to draw as lines. What lies beyond p99.5 is left out of the picture, and counted in its title.
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
    """One value for each stretch of `step_s` seconds."""
    panel = _Panel(_TOP, 0.0, max(len(values) * step_s, step_s), max([*values, 1e-9]) * 1.05)
    parts = _frame(panel, unit, with_x="s")
    points = []
    for at, value in enumerate(values):
        points += [(panel.x(at * step_s), panel.y(value)), (panel.x((at + 1) * step_s), panel.y(value))]
    parts.append(_line(points))
    return _svg(title, parts, panel.bottom)


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers in [low, high], about `wanted` of them: steps of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _frame(panel: _Panel, unit: str, with_x: str | None = None) -> list[str]:
    """Grid lines with their numbers."""
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
