"""What a step costs on this machine, as measured at the start, and the limits that follow from it. Torch-free.

A processor may be a thousand times slower than another for the same model. With the same limits, its largest step would
hold up every stream for minutes and look like a hung rank.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.config import WorkerConfig

logger = logging.getLogger("oarlock.group")

TARGET_S = 3.0  # of the largest step: everybody else's next token waits that long while prompts are read
FEWEST_TOKENS = 64  # of a step: below, weights are read again for too little work
PATIENCE = 4.0  # times the largest step: other work on the machine must not look like a hung rank


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


def adapted(config: WorkerConfig, cost: StepCost) -> WorkerConfig:
    """`config` with the limits that it leaves to the machine; one line of log for them, and one for any of the
    operator's own that a legitimate step could trip."""
    assert config.max_model_len is not None, "preflight resolves the context length"
    tokens = config.max_num_batched_tokens
    if config.lower_step_size:
        tokens = min(tokens, cost.largest_step(max(FEWEST_TOKENS, config.max_num_seqs), tokens))
    worst = cost.worst_step_s(tokens, config.max_model_len)
    timeout = config.step_timeout_s
    if config.raise_step_timeout:
        timeout = max(timeout, float(math.ceil(PATIENCE * worst)))
    logger.info(
        "event=step_limits max_num_batched_tokens=%d%s step_timeout_s=%g%s usual_step_s=%.3g worst_step_s=%.3g",
        tokens,
        " (measured)" if tokens < config.max_num_batched_tokens else "",
        timeout,
        " (measured)" if timeout > config.step_timeout_s else "",
        cost.seconds(tokens, context=tokens // 2),
        worst,
    )
    if worst > timeout:
        logger.warning(
            'event=step_timeout_too_short step_timeout_s=%g worst_step_s=%.3g fix="%s"',
            timeout,
            worst,
            "leave --step-timeout out, raise it, or lower --max-num-batched-tokens",
        )
    return config.with_(max_num_batched_tokens=tokens, step_timeout_s=timeout)
