"""CPU time of masks: the expected time of the next mask, and the time that a client may spend.

The library bounds the work of one mask (`compiler.py`). Ordinary masks are fast. Masks of a grammar whose terminals are
characters, as in GBNF, are much slower with a large vocabulary. A grammar that needs even more time for each token is
ambiguous without end, and its requests fail.

Knows seconds and clients. Does not know grammars, threads or steps.
"""

from oarlock.engine.errors import BrokenGrammarError

FAST_S = 0.0005  # mean CPU time below which a mask is computed in each step that wants it
STEP_S = 0.05  # CPU time for the slow masks of one step; the rest is postponed
PER_TOKEN_S = 0.05  # CPU time that a token may take on average
RESERVE_S = 2.0  # CPU time that a client's tokens with one grammar may take beyond the average
_WEIGHT = 0.3  # weight of the newest mask in the mean
JUMP_S = 0.01  # a mask slower than this and than the mean becomes the mean at once


class MaskCosts:
    """Costs of one grammar, shared by all its sequences, so that the choices of a request count together.

    CPU time decides whether a grammar is slow. The expected time of its masks is clock time, since other programs may
    use the CPU for a part of it.
    """

    def __init__(self) -> None:
        self._mean_s = 0.0  # CPU time
        self._mean_clock_s = 0.0
        self._left_s: dict[str, float] = {}  # client -> CPU time that it may still spend beyond `PER_TOKEN_S`

    @property
    def expected_s(self) -> float:
        """Seconds that the next mask is expected to take; 0.0 for a fast grammar."""
        return self._mean_clock_s if self._mean_s >= FAST_S else 0.0

    def expect(self, seconds: float, clock_s: float) -> None:
        """Update the means with the CPU time and clock time of a mask, without charging any client."""
        self._mean_s = _mean(self._mean_s, seconds)
        self._mean_clock_s = _mean(self._mean_clock_s, max(seconds, clock_s))

    def charge(self, seconds: float, client: str) -> None:
        """Charge `client` for the CPU time of a token. Raises `BrokenGrammarError` if it has spent too much."""
        if seconds < FAST_S:
            return
        left_s = min(RESERVE_S, self._left_s.get(client, RESERVE_S) + PER_TOKEN_S - seconds)
        self._left_s[client] = left_s
        if left_s < 0:
            raise BrokenGrammarError(
                f"its masks take too long: the last mask took {seconds * 1e3:.0f} ms of processor time, but an average "
                f"of {PER_TOKEN_S * 1e3:.0f} ms per token is allowed. Make the grammar less ambiguous: no rule should "
                "match a text in several ways, and lists should use + or * instead of a rule that refers to itself "
                "twice."
            )


def _mean(mean_s: float, seconds: float) -> float:
    """Return the moving mean, which follows a jump at once."""
    new_s = mean_s + _WEIGHT * (seconds - mean_s)
    return max(new_s, seconds) if seconds > JUMP_S else new_s
