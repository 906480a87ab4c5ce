"""The block tables of one rank: which KV block holds each position of the sequence in each of the engine's rows.

Steps carry the entries that change. The entries of a row are all written by the step in which a sequence gets the row,
and what a row holds beyond its sequence's blocks is never read: so every entry that is read is a function of the steps
since then. One row more than the engine has holds the null block alone, for sequences that are padding.
"""

import numpy as np
import torch

from oarlock.workers.protocol import NULL_BLOCK, StepMetadata


class BlockTables:
    """Block tables on the device: `tables`, int32 [rows + 1, B], stays the same tensor; `write` changes entries."""

    def __init__(self, num_rows: int, width: int, device: torch.device) -> None:
        self.tables = torch.full((num_rows + 1, width), NULL_BLOCK, dtype=torch.int32, device=device)
        self.null_row = num_rows
        self.null_place = num_rows * width  # of its first element, see `places`
        self._host = self.tables.numpy() if device.type == "cpu" else None

    @staticmethod
    def of_step(step: StepMetadata, device: torch.device) -> "BlockTables":
        """Tables as small as `step` needs, for a step that writes all that it reads."""
        made = BlockTables(int(step.table_rows.max()) + 1, int(step.table_columns.max()) + 1, device)
        made.write(step)
        return made

    def write(self, step: StepMetadata) -> None:
        """Write the entries that change with `step`, before it reads any. Waits for no device."""
        if not len(step.table_blocks):
            return
        if self._host is not None:
            self._host[step.table_rows, step.table_columns] = step.table_blocks
            return
        device, places = self.tables.device, self.places(step)
        blocks = torch.from_numpy(step.table_blocks).to(device, non_blocking=True)
        self.tables.view(-1).index_copy_(0, torch.from_numpy(places).to(device, non_blocking=True), blocks)

    def places(self, step: StepMetadata) -> np.ndarray:
        """Indices of the elements of `tables`, taken as one row, that change with `step`: int64 [N]."""
        return step.table_rows.astype(np.int64) * self.tables.shape[1] + step.table_columns
