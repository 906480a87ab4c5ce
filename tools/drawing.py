"""Parts of pictures as SVG that is readable on light and dark pages: boxes with words, and figures of charts."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from benchmarks import tables
from benchmarks.charts import STYLE
from benchmarks.tables import Spread

WIDTH = 820
COLOURS = ("#2166ac", "#b2182b", "#1b7837", "#762a83")  # of requests; white text is readable on each
CLASSES = (
    STYLE
    + """  .on { fill: #ffffff; font-size: 11px; text-anchor: middle }
  .small { font-size: 11px } .mid { text-anchor: middle }
  .empty { fill: none; stroke: #a9b1ba } .wait { fill: none; stroke: #a9b1ba; stroke-dasharray: 3 3 }
  .band { fill: #a9b1ba; fill-opacity: 0.16 } .way { fill: none; stroke: #a9b1ba; stroke-width: 2 }
"""
    + "".join(f"  .r{number} {{ fill: {colour} }}" for number, colour in enumerate(COLOURS))
)


def svg(title: str, description: str, height: int, parts: Iterable[str]) -> str:
    """An SVG file, readable on light and dark pages. What it shows is also said in its description."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img" aria-labelledby="title description">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="description">{escape(description)}</desc>',
        f"<style>{CLASSES}</style>",
        f'<rect class="page" width="{WIDTH}" height="{height}"/>',
    ]
    return "\n".join([*lines, *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: object, kind: str = "") -> str:
    """Text that begins at `x`, or has its middle there where its class says so."""
    return f'<text{f" class={kind!r}" if kind else ""} x="{x:g}" y="{y:g}">{escape(str(words))}</text>'.replace(
        "'", '"'
    )


def cell(x: float, y: float, width: float, height: float, kind: str, words: object = "") -> list[str]:
    """A box, with words in its middle."""
    box = f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2"/>'
    filled = kind[0] == "r"
    inside = text(x + width / 2, y + height / 2 + 4, words, "on" if filled else "small mid")
    return [box, inside] if words != "" else [box]


class Figure(Spread):
    """One figure, without a range."""

    def __str__(self) -> str:
        return tables.number(self.median)
