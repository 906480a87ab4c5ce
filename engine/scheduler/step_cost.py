"""The cost of a step, learnt from those that ran, and the division of a step's tokens among drafts and prompts.

Each decoding sequence gets one token. What is left of a step's tokens is for drafts and for prompts, and neither takes
the part of the other: a prompt would otherwise wait until answers end, or drafts until no prompt comes. Without a limit
of its time a chunk of a long prompt would hold up everyone's next token for as long as fifty steps without it take.

Pure: knows counts and seconds that it is told; has no clock, and does not know sequences.
"""

import math
from collections import deque
from statistics import median
from typing import NamedTuple

from oarlock.workers.step_cost import StepCost

RATIO = 2.5  # of a step with prompt tokens to one without, where no limit is given
FEWEST_TOKENS = 16  # of a chunk, however long a step takes: prompts must go on
REMEMBERED = 16  # steps of a kind; their median is what another will take
_TELLING_TOKENS = 8  # so few say little about what a token costs
_FEWEST = 3  # steps with few rows, and with many, that tell what a row adds
_FORGET_AFTER = 512  # steps between two kinds: what a row adds may have changed
# What a row adds to a step of one row, before it is known: not more than this, because what is measured at start may be
# wrong on a busy machine, and too high a cost would never be corrected; and this, where nothing was measured.
_MOST_AT_FIRST, _AT_FIRST = 1 / 8, 1 / 32
_LEAST = 1 / 128  # of a step, however little it seems


class _Kind:
    """The last steps of about the same number of rows: all numbers with as many bits."""

    def __init__(self) -> None:
        self.steps: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)  # rows and seconds
        self.seen_at = 0  # number of the last of these steps


class _Line(NamedTuple):
    """Seconds of a step by its rows, near some number of them."""

    rows: float
    seconds: float  # of a step of `rows`
    row_s: float


class StepCosts:
    """Seconds of a step by its rows, each a sequence's newest token or a draft, and by its prompt tokens.

    A step takes what the last ones of about as many rows took, and for each row more what tells steps with few rows
    from those with many.
    """

    def __init__(self, measured: StepCost | None) -> None:
        """`measured` by the ranks at start: used until steps have run."""
        self.measured = measured
        row_s = _AT_FIRST if measured is None else measured.seconds(1, context=0) - measured.fixed_s
        step_s = 1.0 if measured is None else measured.seconds(1, context=0)
        self._first_row_s = min(row_s, step_s * _MOST_AT_FIRST)
        self._first_fixed_s = step_s - self._first_row_s
        self._kinds: dict[int, _Kind] = {}  # by the bit length of the number of rows
        self._lines: dict[int, _Line] = {}  # likewise; of those that were asked for since a step was told
        self._num_steps = 0
        self._token_s: deque[float] = deque(maxlen=REMEMBERED)

    def observe(self, num_rows: int, num_prompt_tokens: int, seconds: float, num_before: int = 0) -> None:
        """A step of so many rows and prompt tokens has run, after `num_before` others like it that were not told. Of a
        clock that stands still nothing is learnt."""
        if seconds <= 0:
            return
        if num_prompt_tokens:
            rows_s = self.seconds(num_rows) if num_rows else 0.0
            if num_prompt_tokens >= _TELLING_TOKENS and rows_s is not None:
                self._token_s.append(max(0.0, seconds - rows_s) / num_prompt_tokens)
            return
        self._num_steps += 1 + num_before
        kind = self._kinds.setdefault(num_rows.bit_length(), _Kind())
        kind.steps.append((num_rows, seconds))
        kind.seen_at = self._num_steps
        self._lines.clear()

    def seconds(self, num_rows: int) -> float | None:
        """Seconds of a step of so many rows without prompt tokens; None: nothing is known."""
        if self._kinds:
            return self.step_and_row_s(num_rows)[0]
        return None if self.measured is None else self.measured.seconds(num_rows, context=0)

    @property
    def prompt_token_s(self) -> float | None:
        """Seconds that each prompt token adds; None: not known."""
        if self._token_s:
            return median(self._token_s)
        return None if self.measured is None else self.measured.token_s

    def step_and_row_s(self, num_rows: int) -> tuple[float, float]:
        """Seconds of a step of so many rows, and what one row more adds. Before anything is known, the first is 1 for
        a step of one row."""
        if not self._kinds:
            step_s, row_s = self._first_fixed_s + num_rows * self._first_row_s, self._first_row_s
        else:
            bits = num_rows.bit_length()
            line = self._lines[bits] = self._lines.get(bits) or self._line(bits)
            row_s = line.row_s
            step_s = line.seconds + (num_rows - line.rows) * row_s
        step_s = max(step_s, row_s * num_rows)
        return step_s, max(row_s, step_s * _LEAST)

    def _line(self, bits: int) -> _Line:
        """The line through the kind of steps that is nearest, and the nearest other one of about the same time."""
        near, *others = (self._kinds[kind] for kind in sorted(self._kinds, key=lambda kind: (abs(kind - bits), kind)))
        steps = [*near.steps]
        step_rows, step_s = median(rows for rows, _ in steps), median(one for _, one in steps)
        for other in others:
            if abs(other.seen_at - near.seen_at) < _FORGET_AFTER:
                steps += other.steps
                break
        middle = (min(steps)[0] + max(steps)[0]) / 2
        few = [step for step in steps if step[0] <= middle]
        many = [step for step in steps if step[0] > middle]
        if len(few) >= _FEWEST <= len(many):
            more_rows = median(rows for rows, _ in many) - median(rows for rows, _ in few)
            more_s = median(one for _, one in many) - median(one for _, one in few)
            return _Line(step_rows, step_s, max(0.0, more_s / more_rows))
        ratio = self._first_row_s / (self._first_fixed_s + step_rows * self._first_row_s)
        return _Line(step_rows, step_s, step_s * ratio)


class StepBudget:
    """Divides what decoding sequences leave of a step among drafts and prompts."""

    def __init__(self, costs: StepCosts, max_step_s: float | None, num_stages: int) -> None:
        """`max_step_s`: of a step in which answers go on; None: `RATIO` times one without prompt tokens. `num_stages`:
        through which a step passes."""
        self._costs = costs
        self._max_step_s = max_step_s
        self._num_stages = num_stages
        self._part = self._num_after_part = 0  # what was divided last: the tokens of a step, and those that it leaves

    def drafts(self, num_decodes: int, room: int, *, beside_prompts: bool) -> int:
        """Most drafts of a step that has `room` tokens beside `num_decodes` sequences that get one each.

        `beside_prompts`: there are some that could be computed. Then half of the room is theirs, and half of the time,
        if that is limited.
        """
        if not beside_prompts:
            return room
        room //= 2
        if self._max_step_s is not None and self._costs.seconds(num_decodes) is not None:
            step_s, row_s = self._costs.step_and_row_s(num_decodes)
            room = min(room, int(max(0.0, self._max_step_s - step_s) / 2 / row_s))
        return room

    def prompt_tokens(self, num_rows: int, room: int, num_left: int) -> int:
        """Tokens of prompts in a step that has `room` for them beside `num_rows` rows, drafts included. Prompts have
        `num_left` tokens to compute, in this step and in later ones."""
        measured = self._costs.measured
        if self._num_stages > 1 and measured is not None and measured.fixed_s:
            room = min(room, self._of_a_part(num_left, measured))
        if num_rows == 0 or num_left == 0:
            return room
        rows_s, token_s = self._costs.seconds(num_rows), self._costs.prompt_token_s
        if rows_s is None or not token_s:
            return room
        limit_s = RATIO * rows_s if self._max_step_s is None else self._max_step_s
        return min(room, max(FEWEST_TOKENS, int((limit_s - rows_s) / token_s)))

    def _of_a_part(self, num_left: int, cost: StepCost) -> int:
        """Tokens of one of the steps that `num_left` tokens are divided among, so that all stages have one to compute;
        the same until others come.

        Of m steps each takes (fixed + token x num_left / m) / stages in each stage, and the last one leaves the last
        stage after m + stages - 1 of those: soonest for m = sqrt((stages - 1) x token x num_left / fixed).
        """
        if num_left > self._num_after_part:
            best = math.sqrt((self._num_stages - 1) * cost.token_s * num_left / cost.fixed_s)
            self._part = -(-num_left // max(1, round(min(best, num_left / FEWEST_TOKENS))))
        self._num_after_part = max(0, num_left - self._part)
        return max(1, self._part)
