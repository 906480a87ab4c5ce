"""Times a few steps of a loaded model: small ones first, larger ones while they are likely to take little time."""

import time
from collections.abc import Callable

import numpy as np

from workers.protocol import NULL_BLOCK, StepMetadata
from workers.step_cost import StepCost

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
    """Every rank of a group must call this at the same point; `agree` gives all of them the largest of their numbers,
    so that they go on alike. `max_tokens`: of one step. Reads and writes the null block only.
    """

    def seconds(tokens: int, context: int, rows: int = 1) -> float:
        step = null_step(tokens, context, rows, block_size)
        times = []
        for _ in range(2):  # the first may still make something; other work disturbs either
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
    """One sequence's last `tokens` of `context`, whose blocks are all the null block; the last `rows` want a token."""
    positions = np.arange(context - tokens, context, dtype=np.int32)
    return StepMetadata(
        step_id=0,
        token_ids=np.zeros(tokens, np.int32),
        positions=positions,
        slot_mapping=(NULL_BLOCK * block_size + positions % block_size).astype(np.int64),
        query_start_loc=np.array([0, tokens], np.int32),
        seq_lens=np.array([context], np.int32),
        block_tables=np.full((1, -(-context // block_size)), NULL_BLOCK, np.int32),
        logits_indices=np.arange(tokens - rows, tokens, dtype=np.int32),
        target_ids=np.full(rows, -1, np.int32),
        sample_positions=positions[tokens - rows :] + 1,
        temperature=np.zeros(rows, np.float32),
        top_p=np.ones(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        min_p=np.zeros(rows, np.float32),
        seeds=np.zeros(rows, np.int64),
        num_logprobs=np.full(rows, -1, np.int32),
        bias_rows=np.empty(0, np.int32),
        bias_ids=np.empty(0, np.int32),
        bias_values=np.empty(0, np.float32),
    )
