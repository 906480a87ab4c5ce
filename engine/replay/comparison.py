"""ReplayComparison of outputs with recorded ones: counts of equal and different values, and the first difference.

Does not know files or ranks.
"""

from dataclasses import dataclass

import numpy as np

from oarlock.workers.protocol import ALL_BANNED, FINITE, StepMetadata, StepOutput


@dataclass(slots=True)
class Tally:
    """Tally of equal and different values: one line of the table."""

    compared: int = 0
    different: int = 0
    largest: float = 0.0  # largest difference of two values


class ReplayComparison:
    """Comparison of replayed with recorded outputs, step by step.

    `tolerance`: largest permitted difference of a logprob; None: differences are only counted.
    """

    def __init__(self, tolerance: float | None) -> None:
        self.tolerance = tolerance
        self.tokens = Tally()
        self.logprobs = Tally()
        self.vectors = Tally()  # values of the vectors
        self.first: str | None = None  # the first difference, as text

    @property
    def is_equal(self) -> bool:
        different = self.logprobs.different + self.vectors.different
        return self.tokens.different == 0 and (self.tolerance is None or different == 0)

    def add(self, step: StepMetadata, expected: StepOutput, got: StepOutput) -> None:
        if len(expected.token_ids) != len(got.token_ids):
            self.tokens.different += 1
            self._note(step, f"{len(expected.token_ids)} rows expected, got {len(got.token_ids)}")
            return
        self._add_tokens(step, expected, got)
        if expected.logprobs is not None:
            self._add_logprobs(step, expected, got)
        if len(expected.pooled_lens):
            self._add_vectors(step, expected, got)

    def table(self) -> str:
        rows = [("", "compared", "equal", "different", "largest difference")]
        lines_of = [("tokens", self.tokens, ""), ("logprobs", self.logprobs, f"{self.logprobs.largest:.3g}")]
        if self.vectors.compared:
            lines_of.append(("vectors", self.vectors, f"{self.vectors.largest:.3g}"))
        for name, tally, largest in lines_of:
            equal = tally.compared - tally.different
            rows.append((name, str(tally.compared), str(equal), str(tally.different), largest))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(lines)

    def _add_tokens(self, step: StepMetadata, expected: StepOutput, got: StepOutput) -> None:
        self.tokens.compared += len(expected.token_ids)
        # The token of a row without finite logits is meaningless, but `finite` must be the same.
        wrong = expected.finite != got.finite
        wrong |= (expected.finite == FINITE) & (expected.token_ids != got.token_ids)
        self.tokens.different += int(wrong.sum())
        for row in np.flatnonzero(wrong)[:1]:
            self._note(step, f"expected {_describe(expected, row)}, got {_describe(got, row)}", int(row))

    def _add_logprobs(self, step: StepMetadata, expected: StepOutput, got: StepOutput) -> None:
        """Compare the rows that asked for logprobs and have the same token in both outputs."""
        assert expected.logprobs is not None
        asked = (step.num_logprobs >= 0) | (step.target_ids >= 0)
        rows = np.flatnonzero(
            asked & (expected.finite == FINITE) & (got.finite == FINITE) & (expected.token_ids == got.token_ids)
        )
        self.logprobs.compared += len(rows)
        if got.logprobs is None:
            self.logprobs.different += len(rows)
            self._note(step, "logprobs expected, got none")
            return
        mine, theirs = got.logprobs[rows].astype(np.float64), expected.logprobs[rows].astype(np.float64)
        with np.errstate(invalid="ignore"):  # -inf - -inf
            gaps = np.where(mine == theirs, 0.0, np.abs(mine - theirs))
        self.logprobs.largest = max(self.logprobs.largest, float(gaps.max(initial=0.0)))
        wrong = gaps > self.tolerance if self.tolerance is not None else gaps > 0
        if self.tolerance == 0:
            wrong |= ~_same_alternatives(expected, got, rows)
        self.logprobs.different += int(wrong.sum())
        if self.tolerance is not None:
            for index in np.flatnonzero(wrong)[:1]:
                row = int(rows[index])
                what = f"logprob expected {theirs[index]:.9g}, got {mine[index]:.9g}"
                if gaps[index] == 0:
                    what = f"logprob {mine[index]:.9g} as expected, but other alternatives or another rank"
                self._note(step, what, row)

    def _add_vectors(self, step: StepMetadata, expected: StepOutput, got: StepOutput) -> None:
        """Compare the values of all pooled sequences."""
        self.vectors.compared += len(expected.pooled)
        if not np.array_equal(expected.pooled_lens, got.pooled_lens):
            self.vectors.different += max(1, len(expected.pooled))
            self._note(step, f"vectors of {expected.pooled_lens.tolist()} values, got {got.pooled_lens.tolist()}")
            return
        gaps = np.abs(expected.pooled.astype(np.float64) - got.pooled.astype(np.float64))
        self.vectors.largest = max(self.vectors.largest, float(gaps.max(initial=0.0)))
        wrong = gaps > (self.tolerance or 0.0)
        if self.tolerance == 0:
            wrong |= expected.pooled.view(np.int32) != got.pooled.view(np.int32)
        self.vectors.different += int(wrong.sum())
        if self.tolerance is not None and wrong.any():
            index = int(wrong.argmax())
            self._note(step, f"vector value expected {expected.pooled[index]:.9g}, got {got.pooled[index]:.9g}")

    def _note(self, step: StepMetadata, what: str, row: int | None = None) -> None:
        if self.first is not None:
            return
        where = f"step {step.step_id}"
        if row is not None:
            seq = int(np.searchsorted(step.query_start_loc, step.logits_indices[row], side="right")) - 1
            where += f", row {row} (sequence {seq} of {step.num_seqs}, position {step.sample_positions[row]})"
        self.first = f"{where}: {what}"


def _describe(output: StepOutput, row: int) -> str:
    if output.finite[row] == FINITE:
        return f"token {output.token_ids[row]}"
    return "no token allowed" if output.finite[row] == ALL_BANNED else "logits that are not finite"


def _same_alternatives(expected: StepOutput, got: StepOutput, rows: np.ndarray) -> np.ndarray:
    """Return whether rank, top ids and their logprobs have the same bits: bool [len(rows)]."""
    same = np.ones(len(rows), np.bool_)
    for name in ("ranks", "top_ids", "top_logprobs"):
        one, other = getattr(expected, name)[rows], getattr(got, name)[rows]
        if one.shape != other.shape:
            return np.zeros(len(rows), np.bool_)
        equal = one == other
        same &= equal if equal.ndim == 1 else equal.all(1)
    return same
