"""Sums over all steps of an engine, so that what a request has met of them is the difference of two readings.

A step costs the same however many requests are traced.
"""

from collections import deque
from typing import NamedTuple

_BATCH_SIZES = 16  # buckets of 1, 2, 4, ... sequences
_NUM_SUMS = 4
_REMEMBERED = 256  # stalls
_STALL_S = 0.1
_STALL_RATIO = 4.0  # of a step to the mean of those before
_MEAN_OF = 32  # steps, about


class Stall(NamedTuple):
    """A time in which nobody got a token, longer than a step usually takes."""

    kind: str  # `step`: a long one; `pause`: between two steps; `memory`: steps that the ranks refused
    begun_s: float
    seconds: float
    num_sequences: int  # of the step
    num_prompt_tokens: int


class StepSums:
    """Counts steps, their sequences, prompt tokens and seconds, and how many had how many sequences."""

    def __init__(self) -> None:
        self._sums = [0.0] * (_NUM_SUMS + _BATCH_SIZES)
        self.without_row = self.without_blocks = 0  # steps in which the next in turn could not begin to run
        self._mean_s = 0.0
        self._ended_s: float | None = None
        self.stalls: deque[Stall] = deque(maxlen=_REMEMBERED)  # in the order of their ends

    def add(self, begun_s: float, seconds: float, num_sequences: int, num_prompt_tokens: int) -> None:
        """A step with so many sequences, and with so many tokens of prompts among them, ended `seconds` after
        `begun_s`."""
        sums = self._sums
        sums[0] += 1
        sums[1] += num_sequences
        sums[2] += num_prompt_tokens
        sums[3] += seconds
        sums[_NUM_SUMS + min(num_sequences.bit_length(), _BATCH_SIZES) - 1] += 1
        if self._ended_s is not None and begun_s - self._ended_s > _STALL_S:
            self.stalls.append(Stall("pause", self._ended_s, begun_s - self._ended_s, 0, 0))
        if seconds > _STALL_S and self._mean_s and seconds > _STALL_RATIO * self._mean_s:
            self.stalls.append(Stall("step", begun_s, seconds, num_sequences, num_prompt_tokens))
        self._mean_s += (seconds - self._mean_s) / (_MEAN_OF if self._mean_s else 1)
        self._ended_s = begun_s + seconds

    def refused(self, now: float) -> None:
        """The ranks refused all steps in flight for lack of memory."""
        begun_s = now if self._ended_s is None else self._ended_s
        self.stalls.append(Stall("memory", begun_s, now - begun_s, 0, 0))
        self._ended_s = now

    def read(self) -> tuple[float, ...]:
        """All sums so far."""
        return tuple(self._sums)

    def stalls_since(self, begun_s: float, most: int) -> list[Stall]:
        """The newest stalls that lasted at `begun_s` or began later, each from then on, in their order."""
        found: list[Stall] = []
        for stall in reversed(self.stalls):
            end_s = stall.begun_s + stall.seconds
            if end_s <= begun_s or len(found) == most:
                break
            first_s = max(begun_s, stall.begun_s)
            if stall.kind == "memory" or end_s - first_s > _STALL_S:
                found.append(stall._replace(begun_s=first_s, seconds=end_s - first_s))
        return found[::-1]


def between(first: tuple[float, ...], last: tuple[float, ...]) -> tuple[int, int, int, float, dict[str, int]]:
    """Steps, sequences, prompt tokens and seconds between two readings, and steps by their number of sequences: `1`,
    `2-3`, `4-7` and so on."""
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
