"""What a step takes and what a row more adds to it, learnt from the steps that ran.

Only steps without prompt tokens are looked at: each of their rows is a sequence's newest token or a draft. Knows counts
and seconds; does not know sequences.
"""

from collections import deque
from statistics import median

from workers.step_cost import StepCost

_REMEMBERED = 32  # steps
_FIT_EVERY = 4  # steps
_FEWEST = 3  # steps with few rows, and with many, that tell them apart
_FORGET_AFTER = 512  # steps of about the same number of rows: what a row adds may have changed
# What a row adds to a step of one row, before it is known: not more than this, because what is measured at start may be
# wrong on a busy machine, and too high a cost would never be corrected; and this, where nothing was measured.
_MOST_AT_FIRST, _AT_FIRST = 1 / 8, 1 / 32
_LEAST = 1 / 128  # of a step, however little it seems


class RowCosts:
    """Two medians of the last steps, of those with few rows and of those with many, and the line through them."""

    def __init__(self, cost: StepCost | None) -> None:
        """`cost`: what the ranks have measured at start, used until steps have run."""
        row_s = _AT_FIRST if cost is None else cost.seconds(1, context=0) - cost.fixed_s
        step_s = 1.0 if cost is None else cost.seconds(1, context=0)
        self._first_row_s = min(row_s, step_s * _MOST_AT_FIRST)
        self._first_fixed_s = step_s - self._first_row_s
        self._steps: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)  # rows and seconds of each
        self._rows = 0.0  # median of these; 0: no step has run
        self._step_s = 0.0
        self._row_s: float | None = None  # None: not known
        self._num_since_fit = 0  # steps

    def observe(self, num_rows: int, seconds: float) -> None:
        """A step of so many rows has run. Of a clock that stands still nothing is learnt."""
        if seconds <= 0:
            return
        self._steps.append((num_rows, seconds))
        self._num_since_fit += 1
        if self._num_since_fit % _FIT_EVERY == 0 or len(self._steps) < _FEWEST:
            self._fit()

    def step_and_row_s(self, num_rows: int) -> tuple[float, float]:
        """Seconds of a step of so many rows, and what one row more adds."""
        if not self._rows:
            step_s, row_s = self._first_fixed_s + num_rows * self._first_row_s, self._first_row_s
        else:
            row_s = self._row_s
            if row_s is None:
                row_s = self._step_s * self._first_row_s / (self._first_fixed_s + self._rows * self._first_row_s)
            step_s = self._step_s + (num_rows - self._rows) * row_s
        step_s = max(step_s, row_s * num_rows)
        return step_s, max(row_s, step_s * _LEAST)

    def _fit(self) -> None:
        rows = [count for count, _ in self._steps]
        self._rows, self._step_s = median(rows), median(seconds for _, seconds in self._steps)
        middle = (min(rows) + max(rows)) / 2
        few = [step for step in self._steps if step[0] <= middle]
        many = [step for step in self._steps if step[0] > middle]
        if len(few) >= _FEWEST <= len(many):
            more_rows = median(count for count, _ in many) - median(count for count, _ in few)
            more_s = median(seconds for _, seconds in many) - median(seconds for _, seconds in few)
            self._row_s = max(0.0, more_s / more_rows)
            self._num_since_fit = 0
        elif self._num_since_fit >= _FORGET_AFTER:
            self._row_s = None
