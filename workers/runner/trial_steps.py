"""Steps without an engine, for warm-up, self-tests and `verify`, and timing of the model with a few of them.

Each step writes the whole block tables of its sequences, so that it needs no earlier step. A step of the whole model
measures the cost of any step, which is mostly reading the weights. The cost of one more token, or of a longer context,
is arithmetic and the same in every layer: it is timed on a few layers and multiplied.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from oarlock.workers.config import StepCost
from oarlock.workers.protocol import NULL_BLOCK, StepMetadata
from oarlock.workers.sampling_parameters import columns_off


class SequenceChunk(NamedTuple):
    """Consecutive tokens of one sequence that a step computes. The last `num_drafts` of them are drafts."""

    token_ids: Sequence[int]
    start: int  # position of its first token
    blocks: Sequence[int]  # the sequence's KV block ids, at least up to its last token
    num_drafts: int = 0


def greedy_step(
    chunks: Sequence[SequenceChunk], block_size: int, logits_indices: Sequence[int] = (), *, step_id: int = 0
) -> StepMetadata:
    """Return one step that computes `chunks`, in their order, in the first rows of the block tables.

    `logits_indices`: indices of the tokens, counted over all chunks, whose logits are computed. Each gets the most
    likely next token (temperature 0), without logprobs, bias, penalties or masks.
    """
    counts = [len(chunk.token_ids) for chunk in chunks]
    positions = np.concatenate([np.arange(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in chunks])  # [T]
    seq_lens = np.array([chunk.start + len(chunk.token_ids) for chunk in chunks], np.int32)  # [S]
    tables = np.full((len(chunks), -(-int(seq_lens.max()) // block_size)), NULL_BLOCK, np.int32)  # [S, B]
    for row, (chunk, width) in enumerate(zip(chunks, -(-seq_lens // block_size), strict=True)):
        tables[row, :width] = chunk.blocks[:width]
    blocks = tables[np.repeat(np.arange(len(chunks)), counts), positions // block_size].astype(np.int64)  # [T]
    table_rows, table_columns = np.divmod(np.arange(tables.size, dtype=np.int32), np.int32(tables.shape[1]))
    drafts = np.array([chunk.num_drafts for chunk in chunks], np.int32)
    indices = np.array(logits_indices, np.int32)
    rows = len(indices)
    return StepMetadata(
        step_id=step_id,
        token_ids=np.array([token for chunk in chunks for token in chunk.token_ids], np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=blocks * block_size + positions % block_size,
        query_start_loc=np.cumsum([0, *counts]).astype(np.int32),
        seq_lens=seq_lens,
        rows=np.arange(len(chunks), dtype=np.int32),
        logits_indices=indices,
        target_ids=np.full(rows, -1, np.int32),
        sample_positions=(positions[indices] + 1).astype(np.int32),
        **columns_off(rows),
        seeds=np.zeros(rows, np.int64),
        num_logprobs=np.full(rows, -1, np.int32),
        bias_rows=np.empty(0, np.int32),
        bias_ids=np.empty(0, np.int32),
        bias_values=np.empty(0, np.float32),
        table_rows=table_rows,
        table_columns=table_columns,
        table_blocks=tables.ravel(),
        num_drafts=drafts if drafts.any() else np.empty(0, np.int32),
    )


_COUNTS = (16, 64, 256)  # tokens
_GROWTH_S = 0.4  # a size is not tried if it is likely to take longer
_CONTEXT = 2048  # tokens
_STRIDE = 7919  # difference between the ids of consecutive tokens: a prime, which spreads them over the vocabulary
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
    vocab_size: int = 1,
    expert_share: float = 0.0,
) -> StepCost:
    """Measure the cost of steps. Every rank must call this at the same point.

    `agree` returns the maximum of a value over all ranks, so that all ranks time the same steps. `execute_part` runs a
    step on `share` of the layers, with the whole embedding and head. `max_tokens`: largest step. `expert_share`: share
    of an MoE layer's experts that one token uses; if it is not 0, tokens must differ, so that they choose several
    experts. Reads and writes only the null block.
    """

    def seconds(run: Execute, tokens: int, context: int, rows: int = 0) -> float:
        step = null_step(tokens, context, rows, block_size, vocab_size)
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
    token_s, experts_s = whole_s / small, 0.0
    if expert_share and large > small > 1:
        # A single layer's experts may stay in the caches, so reading them is timed with all layers.
        more_s = whole_s - seconds(execute, 1, 1, 1), (times[large] - times[small]) / share
        of_token, of_experts = _with_experts((1, small, large), more_s, expert_share)
        if of_token:
            token_s, experts_s = of_token, of_experts
    elif large > small and times[large] > times[small]:
        token_s = (times[large] - times[small]) / (large - small) / share
    cost = StepCost(0.0, token_s, 0.0, 0.0, experts_s, expert_share)
    context = min(_CONTEXT, max_model_len)
    context_s = (seconds(execute_part, small, context) - times[small]) / (small * context) / share
    logits_s = (seconds(execute_part, small, small, small) - seconds(execute_part, small, small, 1)) / small
    return replace(
        cost,
        fixed_s=max(0.0, whole_s - cost.seconds(small, context=0)),
        context_s=max(0.0, context_s),
        logits_s=max(0.0, logits_s),
    )


def _with_experts(counts: tuple[int, int, int], more_s: tuple[float, float], share: float) -> tuple[float, float]:
    """Return the seconds of a token, and of reading all experts.

    `counts`: one, few and many tokens. `more_s`: additional seconds of a step of few tokens compared with one token,
    and of a step of many tokens compared with few. A few tokens use few experts and many tokens almost all, so from one
    token to a few the time grows mostly by reading experts.
    """
    reads = [StepCost(0.0, 0.0, 0.0, 0.0, 1.0, share).expert_reads_s(count) for count in counts]
    # Solves more = token * n + experts * r for both differences.
    (n1, r1, t1), (n2, r2, t2) = (
        (counts[place + 1] - counts[place], reads[place + 1] - reads[place], more_s[place]) for place in (0, 1)
    )
    experts_s = (t1 * n2 - t2 * n1) / (r1 * n2 - r2 * n1)
    experts_s = max(0.0, min(experts_s, t1 / r1))  # neither time is negative
    return max(0.0, t2 - experts_s * r2) / n2, experts_s


def null_step(tokens: int, context: int, rows: int, block_size: int, vocab_size: int = 1) -> StepMetadata:
    """Return a step of the last `tokens` of `context` tokens, all in the null block; the last `rows` tokens get logits.

    Tokens differ as far as there are ids below `vocab_size`.
    """
    ids = [_STRIDE * number % vocab_size for number in range(tokens)]
    chunk = SequenceChunk(ids, context - tokens, [NULL_BLOCK] * -(-context // block_size))
    return greedy_step([chunk], block_size, range(tokens - rows, tokens))
