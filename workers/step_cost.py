"""What a step costs on this machine, as measured at the start, and the limits that follow from it. Torch-free.

A processor may be a thousand times slower than another for the same model. With the same limits, its largest step would
hold up every stream for minutes and look like a hung rank.
"""

from dataclasses import dataclass

TARGET_S = 3.0  # of the largest step: everybody else's next token waits that long while prompts are read


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds, of the slowest rank: all ranks know the same."""

    fixed_s: float  # of any step
    token_s: float  # of each token
    context_s: float  # of each token for each token of its context
    logits_s: float  # of each row of logits

    def seconds(self, tokens: int, *, context: int, rows: int = 1) -> float:
        """Of a step of `tokens` that each see up to `context`, with `rows` of logits."""
        return self.fixed_s + tokens * (self.token_s + self.context_s * context) + rows * self.logits_s

    def largest_step(self, fewest: int, most: int) -> int:
        """Tokens of the largest step that takes no longer than `TARGET_S`: `most`, halved as often as it takes.

        Not to the token, so that the same machine gives the same answer tomorrow: how prompts are cut can show in the
        last bits.
        """
        tokens = most
        while tokens > fewest and self.seconds(tokens, context=tokens // 2) > TARGET_S:
            tokens //= 2
        return max(tokens, fewest)

    def worst_step_s(self, tokens: int, max_model_len: int) -> float:
        """Every token at the end of the longest context, and logits of all."""
        return self.seconds(tokens, context=max_model_len, rows=tokens)
