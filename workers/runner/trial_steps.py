"""Steps without an engine, for warm-up, self-tests, timing and `verify`.

Each step writes the whole block tables of its sequences, so that it needs no earlier step.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from oarlock.workers.config import WorkerConfig
from oarlock.workers.protocol import NULL_BLOCK, StepMetadata
from oarlock.workers.runner.memory_needs import MAX_LOGITS_ROWS
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
        table_groups=np.zeros(tables.size, np.uint8),
        table_rows=table_rows,
        table_columns=table_columns,
        table_blocks=tables.ravel(),
        num_drafts=drafts if drafts.any() else np.empty(0, np.int32),
    )


_STRIDE = 7919  # difference between the ids of consecutive tokens: a prime, which spreads them over the vocabulary


def null_step(tokens: int, context: int, rows: int, block_size: int, vocab_size: int = 1) -> StepMetadata:
    """Return a step of the last `tokens` of `context` tokens, all in the null block; the last `rows` tokens get logits.

    Tokens differ as far as there are ids below `vocab_size`.
    """
    ids = [_STRIDE * number % vocab_size for number in range(tokens)]
    chunk = SequenceChunk(ids, context - tokens, [NULL_BLOCK] * -(-context // block_size))
    return greedy_step([chunk], block_size, range(tokens - rows, tokens))


def largest_step(config: WorkerConfig) -> StepMetadata:
    """Return a step of `max_num_batched_tokens` tokens in the null block.

    It has as few sequences as possible, at the ends of full contexts, and the most rows of logits that are computed at
    once.
    """
    assert config.max_model_len is not None, "preflight resolves the context length"
    length, left = config.max_model_len, config.max_num_batched_tokens
    blocks = [NULL_BLOCK] * -(-length // config.block_size)
    chunks = []
    while left and len(chunks) < config.max_num_seqs:
        count = min(left, length)
        chunks.append(SequenceChunk([0] * count, length - count, blocks))
        left -= count
    num_tokens = config.max_num_batched_tokens - left
    return greedy_step(chunks, config.block_size, range(max(0, num_tokens - MAX_LOGITS_ROWS), num_tokens))
