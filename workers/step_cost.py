"""The cost of a step in seconds, as measured at start on this machine. Torch-free.

Processors differ by a factor of a thousand for the same model, so the limits of a step follow from it
(`worker/step_limits.py`).
"""

from dataclasses import dataclass

TARGET_S = 3.0  # of the largest step: running requests wait that long for their next token while prompts are computed


@dataclass(frozen=True, slots=True)
class StepCost:
    """Cost of a step in seconds on the slowest rank; the same numbers on every rank."""

    fixed_s: float  # of any step
    token_s: float  # of each token
    context_s: float  # of each token for each token of its context
    logits_s: float  # of each row of logits

    def seconds(self, tokens: int, *, context: int, rows: int = 1) -> float:
        """Seconds of a step of `tokens` with a context of up to `context` tokens each, and `rows` of logits."""
        return self.fixed_s + tokens * (self.token_s + self.context_s * context) + rows * self.logits_s

    def largest_step(self, fewest: int, most: int) -> int:
        """Tokens of the largest step of at most `TARGET_S`: `most`, halved until it is, but at least `fewest`.

        Halved, so that small differences between measurements give the same number: how prompts are cut into chunks
        can change the last bits of results.
        """
        tokens = most
        while tokens > fewest and self.seconds(tokens, context=tokens // 2) > TARGET_S:
            tokens //= 2
        return max(tokens, fewest)

    def worst_step_s(self, tokens: int, max_model_len: int) -> float:
        """Seconds of a step in which every token has the longest context and wants logits."""
        return self.seconds(tokens, context=max_model_len, rows=tokens)
