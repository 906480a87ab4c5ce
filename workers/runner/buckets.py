"""The numbers of sequences, and of tokens of steps with prompts, for which graphs are captured.

A step runs in the smallest that holds it, its other rows being padding: close together where rows are few, so that no
step computes much more than it asks for.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oarlock.workers.config import WorkerConfig

if TYPE_CHECKING:
    from oarlock.workers.protocol import StepMetadata  # it needs numpy, which nothing before the ranks imports


_LARGEST_BUCKET = 512  # sequences; launching that many row by row takes less than computing them
_LARGEST_PROMPTS = 512  # tokens; computing more takes longer than launching it, and more padding than launches cost
MOST_PROMPTS = 16  # sequences with more than one token in a step that a graph runs: each may take a tile of its own
_ROWS_AT_ONCE = 128  # of logits, in steps without a graph: scoring a prompt may need thousands of them


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Ascending: 1, 2, 4, 8, 16, then every 8th up to 64, then every 16th; `max_num_seqs` is the last."""
    sizes = [1, 2, 4, 8, *range(16, 64, 8), *range(64, max_num_seqs, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def graph_sizes(config: WorkerConfig) -> list[int]:
    """Numbers of sequences for which a rank captures graphs, ascending."""
    return bucket_sizes(min(config.max_num_seqs, _LARGEST_BUCKET))


def prompt_sizes(config: WorkerConfig) -> list[int]:
    """Numbers of tokens of steps with prompts for which a rank captures graphs, ascending.

    None where rows must have the same bits in every batch: their keys are divided at fixed places, for which the
    longest sequence would ask for most of a graph's programs.
    """
    if config.batch_invariant:
        return []
    assert config.max_model_len is not None, "preflight resolves the context length"
    most = min(_LARGEST_PROMPTS, config.max_num_batched_tokens, config.max_model_len)
    sizes = [16, *range(32, 256, 32), *range(256, most, 64)]
    return [size for size in sizes if size < most] + [most]


def logits_rows_at_once(config: WorkerConfig) -> int:
    """Rows of logits for which a rank on a CUDA device has memory: as many as the largest graph computes, or more."""
    rows = max(config.max_num_seqs, config.max_num_batched_tokens)
    return min(rows, max(_ROWS_AT_ONCE, graph_sizes(config)[-1]))


def bucket_of(step: StepMetadata, sizes: Sequence[int]) -> int | None:
    """The smallest of `sizes` that holds `step`; None where it is no plain decode, or too large.

    A plain decode has one token and one row of logits for each sequence, and no drafts. A prompt's last token is one,
    unless vectors are wanted of it.
    """
    rows = step.num_seqs
    if not (rows == step.num_tokens == len(step.logits_indices)) or len(step.num_drafts) or rows > sizes[-1]:
        return None
    return sizes[bisect_left(sizes, rows)]


def prompt_bucket_of(step: StepMetadata, sizes: Sequence[int]) -> int | None:
    """The smallest of `sizes` that holds all tokens of `step`; None where that is none, or where it has more prompts
    than a graph has tiles for."""
    starts = step.query_start_loc
    if not sizes or step.num_tokens > sizes[-1] or int((starts[1:] - starts[:-1] > 1).sum()) > MOST_PROMPTS:
        return None
    return sizes[bisect_left(sizes, step.num_tokens)]
