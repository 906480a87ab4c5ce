"""What verify found, for people as one table and for programs as JSON.

Knows how a comparison looks, not how it was made.
"""

import math
from dataclasses import dataclass
from typing import Any

from workers.verify.compare import LARGEST_LIMIT, LIMIT, Comparison, Row
from workers.verify.names import REPLICATED


@dataclass(frozen=True, slots=True)
class Report:
    """One verification."""

    model: str
    architecture: str
    dtype: str
    size: int
    tokens: int  # rows of every tensor
    comparison: Comparison
    causes: list[str]
    versions: dict[str, str]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        first = self.comparison.first_fault
        return {
            "model": self.model,
            "architecture": self.architecture,
            "dtype": self.dtype,
            "tensor_parallel_size": self.size,
            "truth": "transformers in float64, on the weights as they are in this dtype",
            "limits": {"rms": LIMIT, "head_rms": LIMIT, "largest": LARGEST_LIMIT, "largest_of_logits": LIMIT},
            "tokens_compared": self.tokens,
            "ok": self.comparison.ok,
            "first_fault": None if first is None else {
                "layer": first.layer, "tensor": first.tensor, "verdict": first.verdict,
                "ranks": list(first.wrong_ranks),
            },
            "likely_causes": self.causes,
            "tensors": [_row_json(row) for row in self.comparison.rows],
            "greedy": [
                {
                    "prompt": token.prompt, "tokens": token.count, "near_ties": token.near_ties,
                    "first_difference": token.first_difference, "gap": _number(token.gap), "verdict": token.verdict,
                }
                for token in self.comparison.tokens
            ],
            "versions": self.versions,
            "seconds": round(self.seconds, 1),
        }  # fmt: skip

    def to_text(self) -> str:
        head = f"{self.model} ({self.architecture}), {self.dtype}, tensor-parallel size {self.size}"
        return "\n".join(
            [
                f"{head}: {self.tokens} tokens through every layer, judged by transformers in float64",
                "",
                *table(shown(self.comparison)),
                "",
                *_summary(self),
            ]
        )


def shown(comparison: Comparison) -> list[Row]:
    """The worst tensor of each layer; of the first layer with a fault, all of them."""
    first = comparison.first_fault
    layers: dict[int | None, list[Row]] = {}
    rows = []
    for row in comparison.rows:
        layers.setdefault(row.layer, []).append(row)
    for row in comparison.rows:
        if row.layer is None or (first is not None and row.layer == first.layer):
            rows.append(row)
        elif row is layers[row.layer][0]:
            rows.append(max(layers[row.layer], key=lambda one: (one.verdict != "ok", one.worst.badness)))
    return rows


def table(rows: list[Row]) -> list[str]:
    """Lines, headings first."""
    lines = [("layer", "tensor", "rank", "max error", "/ theirs", "rms / theirs", "verdict")]
    for row in rows:
        worst = row.worst
        lines.append(
            (
                "-" if row.layer is None else str(row.layer),
                row.tensor,
                str(worst.rank),
                f"{worst.max_error:.2e}",
                f"{worst.ratio:.2f}",
                f"{worst.rms_ratio:.2f}",
                row.verdict,
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    left = (0, 1, 6)
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def _summary(report: Report) -> list[str]:
    comparison = report.comparison
    sums = sum(row.tensor in REPLICATED for row in comparison.rows)
    disagreeing = [row.name for row in comparison.rows if not row.ranks_agree]
    lines = []
    if report.size > 1:
        lines.append(
            f"ranks: not the same bits in {len(disagreeing)} of {sums} tensors that all hold, first {disagreeing[0]}"
            if disagreeing
            else f"ranks: the same bits in all {sums} tensors that every rank holds"
        )
    ties = sum(token.near_ties for token in comparison.tokens)
    wrong = [token for token in comparison.tokens if token.verdict != "ok"]
    count = sum(token.count for token in comparison.tokens)
    text = f"greedy text: {count} tokens of {len(comparison.tokens)} prompts as transformers' generate"
    if ties:
        text += f", {ties} near-tie{'s' if ties > 1 else ''} that rounding decides"
    if wrong:
        first = wrong[0]
        text = (
            f"greedy text: prompt {first.prompt + 1} differs at token {first.first_difference}, by a logit gap of "
            f"{first.gap:.3g} where rounding explains {first.allowed:.3g}"
        )
    lines.append(text)
    fault = comparison.first_fault
    if fault is not None:
        where = fault.tensor if fault.layer is None else f"layer {fault.layer}, {fault.tensor}"
        lines.append(f"first difference: {where}")
    lines += [f"likely cause: {cause}" for cause in report.causes]
    lines.append(f"verdict: {'ok' if comparison.ok else 'differs'}")
    return lines


def _row_json(row: Row) -> dict[str, Any]:
    return {
        "layer": row.layer,
        "tensor": row.tensor,
        "verdict": row.verdict,
        "ranks_agree": row.ranks_agree,
        "ranks": [
            {
                "rank": error.rank,
                "max_error": _number(error.max_error),
                "transformers_max_error": _number(error.theirs),
                "largest_ratio": _number(error.ratio),
                "rms_ratio": _number(error.rms_ratio),
                "head_rms_ratio": _number(error.head_rms_ratio),
                "within": error.within,
            }
            for error in row.errors
        ],
    }


def _number(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None
