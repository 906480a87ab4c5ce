"""Sizes for which graphs are captured: numbers of sequences, or of tokens for steps with prompts.

A step runs in the smallest size that holds it, and the remaining rows are padding. Small sizes are close together, so
that no step computes much more than it needs.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oarlock.workers.config import WorkerConfig

if TYPE_CHECKING:
    from oarlock.workers.protocol import StepMetadata  # imports numpy, which no module before the ranks imports


_LARGEST_BUCKET = 512  # sequences; computing a larger step takes longer than launching it operation by operation
# tokens; computing a larger step takes longer than launching it, and padding costs more than launches
_LARGEST_PROMPTS = 512
MOST_PROMPTS = 16  # queries longer than one token in a step that a graph runs: each may need a separate tile
_ROWS_AT_ONCE = 128  # rows of logits in steps without a graph; scoring a prompt may need thousands of them


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """Return the sizes in ascending order: 1, 2, 4, 8, 16, then every 8th up to 64, then every 16th, and
    `max_num_seqs`."""
    sizes = [1, 2, 4, 8, *range(16, 64, 8), *range(64, max_num_seqs, 16)]
    return [size for size in sizes if size < max_num_seqs] + [max_num_seqs]


def graph_sizes(config: WorkerConfig) -> list[int]:
    """Return the numbers of sequences for which a rank captures graphs, in ascending order."""
    return bucket_sizes(min(config.max_num_seqs, _LARGEST_BUCKET))


def prompt_sizes(config: WorkerConfig) -> list[int]:
    """Return the numbers of tokens of steps with prompts for which a rank captures graphs, in ascending order.

    The list is empty if rows must have the same bits in every batch: spans of keys are fixed then, and the longest
    sequence would need most of a graph's programs.
    """
    if config.batch_invariant:
        return []
    assert config.max_model_len is not None, "preflight resolves the context length"
    most = min(_LARGEST_PROMPTS, config.max_num_batched_tokens, config.max_model_len)
    sizes = [16, *range(32, 256, 32), *range(256, most, 64)]
    return [size for size in sizes if size < most] + [most]


def logits_rows_at_once(config: WorkerConfig) -> int:
    """Return the rows of logits for which a rank on a CUDA device has memory: at least the rows of the largest
    graph."""
    rows = max(config.max_num_seqs, config.max_num_batched_tokens)
    return min(rows, max(_ROWS_AT_ONCE, graph_sizes(config)[-1]))


def bucket_of(step: StepMetadata, sizes: Sequence[int]) -> int | None:
    """Return the smallest of `sizes` that holds `step`, or None if the step is too large or is not a plain decode.

    A plain decode has one token and one row of logits for each sequence, and no drafts. A prompt's last token is a
    plain decode too, unless its hidden state is pooled.
    """
    rows = step.num_seqs
    if not (rows == step.num_tokens == len(step.logits_indices)) or len(step.num_drafts) or rows > sizes[-1]:
        return None
    return sizes[bisect_left(sizes, rows)]


def prompt_bucket_of(step: StepMetadata, sizes: Sequence[int]) -> int | None:
    """Return the smallest of `sizes` that holds all tokens of `step`.

    Returns None if no size does, or if the step has more prompts than a graph has tiles for.
    """
    starts = step.query_start_loc
    if not sizes or step.num_tokens > sizes[-1] or int((starts[1:] - starts[:-1] > 1).sum()) > MOST_PROMPTS:
        return None
    return sizes[bisect_left(sizes, step.num_tokens)]
