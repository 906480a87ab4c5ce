"""Times a few steps of a loaded model, most of them on a few of its layers, so that a start takes little longer.

A step of the whole model tells what any step costs, which is mostly reading the weights. What a token more costs, or a
longer context, is arithmetic and the same in every layer: it is timed on a few layers and multiplied.
"""

import time
from collections.abc import Callable

from oarlock.workers.protocol import NULL_BLOCK, StepMetadata
from oarlock.workers.runner.greedy_step import SequenceChunk, greedy_step
from oarlock.workers.step_cost import StepCost

_COUNTS = (16, 64, 256)  # tokens
_GROWTH_S = 0.4  # a size is not tried if it is likely to take longer
_CONTEXT = 2048  # tokens
_TRIES = 3  # the first may allocate; other processes may disturb any

Execute = Callable[[StepMetadata], object]


def time_steps(
    execute: Execute,
    execute_part: Execute,
    share: float,
    agree: Callable[[float], float],
    *,
    max_tokens: int,
    max_model_len: int,
    block_size: int,
) -> StepCost:
    """Measures the cost of steps. Every rank must call this at the same point.

    `agree` returns the largest of all ranks' numbers, so that all ranks time the same steps. `execute_part` runs a step
    on `share` of the layers, with the whole embedding and head. `max_tokens`: of one step. Reads and writes the null
    block only.
    """

    def seconds(run: Execute, tokens: int, context: int, rows: int = 0) -> float:
        step = null_step(tokens, context, rows, block_size)
        times = []
        for _ in range(_TRIES):
            begun = time.perf_counter()
            run(step)
            times.append(time.perf_counter() - begun)
        return agree(min(times))

    counts = [count for count in _COUNTS if count <= min(max_tokens, max_model_len)] or [1]
    small = counts[0]
    whole_s = seconds(execute, small, small, 1)
    times = {small: seconds(execute_part, small, small)}
    for count in counts[1:]:
        last = max(times)
        if times[last] * count / last > _GROWTH_S:
            break
        times[count] = seconds(execute_part, count, count)
    large = max(times)
    token_s = whole_s / small
    if large > small and times[large] > times[small]:
        token_s = (times[large] - times[small]) / (large - small) / share
    context = min(_CONTEXT, max_model_len)
    context_s = (seconds(execute_part, small, context) - times[small]) / (small * context) / share
    logits_s = (seconds(execute_part, small, small, small) - seconds(execute_part, small, small, 1)) / small
    return StepCost(
        fixed_s=max(0.0, whole_s - small * token_s),
        token_s=token_s,
        context_s=max(0.0, context_s),
        logits_s=max(0.0, logits_s),
    )


def null_step(tokens: int, context: int, rows: int, block_size: int) -> StepMetadata:
    """A step of the last `tokens` of `context` tokens, all in the null block; the last `rows` of them want logits."""
    chunk = SequenceChunk([0] * tokens, context - tokens, [NULL_BLOCK] * -(-context // block_size))
    return greedy_step([chunk], block_size, range(tokens - rows, tokens))
