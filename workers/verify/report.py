"""A verification's findings as a table for people and as JSON for programs."""

import math
from dataclasses import asdict, dataclass
from typing import Any

from oarlock.workers.verify.compare import LARGEST_LIMIT, LIMIT, TensorResult, VerifyResults
from oarlock.workers.verify.dequantised_reference import RoundingLoss
from oarlock.workers.verify.halves import Halves

_HEADINGS = ("layer", "tensor", "rank", "max error", "/ theirs", "rms / theirs", "result")
_LEFT_ALIGNED = ("layer", "tensor", "result")


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Findings of one verification."""

    model: str
    architecture: str
    dtype: str
    size: int
    tokens: int  # rows of every tensor
    comparison: VerifyResults
    causes: list[str]
    versions: dict[str, str]
    seconds: float
    quantization: str = "none"
    dequantize: bool = False
    loss: RoundingLoss | None = None
    stages: int = 1
    adapter: str | None = None  # name of the LoRA adapter of all sequences but the last

    @property
    def result(self) -> str:
        return "ok" if self.comparison.ok else "differs"

    @property
    def weight_format(self) -> str:
        """Description of the weight format."""
        if self.dequantize:
            return f"{self.quantization}, dequantised to this dtype"
        return "this dtype" if self.quantization == "none" else f"{self.quantization}, with rounded activations"

    def to_json(self) -> dict[str, Any]:
        first = self.comparison.first_fault
        return {
            "model": self.model,
            "architecture": self.architecture,
            "dtype": self.dtype,
            "tensor_parallel_size": self.size,
            "pipeline_parallel_size": self.stages,
            "quantization": self.quantization,
            "dequantize": self.dequantize,
            "kv_cache_dtype": self.dtype,
            "adapter": self.adapter,
            "truth": f"transformers in float64, on the weights as they are in {self.weight_format}"
            + ("" if self.adapter is None else ", with the adapter merged into them"),
            "limits": {"rms": LIMIT, "head_rms": LIMIT, "largest": LARGEST_LIMIT, "largest_of_logits": LIMIT},
            "tokens_compared": self.tokens,
            "ok": self.comparison.ok,
            "first_fault": None if first is None else {
                "layer": first.layer, "tensor": first.tensor, "result": first.result, "ranks": list(first.wrong_ranks),
            },
            "likely_causes": self.causes,
            "tensors": [_row_json(row) for row in self.comparison.rows],
            "greedy": [
                {
                    "prompt": token.prompt, "tokens": token.count, "near_ties": token.near_ties,
                    "first_difference": token.first_difference, "gap": _number(token.gap), "result": token.result,
                }
                for token in self.comparison.tokens
            ],
            "near_ties_of_experts": self.comparison.near_ties,
            "halves": None if self.comparison.halves is None else {
                "compared": self.comparison.halves.compared, "why_not": self.comparison.halves.why_not,
                "differences": [
                    {
                        "layer": one.layer, "half": one.half, "rank": one.rank,
                        "largest_difference": _number(one.largest),
                    }
                    for one in self.comparison.halves.differences
                ],
            },
            "rounding_loss": None if self.loss is None else asdict(self.loss),
            "versions": self.versions,
            "seconds": round(self.seconds, 1),
        }  # fmt: skip

    def to_text(self) -> str:
        comparison = self.comparison
        weight_format = self.dtype if self.quantization == "none" else f"{self.quantization} in {self.dtype}"
        weight_format += ", dequantised" if self.dequantize else ""
        head = f"{self.model} ({self.architecture}), {weight_format}, KV cache in {self.dtype}, "
        head += f"tensor-parallel size {self.size}"
        if self.stages > 1:
            head += f", {self.stages} pipeline stages"
        if self.adapter is not None:
            head += f", adapter {self.adapter}"
        lines = [f"{head}: {self.tokens} tokens through every layer, compared with transformers in float64", ""]
        lines += [*table(shown(comparison)), ""]
        if self.size > 1:
            lines.append(_ranks_line(comparison))
        if comparison.halves is not None:
            lines.append(_halves_line(comparison.halves))
        if comparison.near_ties:
            lines.append(_choices_line(comparison.near_ties))
        lines.append(_greedy_line(comparison))
        if self.loss is not None:
            lines += ["", *_loss_lines(self.loss, self.quantization), ""]
        if comparison.first_fault is not None:
            lines.append(f"first difference: {comparison.first_fault.where}")
        lines += [f"likely cause: {cause}" for cause in self.causes]
        return "\n".join([*lines, f"result: {self.result}"])


def shown(comparison: VerifyResults) -> list[TensorResult]:
    """Return the worst tensor of each layer, and all tensors of the first layer with a fault."""
    first = comparison.first_fault
    groups: dict[int | str, list[TensorResult]] = {}  # layer -> rows; a tensor outside the layers is a group of its own
    for row in comparison.rows:
        groups.setdefault(row.tensor if row.layer is None else row.layer, []).append(row)
    rows = []
    for group in groups.values():
        if first in group:
            rows += group
        else:
            rows.append(max(group, key=lambda row: (row.result != "ok", row.worst.share_of_limit)))
    return rows


def table(rows: list[TensorResult]) -> list[str]:
    """Return the lines of a table, headings first."""
    lines = [_HEADINGS]
    for row in rows:
        worst = row.worst
        figures = (f"{worst.max_error:.2e}", f"{worst.ratio:.2f}", f"{worst.rms_ratio:.2f}")
        lines.append(("-" if row.layer is None else str(row.layer), row.tensor, str(worst.rank), *figures, row.result))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if heading in _LEFT_ALIGNED else cell.rjust(width)
            for heading, cell, width in zip(_HEADINGS, line, widths, strict=True)
        ).rstrip()
        for line in lines
    ]


def _loss_lines(loss: RoundingLoss, quantization: str) -> list[str]:
    """Return lines about the distance of the model from the stored one."""
    lines = [f"loss of {quantization}: distance from the stored weights, and from their outputs in float64"]
    lines.append("layer  weights  hidden")
    lines += [f"{one.layer:5}  {one.weights:7.2%}  {one.hidden:6.2%}" for one in loss.layers]
    return [*lines, f"logits{'':9}{loss.logits:6.2%}"]


def _ranks_line(comparison: VerifyResults) -> str:
    """Return a line that reports whether the ranks have the same bits in tensors that all have."""
    count = sum(row.is_on_all_ranks for row in comparison.rows)
    differ = [row.name for row in comparison.rows if not row.ranks_agree]
    if differ:
        return f"ranks: not the same bits in {len(differ)} of {count} tensors that all hold, first {differ[0]}"
    return f"ranks: the same bits in all {count} tensors that every rank holds"


def _halves_line(halves: Halves) -> str:
    """Return a line that reports whether layers give the same bits as they are served."""
    if halves.why_not is not None:
        return f"halves: layers are served by the operations that were compared, as {halves.why_not}"
    if not halves.differences:
        return f"halves: the same bits after all {halves.compared} halves of layers, each in one call as it is served"
    first = halves.differences[0]
    return (
        f"halves: the {first.half} half of layer {first.layer} on rank {first.rank} differs as it is served, by up to "
        f"{first.largest:.2e} from its operations one by one"
    )


def _choices_line(ties: int) -> str:
    """Return a line about choices of experts in which transformers' runs have followed ours."""
    return f"experts: {ties} near-tie{'s' if ties > 1 else ''} that rounding decides; transformers follows our choice"


def _greedy_line(comparison: VerifyResults) -> str:
    tokens = comparison.tokens
    wrong = next((token for token in tokens if token.result != "ok"), None)
    if wrong is not None:
        return (
            f"greedy completion: prompt {wrong.prompt + 1} differs at token {wrong.first_difference}, by a logit gap "
            f"of {wrong.gap:.3g} where rounding explains {wrong.allowed:.3g}"
        )
    count, ties = sum(token.count for token in tokens), sum(token.near_ties for token in tokens)
    line = f"greedy completions: {count} tokens of {len(tokens)} prompts equal transformers' generate"
    return f"{line}, {ties} near-tie{'s' if ties > 1 else ''} that rounding decides" if ties else line


def _row_json(row: TensorResult) -> dict[str, Any]:
    return {
        "layer": row.layer,
        "tensor": row.tensor,
        "result": row.result,
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
    """Return the value for JSON, which has no infinity and no NaN; None in their place."""
    return value if math.isfinite(value) else None
