"""One step on the device: the arrays of `StepMetadata` as tensors, and the values that backends need on the host.

T  query tokens      S  sequences      R  rows of block tables      B  their columns      L  logits rows
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.protocol import NULL_BLOCK, StepMetadata


class BlockTables:
    """Block tables on the device: `tables`, int32 [rows + 1, B], stays the same tensor; `write` changes entries.

    An entry is the KV block that holds some positions of the sequence in one of the engine's rows. Steps carry only the
    entries that change. The step in which a sequence gets a row writes all entries of the row, and entries beyond the
    sequence's blocks are never read, so every entry that is read follows from the steps since then. One additional row
    holds only the null block, for padding sequences.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device) -> None:
        self.tables = torch.full((num_rows + 1, width), NULL_BLOCK, dtype=torch.int32, device=device)
        self.null_row = num_rows
        self.null_index = num_rows * width  # index of the null row's first element, see `table_indices`
        self._host = self.tables.numpy() if device.type == "cpu" else None

    @staticmethod
    def of_step(step: StepMetadata, device: torch.device) -> "BlockTables":
        """Return tables as small as possible for `step`, if it writes all entries that it reads."""
        made = BlockTables(int(step.table_rows.max()) + 1, int(step.table_columns.max()) + 1, device)
        made.write(step)
        return made

    def write(self, step: StepMetadata) -> None:
        """Write the entries that change with `step`, before the step reads any. Does not wait for a device."""
        if not len(step.table_blocks):
            return
        if self._host is not None:
            self._host[step.table_rows, step.table_columns] = step.table_blocks
            return
        device, indices = self.tables.device, self.table_indices(step)
        blocks = torch.from_numpy(step.table_blocks).to(device, non_blocking=True)
        self.tables.view(-1).index_copy_(0, torch.from_numpy(indices).to(device, non_blocking=True), blocks)

    def table_indices(self, step: StepMetadata) -> np.ndarray:
        """Return the indices of the entries that change with `step` in the flattened `tables`: int64 [N]."""
        return step.table_rows.astype(np.int64) * self.tables.shape[1] + step.table_columns


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
    rows: Tensor  # int32 [S]   rows of `block_tables`
    block_tables: Tensor  # int32 [R, B]   the rank's tables, not a copy
    logits_indices: Tensor  # int64 [L]

    @property
    def num_seqs(self) -> int:
        return len(self.query_lens)

    @staticmethod
    def from_step(step: StepMetadata, tables: BlockTables) -> "ForwardBatch":
        """Copy a step to the device of `tables`, which must hold the step's entries.

        On the CPU, arrays that need no widening stay views of the step's buffer; the memory of the widened arrays is
        reused together with the step's buffer.
        """
        device, starts = tables.tables.device, step.query_start_loc
        if device.type == "cpu":
            tensors = step.made_once(_HostInputs).of(step)
        else:
            arrays = {name: getattr(step, name) for name in _AS_THEY_ARE}
            arrays |= {name: getattr(step, name).astype(np.int64) for name in _WIDENED}
            tensors = {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in arrays.items()}
        return ForwardBatch(
            num_tokens=len(step.token_ids),
            num_logits=len(step.logits_indices),
            query_lens=(starts[1:] - starts[:-1]).tolist(),
            context_lens=step.seq_lens.tolist(),
            block_tables=tables.tables,
            **tensors,
        )


_AS_THEY_ARE = ("slot_mapping", "query_start_loc", "seq_lens", "rows")
_WIDENED = ("token_ids", "positions", "logits_indices")


class _HostInputs:
    """Tensors of a step in host memory: views of its arrays, and int64 copies."""

    def __init__(self, step: StepMetadata) -> None:
        self._tensors = {name: torch.from_numpy(getattr(step, name)) for name in _AS_THEY_ARE}
        self._wide = {name: np.empty(len(getattr(step, name)), np.int64) for name in _WIDENED}
        self._tensors |= {name: torch.from_numpy(array) for name, array in self._wide.items()}

    def of(self, step: StepMetadata) -> dict[str, Tensor]:
        """Return the tensors by name, with the current values of the arrays. Valid until the next call."""
        for name, array in self._wide.items():
            array[...] = getattr(step, name)
        return self._tensors


def with_sampled(token_ids: Tensor, sampled: Tensor) -> Tensor:
    """Return `token_ids` int64 [T] with each -1 - r replaced by entry r of `sampled`, integers [R]. Waits for no
    device."""
    return torch.where(token_ids < 0, sampled[(-1 - token_ids).clamp(min=0)], token_ids)
