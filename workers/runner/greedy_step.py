"""Builds complete steps without an engine: for warm-up, timing, the test of batch invariance and `verify`.

Each step writes the whole block tables of its sequences, so that it needs no step before it.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from oarlock.workers.protocol import NULL_BLOCK, StepMetadata


class SequenceChunk(NamedTuple):
    """Consecutive tokens of one sequence, as one step computes them. The last `num_drafts` of them are drafts."""

    token_ids: Sequence[int]
    start: int  # position of the first of them
    blocks: Sequence[int]  # the sequence's KV block ids, at least as many as hold it up to here
    num_drafts: int = 0


def greedy_step(
    chunks: Sequence[SequenceChunk], block_size: int, logits_indices: Sequence[int] = (), *, step_id: int = 0
) -> StepMetadata:
    """One step that computes `chunks`, in their order, in the first rows of the block tables.

    `logits_indices`: which of the step's tokens, counted over all chunks, want logits; each gets the most likely next
    token (temperature 0), without logprobs, bias, penalties or masks.
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
        temperature=np.zeros(rows, np.float32),
        top_p=np.ones(rows, np.float32),
        top_k=np.zeros(rows, np.int32),
        min_p=np.zeros(rows, np.float32),
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
