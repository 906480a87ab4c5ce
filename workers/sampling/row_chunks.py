"""Rows of logits in chunks: the part of a step for each chunk, and one output for all chunks.

Knows the layout of steps and outputs. Does not know tensors.
"""

from dataclasses import replace

import numpy as np

from oarlock.workers.protocol import StepMetadata, StepOutput
from oarlock.workers.sampling_parameters import PENALTY_NAMES, ROW_NAMES


def logits_rows(step: StepMetadata, start: int, stop: int) -> StepMetadata:
    """Return a step with only the logits rows `start` to `stop`. The histories that it writes before sampling stay
    whole."""
    if start == 0 and stop == len(step.logits_indices):
        return step
    names = ("logits_indices", "target_ids", "sample_positions", *ROW_NAMES, "seeds", "num_logprobs")
    cut = {name: getattr(step, name)[start:stop] for name in names}
    first, last = np.searchsorted(step.bias_rows, (start, stop))
    first_penalty, last_penalty = np.searchsorted(step.penalty_rows, (start, stop))
    first_mask, last_mask = np.searchsorted(step.mask_rows, (start, stop))
    return replace(
        step,
        **cut,
        bias_rows=step.bias_rows[first:last] - start,
        bias_ids=step.bias_ids[first:last],
        bias_values=step.bias_values[first:last],
        penalty_rows=step.penalty_rows[first_penalty:last_penalty] - start,
        **{name: getattr(step, name)[first_penalty:last_penalty] for name in PENALTY_NAMES},
        mask_rows=step.mask_rows[first_mask:last_mask] - start,
        mask_bits=step.mask_bits[first_mask:last_mask],
    )


def empty_output(step_id: int) -> StepOutput:
    """Return the output of a step without rows of logits."""
    return StepOutput(step_id=step_id, token_ids=np.empty(0, np.int32), finite=np.empty(0, np.uint8))


def concatenate_outputs(parts: list[StepOutput]) -> StepOutput:
    """Return one output for consecutive chunks of rows. Chunks with fewer top logprobs are padded with id -1."""
    if len(parts) == 1:
        return parts[0]
    width = max(-1 if part.top_ids is None else part.top_ids.shape[1] for part in parts)
    token_ids = np.concatenate([part.token_ids for part in parts])
    finite = np.concatenate([part.finite for part in parts])
    if width < 0:
        return StepOutput(parts[0].step_id, token_ids, finite)
    rows = len(token_ids)
    logprobs = np.zeros(rows, np.float32)
    ranks = np.zeros(rows, np.int32)
    top_ids = np.full((rows, width), -1, np.int32)
    top_logprobs = np.full((rows, width), -np.inf, np.float32)
    start = 0
    for part in parts:
        here = slice(start, start + len(part.token_ids))
        start = here.stop
        if part.logprobs is None or part.ranks is None or part.top_ids is None or part.top_logprobs is None:
            continue  # no row of this chunk has logprobs
        columns = part.top_ids.shape[1]
        logprobs[here], ranks[here] = part.logprobs, part.ranks
        top_ids[here, :columns], top_logprobs[here, :columns] = part.top_ids, part.top_logprobs
    return StepOutput(parts[0].step_id, token_ids, finite, logprobs, ranks, top_ids, top_logprobs)
