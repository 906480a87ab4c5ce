"""Builds complete steps without an engine: for warm-up, timing, the test of batch invariance and `verify`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from workers.protocol import NULL_BLOCK, StepMetadata


class SequenceChunk(NamedTuple):
    """Consecutive tokens of one sequence, as one step computes them."""

    token_ids: Sequence[int]
    start: int  # position of the first of them
    blocks: Sequence[int]  # the sequence's KV block ids, at least as many as hold it up to here


def greedy_step(
    chunks: Sequence[SequenceChunk], block_size: int, logits_indices: Sequence[int] = (), *, step_id: int = 0
) -> StepMetadata:
    """One step that computes `chunks`, in their order.

    `logits_indices`: which of the step's tokens, counted over all chunks, want logits; each gets the most likely next
    token (temperature 0), without logprobs, bias, penalties or masks.
    """
    counts = [len(chunk.token_ids) for chunk in chunks]
    positions = np.concatenate([np.arange(chunk.start, chunk.start + len(chunk.token_ids)) for chunk in chunks])  # [T]
    tables = np.full((len(chunks), max(len(chunk.blocks) for chunk in chunks)), NULL_BLOCK, np.int32)  # [S, B]
    for row, chunk in enumerate(chunks):
        tables[row, : len(chunk.blocks)] = chunk.blocks
    blocks = tables[np.repeat(np.arange(len(chunks)), counts), positions // block_size].astype(np.int64)  # [T]
    indices = np.array(logits_indices, np.int32)
    rows = len(indices)
    return StepMetadata(
        step_id=step_id,
        token_ids=np.array([token for chunk in chunks for token in chunk.token_ids], np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=blocks * block_size + positions % block_size,
        query_start_loc=np.cumsum([0, *counts]).astype(np.int32),
        seq_lens=np.array([chunk.start + len(chunk.token_ids) for chunk in chunks], np.int32),
        block_tables=tables,
        logits_indices=indices,
        target_ids=np.full(rows, -1, np.int32),
        sample_positions=(positions[indices] + 1).astype(np.int32),
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
