"""Cost of a step, learned from past steps, and the log of all steps.

`StepCosts` predicts the seconds of a step. `StepLog` has the times of the newest steps, tokens per second, stalls, and
sums over all steps. The steps in which a request took part are the difference of two readings of the sums, so the cost
of logging a step does not depend on the number of open requests.

Pure: all counts and seconds are arguments. It has no clock and does not know sequences.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np

from oarlock.engine.stats import RankTimes, StepTimesState, TokenRates
from oarlock.workers.config import StepCost

REMEMBERED = 16  # newest steps of a group; their median predicts the next
_MIN_PROMPT_TOKENS = 8  # minimum prompt tokens of a step from which the cost of a token is learned
_MIN_STEPS = 3  # minimum numbers of steps with few rows and with many rows to derive the cost of a row
_FORGET_AFTER = 512  # steps between two groups after which the cost of a row may have changed
# Initial cost of a row as a share of the time of a one-row step. The first is an upper limit, because a measurement at
# start may be wrong on a busy machine and too high a cost would never be corrected. The second applies if nothing was
# measured.
_MAX_INITIAL_SHARE, _INITIAL_SHARE = 1 / 8, 1 / 32
_MIN_SHARE = 1 / 128  # minimum cost of a row as a share of the step

_REMEMBERED = 512  # newest steps whose times are kept
_MARK_S = 1.0  # seconds between two readings of the token counters
_WINDOW_S = 10.0  # window for tokens per second
_BATCH_SIZES = 16  # buckets of 1, 2, 4, ... sequences
_STEPS, _SEQUENCES, _PROMPT_TOKENS, _SECONDS, _NUM_SUMS = range(5)  # indices of the sums; batch sizes follow
_STALLS_REMEMBERED = 256
_STALL_S = 0.1
_STALL_RATIO = 4.0  # minimum ratio of a stalled step's time to the mean of earlier steps
_MEAN_OF = 32  # approximate number of steps in the moving mean


class _StepGroup:
    """Newest steps with about the same number of rows, i.e. row counts of equal bit length."""

    def __init__(self) -> None:
        self.steps: deque[tuple[int, float]] = deque(maxlen=REMEMBERED)  # (rows, seconds)
        self.seen_at = 0  # number of the last of these steps


class _CostLine(NamedTuple):
    """Straight line of a step's seconds over its rows, near a number of rows."""

    rows: float
    seconds: float  # seconds of a step of `rows` rows
    row_s: float


class StepCosts:
    """Prediction of a step's seconds from its rows (newest tokens of sequences, and drafts) and its prompt tokens.

    A step takes as long as the newest steps with about as many rows. Each further row adds the slope between steps with
    few rows and steps with many.
    """

    def __init__(self, measured: StepCost | None) -> None:
        """Start with `measured`, the cost that ranks measured at start, which is used until steps have run."""
        self.measured = measured
        row_s = _INITIAL_SHARE if measured is None else measured.token_s + measured.logits_s
        step_s = 1.0 if measured is None else measured.seconds(1, context=0)
        self._first_row_s = min(row_s, step_s * _MAX_INITIAL_SHARE)
        self._first_fixed_s = step_s - self._first_row_s
        self._groups: dict[int, _StepGroup] = {}  # bit length of the number of rows -> group
        self._lines: dict[int, _CostLine] = {}  # the same key -> line; computed since the newest step was observed
        self._num_steps = 0
        self._token_s: deque[float] = deque(maxlen=REMEMBERED)

    def observe(self, num_rows: int, num_prompt_tokens: int, seconds: float) -> None:
        """Learn from a step of `num_rows` rows and `num_prompt_tokens` prompt tokens, unless the clock did not
        advance."""
        if seconds <= 0:
            return
        if num_prompt_tokens:
            rows_s = self.seconds(num_rows)
            if rows_s is None and not num_rows:
                rows_s = 0.0  # the very first step
            if num_prompt_tokens >= _MIN_PROMPT_TOKENS and rows_s is not None:
                rows_s += self._more_experts_s(num_rows, num_prompt_tokens)
                self._token_s.append(max(0.0, seconds - rows_s) / num_prompt_tokens)
            return
        self._num_steps += 1
        bits = num_rows.bit_length()
        group = self._groups.get(bits)
        if group is None:
            group = self._groups[bits] = _StepGroup()
        group.steps.append((num_rows, seconds))
        group.seen_at = self._num_steps
        self._lines.clear()

    def seconds(self, num_rows: int) -> float | None:
        """Return the seconds of a step of `num_rows` rows without prompt tokens, or None if not known."""
        if self._groups:
            return self.step_and_row_s(num_rows)[0]
        return None if self.measured is None else self.measured.seconds(num_rows, context=0)

    def prompt_tokens_in(self, seconds: float, num_rows: int, most: int) -> int:
        """Return the number of prompt tokens, up to `most`, that make a step of `num_rows` rows at most `seconds`
        longer.

        Return `most` if the cost is not known. In MoE models the first prompt tokens cost most, as they use experts
        that no row uses.
        """
        token_s = self.prompt_token_s
        if not token_s:
            return most
        if self.measured is None or not self.measured.experts_s:
            return max(0, min(most, int(seconds / token_s)))
        fits, more = 0, most + 1
        while more - fits > 1:
            middle = (fits + more) // 2
            is_in = middle * token_s + self._more_experts_s(num_rows, middle) <= seconds
            fits, more = (middle, more) if is_in else (fits, middle)
        return fits

    def _more_experts_s(self, num_rows: int, num_more: int) -> float:
        """Return the seconds of reading the experts that `num_more` rows or prompt tokens add to a step of `num_rows`
        rows."""
        cost = self.measured
        return 0.0 if cost is None else cost.expert_reads_s(num_rows + num_more) - cost.expert_reads_s(num_rows)

    @property
    def prompt_token_s(self) -> float | None:
        """Seconds that each prompt token adds, without reading experts that only it uses; None if not known."""
        if self._token_s:
            return median(self._token_s)
        return None if self.measured is None else self.measured.token_s

    def step_and_row_s(self, num_rows: int) -> tuple[float, float]:
        """Return the seconds of a step of `num_rows` rows, and of one more row. Before anything is known, a one-row
        step takes 1."""
        if not self._groups:
            step_s = self._first_fixed_s + num_rows * self._first_row_s + self._more_experts_s(1, num_rows - 1)
            row_s = self._first_row_s + self._more_experts_s(num_rows, 1)
        else:
            bits = num_rows.bit_length()
            line = self._lines[bits] = self._lines.get(bits) or self._line(bits)
            row_s = line.row_s
            step_s = line.seconds + (num_rows - line.rows) * row_s
        step_s = max(step_s, row_s * num_rows)
        return step_s, max(row_s, step_s * _MIN_SHARE)

    def _line(self, bits: int) -> _CostLine:
        """Fit a line through the nearest group of steps and the nearest other group of about the same time."""
        near, *others = (self._groups[key] for key in sorted(self._groups, key=lambda key: (abs(key - bits), key)))
        steps = [*near.steps]
        step_rows, step_s = median(rows for rows, _ in steps), median(one for _, one in steps)
        for other in others:
            if abs(other.seen_at - near.seen_at) < _FORGET_AFTER:
                steps += other.steps
                break
        middle = (min(steps)[0] + max(steps)[0]) / 2
        few = [step for step in steps if step[0] <= middle]
        many = [step for step in steps if step[0] > middle]
        if len(few) >= _MIN_STEPS <= len(many):
            more_rows = median(rows for rows, _ in many) - median(rows for rows, _ in few)
            more_s = median(one for _, one in many) - median(one for _, one in few)
            return _CostLine(step_rows, step_s, max(0.0, more_s / more_rows))
        ratio = self._first_row_s / (self._first_fixed_s + step_rows * self._first_row_s)
        return _CostLine(step_rows, step_s, step_s * ratio)


class Stall(NamedTuple):
    """Pause in which no request got a token, longer than a step usually takes."""

    kind: str  # `step`: a long step; `pause`: between two steps; `memory`: steps that the ranks refused
    begun_s: float
    seconds: float
    num_sequences: int  # sequences in the step
    num_prompt_tokens: int


class StepLog:
    """Log of steps in the order of their results. Times are in seconds of the engine's clock."""

    def __init__(self) -> None:
        self._sums = [0.0] * (_NUM_SUMS + _BATCH_SIZES)
        self._seconds = np.zeros(_REMEMBERED)
        self._rank_ns = np.zeros((_REMEMBERED, 0), np.int64)
        self._marks: deque[tuple[float, int, int]] = deque()  # (time, prompt tokens, generated tokens)
        self.without_row = self.without_blocks = 0  # steps in which the head of the queue could not begin to run
        self._mean_s = 0.0
        self._ended_s: float | None = None
        self.stalls: deque[Stall] = deque(maxlen=_STALLS_REMEMBERED)  # newest stalls, ordered by their ends

    def observe(
        self,
        begun_s: float,
        seconds: float,
        num_sequences: int,
        num_prompt_tokens: int,
        num_generated_before: int = 0,
        rank_ns: Sequence[int] = (),
    ) -> None:
        """Log a step that ended `seconds` after `begun_s`, with its numbers of sequences and prompt tokens.

        `num_generated_before`: tokens sampled in all earlier steps. `rank_ns`: duration of each rank's newest completed
        step.
        """
        if not self._marks or begun_s - self._marks[-1][0] >= _MARK_S:
            self._marks.append((begun_s, self._num_prompt_tokens, num_generated_before))
            while self._marks[0][0] < begun_s - _WINDOW_S - _MARK_S:
                self._marks.popleft()
        if seconds > _STALL_S or (self._ended_s is not None and begun_s - self._ended_s > _STALL_S):
            self._note_stall(begun_s, seconds, num_sequences, num_prompt_tokens)
        self._mean_s += (seconds - self._mean_s) / (_MEAN_OF if self._mean_s else 1)
        self._ended_s = begun_s + seconds
        sums = self._sums
        slot = int(sums[_STEPS]) % _REMEMBERED
        if len(rank_ns) != self._rank_ns.shape[1]:
            self._rank_ns = np.zeros((_REMEMBERED, len(rank_ns)), np.int64)
        self._rank_ns[slot] = rank_ns
        self._seconds[slot] = seconds
        sums[_STEPS] += 1
        sums[_SEQUENCES] += num_sequences
        sums[_PROMPT_TOKENS] += num_prompt_tokens
        sums[_SECONDS] += seconds
        sums[_NUM_SUMS + min(num_sequences.bit_length(), _BATCH_SIZES) - 1] += 1

    def refused(self, now: float) -> None:
        """Log a stall: the ranks refused all steps in flight for lack of memory."""
        begun_s = now if self._ended_s is None else self._ended_s
        self.stalls.append(Stall("memory", begun_s, now - begun_s, 0, 0))
        self._ended_s = now

    def read(self) -> tuple[float, ...]:
        """Return all sums so far."""
        return tuple(self._sums)

    def stalls_since(self, begun_s: float, most: int) -> list[Stall]:
        """Return the newest stalls in order, at most `most`, each cut to its part after `begun_s`."""
        found: list[Stall] = []
        for stall in reversed(self.stalls):
            end_s = stall.begun_s + stall.seconds
            if end_s <= begun_s or len(found) == most:
                break
            first_s = max(begun_s, stall.begun_s)
            if stall.kind == "memory" or end_s - first_s > _STALL_S:
                found.append(stall._replace(begun_s=first_s, seconds=end_s - first_s))
        return found[::-1]

    def times(self) -> StepTimesState:
        """Return the times of the last 512 steps."""
        count = int(self._sums[_STEPS])
        seconds = self._seconds[: min(count, _REMEMBERED)]
        if not len(seconds):
            return StepTimesState(count=0, last_ms=0.0, median_ms=0.0, p99_ms=0.0, ranks=[])
        last = (count - 1) % _REMEMBERED
        median, p99 = np.percentile(seconds, (50, 99)).tolist()
        ranks = self._rank_ns[: len(seconds)]
        medians = np.median(ranks, axis=0).tolist()
        return StepTimesState(
            count=count,
            last_ms=_ms(float(seconds[last])),
            median_ms=_ms(median),
            p99_ms=_ms(p99),
            ranks=[
                RankTimes(rank=rank, last_ms=_ms(ns / 1e9), median_ms=_ms(medians[rank] / 1e9))
                for rank, ns in enumerate(ranks[last].tolist())
            ],
        )

    def token_rates(self, now: float, num_generated: int) -> TokenRates:
        """Return tokens per second over the last ten seconds, or since the first step after a pause.

        `num_generated`: tokens generated since the start.
        """
        mark = next((one for one in self._marks if one[0] >= now - _WINDOW_S), None)
        if mark is None:
            return TokenRates(prompt=0.0, generation=0.0)
        seconds = max(_MARK_S, now - mark[0])
        prompt, generated = self._num_prompt_tokens - mark[1], num_generated - mark[2]
        return TokenRates(prompt=round(prompt / seconds, 1), generation=round(generated / seconds, 1))

    @property
    def _num_prompt_tokens(self) -> int:
        return int(self._sums[_PROMPT_TOKENS])

    def _note_stall(self, begun_s: float, seconds: float, num_sequences: int, num_prompt_tokens: int) -> None:
        if self._ended_s is not None and begun_s - self._ended_s > _STALL_S:
            self.stalls.append(Stall("pause", self._ended_s, begun_s - self._ended_s, 0, 0))
        if seconds > _STALL_S and self._mean_s and seconds > _STALL_RATIO * self._mean_s:
            self.stalls.append(Stall("step", begun_s, seconds, num_sequences, num_prompt_tokens))


def difference(first: tuple[float, ...], last: tuple[float, ...]) -> tuple[int, int, int, float, dict[str, int]]:
    """Return steps, sequences, prompt tokens and seconds between two readings, and steps by their number of sequences:
    `1`, `2-3`, `4-7` and so on."""
    steps, sequences, prompt_tokens, seconds, *sizes = (
        after - before for before, after in zip(first, last, strict=True)
    )
    by_size = {_range(index): int(number) for index, number in enumerate(sizes) if number}
    return int(steps), int(sequences), int(prompt_tokens), seconds, by_size


def _range(index: int) -> str:
    low = 1 << index
    if index == _BATCH_SIZES - 1:
        return f"{low} or more"
    return str(low) if not index else f"{low}-{2 * low - 1}"


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
