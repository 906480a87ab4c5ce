"""Processor time that masks take: what the next one is expected to take, and how much a client may spend.

The library bounds the work of one mask, to a tenth of a second at most (`compiler.py`). An ordinary mask takes well
below a millisecond, and one of a grammar whose terminals are characters, as in GBNF, up to 10 ms with a vocabulary of
128k tokens. A grammar that needs more for each token is ambiguous without end, and its requests fail.

Knows seconds and clients. Does not know grammars, threads or steps.
"""

from oarlock.engine.errors import BrokenGrammarError

FAST_S = 0.0005  # mean processor time of masks that are computed in each step that wants them
STEP_S = 0.05  # processor time for the slow masks of one step; the rest is postponed
PER_TOKEN_S = 0.05  # processor time that a token may take on average
RESERVE_S = 2.0  # processor time that the tokens of a client may take beyond the average, with one grammar
_WEIGHT = 0.3  # of the newest mask in the mean
JUMP_S = 0.01  # a mask that takes longer than this, and than the mean, is expected again at once


class MaskCosts:
    """Costs of one grammar. All sequences with this grammar share it, so that the choices of a request count together.

    A grammar is slow by the processor time of its masks, and they are expected to take the clock time that they took:
    other programs may have the processor for a part of it.
    """

    def __init__(self) -> None:
        self._mean_s = 0.0  # processor time
        self._mean_clock_s = 0.0
        self._left_s: dict[str, float] = {}  # by client: what it may spend beyond `PER_TOKEN_S`

    @property
    def expected_s(self) -> float:
        """Seconds that the next mask is expected to take; 0.0 for a fast grammar."""
        return self._mean_clock_s if self._mean_s >= FAST_S else 0.0

    def expect(self, seconds: float, clock_s: float) -> None:
        """Learn from a mask that took so much processor time and clock time, without charging anyone for it."""
        self._mean_s = _mean(self._mean_s, seconds)
        self._mean_clock_s = _mean(self._mean_clock_s, max(seconds, clock_s))

    def charge(self, seconds: float, client: str) -> None:
        """Charge `client` for the processor time of a token. Raises `BrokenGrammarError` when it has spent too much."""
        if seconds < FAST_S:
            return
        left_s = min(RESERVE_S, self._left_s.get(client, RESERVE_S) + PER_TOKEN_S - seconds)
        self._left_s[client] = left_s
        if left_s < 0:
            raise BrokenGrammarError(
                f"its masks take too long: the last one took {seconds * 1e3:.0f} ms of processor time, and "
                f"{PER_TOKEN_S * 1e3:.0f} ms per token are allowed on average. Make it less ambiguous: let no rule "
                "match one text in several ways, and write lists with + or * instead of a rule that names itself twice."
            )


def _mean(mean_s: float, seconds: float) -> float:
    """Moving mean, which follows a jump at once."""
    new_s = mean_s + _WEIGHT * (seconds - mean_s)
    return max(new_s, seconds) if seconds > JUMP_S else new_s
