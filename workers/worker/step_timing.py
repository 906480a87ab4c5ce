"""Times a few steps of a loaded model: small ones first, larger ones while they are likely to take little time."""

import time
from collections.abc import Callable

from workers.protocol import NULL_BLOCK, StepMetadata
from workers.step_cost import StepCost
from workers.worker.greedy_step import SequenceChunk, greedy_step

_COUNTS = (16, 64, 256)  # tokens
_GROWTH_S = 2.0  # a size is not tried if it is likely to take longer
_CONTEXT = 2048  # tokens


def time_steps(
    execute: Callable[[StepMetadata], object],
    agree: Callable[[float], float],
    *,
    max_tokens: int,
    max_model_len: int,
    block_size: int,
) -> StepCost:
    """Every rank must call this at the same point. `agree` returns the largest of all ranks' numbers, so that all ranks
    time the same steps. `max_tokens`: of one step. Reads and writes the null block only.
    """

    def seconds(tokens: int, context: int, rows: int = 1) -> float:
        step = null_step(tokens, context, rows, block_size)
        times = []
        for _ in range(2):  # the first may allocate; other processes may disturb either
            begun = time.perf_counter()
            execute(step)
            times.append(time.perf_counter() - begun)
        return agree(min(times))

    counts = [count for count in _COUNTS if count <= min(max_tokens, max_model_len)] or [1]
    small = counts[0]
    times = {small: seconds(small, small)}
    for count in counts[1:]:
        last = max(times)
        if times[last] * count / last > _GROWTH_S:
            break
        times[count] = seconds(count, count)
    large = max(times)
    token_s = times[large] / large
    if large > small and times[large] > times[small]:
        token_s = (times[large] - times[small]) / (large - small)
    context = min(_CONTEXT, max_model_len)
    return StepCost(
        fixed_s=max(0.0, times[large] - large * token_s),
        token_s=token_s,
        context_s=max(0.0, seconds(small, context) - times[small]) / (small * context),
        logits_s=max(0.0, seconds(small, small, small) - times[small]) / small,
    )


def null_step(tokens: int, context: int, rows: int, block_size: int) -> StepMetadata:
    """The last `tokens` of a sequence of `context` tokens in the null block; the last `rows` of them want logits."""
    chunk = SequenceChunk([0] * tokens, context - tokens, [NULL_BLOCK] * -(-context // block_size))
    return greedy_step([chunk], block_size, range(tokens - rows, tokens))
