"""The limits of a step that follow from what steps cost on this machine. Torch-free."""

import logging
import math

from oarlock.workers.config import WorkerConfig
from oarlock.workers.step_cost import StepCost

logger = logging.getLogger("oarlock.executor")

FEWEST_TOKENS = 64  # of a step; with fewer, reading the weights takes most of the time
PATIENCE = 4.0  # times the worst step: load on the machine must not look like a hung rank


def step_tokens(config: WorkerConfig, cost: StepCost) -> int:
    """Number of tokens of the largest step."""
    tokens = config.max_num_batched_tokens
    if not config.lower_step_size:
        return tokens
    return min(tokens, cost.largest_step(max(FEWEST_TOKENS, config.max_num_seqs), tokens))


def adapted(config: WorkerConfig, cost: StepCost) -> WorkerConfig:
    """`config` with the limits that it leaves to the measurement. Logs them, and warns about a step timeout of the
    operator's that a legitimate step could exceed."""
    assert config.max_model_len is not None, "preflight resolves the context length"
    tokens = step_tokens(config, cost)
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
