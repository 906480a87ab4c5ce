"""One step on the device: the arrays of `StepMetadata` as tensors, and the numbers that backends need on the host.

T  query tokens      S  sequences      R  rows of block tables      B  their columns      L  logits rows
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.attention.block_tables import BlockTables
from oarlock.workers.protocol import StepMetadata


@dataclass(slots=True)
class ForwardBatch:
    """Inputs of one forward pass."""

    num_tokens: int
    num_logits: int
    query_lens: list[int]  # [S]   host
    context_lens: list[int]  # [S]   host: tokens in the KV cache after this step
    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slot_mapping: Tensor  # int64 [T]
    query_start_loc: Tensor  # int32 [S + 1]
    seq_lens: Tensor  # int32 [S]
    rows: Tensor  # int32 [S]   of `block_tables`
    block_tables: Tensor  # int32 [R, B]   the rank's own, not a copy
    logits_indices: Tensor  # int64 [L]

    @property
    def num_seqs(self) -> int:
        return len(self.query_lens)

    @staticmethod
    def from_step(step: StepMetadata, tables: BlockTables) -> "ForwardBatch":
        """Copy a step to the device of `tables`, whose entries for it must be written. On the CPU, arrays that need no
        widening stay views of the step's buffer."""
        device = tables.tables.device

        def widened(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(device, non_blocking=True)

        def moved(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device, non_blocking=True)

        starts = step.query_start_loc.tolist()
        return ForwardBatch(
            num_tokens=step.num_tokens,
            num_logits=len(step.logits_indices),
            query_lens=[end - start for start, end in pairwise(starts)],
            context_lens=step.seq_lens.tolist(),
            token_ids=widened(step.token_ids),
            positions=widened(step.positions),
            slot_mapping=widened(step.slot_mapping),
            query_start_loc=moved(step.query_start_loc),
            seq_lens=moved(step.seq_lens),
            rows=moved(step.rows),
            block_tables=tables.tables,
            logits_indices=widened(step.logits_indices),
        )
