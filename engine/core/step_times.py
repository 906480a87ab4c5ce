"""What steps take, learnt from those that ran: how many prompt tokens fit into a step beside running answers.

Without a limit a chunk of a long prompt would hold up everyone's next token for as long as fifty steps without it take.
Knows counts and seconds; does not know sequences.
"""

import math
from collections import deque
from statistics import median

from workers.step_cost import StepCost

RATIO = 2.5  # of a step with prompt tokens to one without, where no limit is given
FEWEST_TOKENS = 16  # of a chunk, however long a step takes: prompts must go on
_REMEMBERED = 9  # steps of a kind; their median is what another will take
_TELLING_TOKENS = 8  # so few say little about what a token costs


class StepTimes:
    """Medians of the last steps: those without prompt tokens by the number of their sequences, to the next power of
    two, and what each prompt token adds."""

    def __init__(self, cost: StepCost | None, max_step_s: float | None, num_stages: int = 1) -> None:
        """`cost`: what the ranks have measured at start, used until steps have run. `max_step_s`: of a step in which
        answers go on; None: `RATIO` times one without prompt tokens. `num_stages`: through which a step passes."""
        self._cost = cost
        self._num_stages = num_stages
        self._part = self._num_after_part = 0  # what was divided last: the tokens of a step, and those that it leaves
        self._max_step_s = max_step_s
        self._decode_s: dict[int, deque[float]] = {}  # by the bit length of the number of sequences
        self._token_s: deque[float] = deque(maxlen=_REMEMBERED)

    def observe(self, num_decodes: int, num_prompt_tokens: int, seconds: float) -> None:
        """One step has run: so many sequences got one token each, and prompts so many."""
        if num_prompt_tokens == 0:
            kind = num_decodes.bit_length()
            self._decode_s.setdefault(kind, deque(maxlen=_REMEMBERED)).append(seconds)
            return
        decode_s = self._of_decodes(num_decodes) if num_decodes else 0.0
        if num_prompt_tokens >= _TELLING_TOKENS and decode_s is not None:
            self._token_s.append(max(0.0, seconds - decode_s) / num_prompt_tokens)

    def most_prompt_tokens(self, num_decodes: int, most: int, num_left: int) -> int:
        """Tokens of prompts in a step in which `num_decodes` sequences get one token each: at most `most`. Prompts have
        `num_left` tokens to compute, in this step and in later ones."""
        if self._num_stages > 1 and self._cost is not None and self._cost.fixed_s:
            most = min(most, self._of_a_part(num_left, self._cost))
        if num_decodes == 0:
            return most
        decode_s = self._of_decodes(num_decodes)
        token_s = median(self._token_s) if self._token_s else None if self._cost is None else self._cost.token_s
        if decode_s is None or not token_s:
            return most
        limit_s = RATIO * decode_s if self._max_step_s is None else self._max_step_s
        return min(most, max(FEWEST_TOKENS, int((limit_s - decode_s) / token_s)))

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

    def _of_decodes(self, num_decodes: int) -> float | None:
        """Seconds of a step of so many sequences, or of the nearest number that was measured."""
        kind = num_decodes.bit_length()
        if self._decode_s:
            return median(self._decode_s[min(self._decode_s, key=lambda other: abs(other - kind))])
        return None if self._cost is None else self._cost.seconds(num_decodes, context=0)
