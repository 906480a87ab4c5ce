"""One step on the device: the arrays of `StepMetadata` as tensors, and the values that backends need on the host.

T  query tokens      S  sequences      R  rows of block tables      B  their columns      L  logits rows
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.attention.rows_by_slot import AdaptedRows, adapted_rows
from oarlock.workers.protocol import NULL_BLOCK, StepMetadata
from oarlock.workers.recurrent.states import StateStep


class BlockTables:
    """Block tables of all groups of pages on the device: `tables`, int32 [groups, rows + 1, B], stays the same tensor;
    `write` changes entries.

    An entry is the KV block that holds some positions of the sequence in one of the engine's rows. Steps carry only the
    entries that change. The step in which a sequence gets a row writes all entries of the row, and entries beyond the
    sequence's blocks are never read, so every entry that is read follows from the steps since then. One additional row
    holds only the null block, for padding sequences. The host has the same entries, from which slots are computed.
    """

    def __init__(
        self, num_rows: int, width: int, block_size: int, device: torch.device, groups: Sequence[int] = (0,)
    ) -> None:
        """Allocate the tables. `groups`: numbers of the groups of pages, in ascending order; there may be none."""
        shape = (max(1, len(groups)), num_rows + 1, width)
        self.tables = torch.full(shape, NULL_BLOCK, dtype=torch.int32, device=device)
        self.of_group = dict(zip(groups, self.tables, strict=False))  # int32 [rows + 1, B] each
        self.groups, self.block_size = tuple(groups), block_size
        self.null_row = num_rows
        self.null_index = num_rows * width  # index of a null row's first element, see `table_indices`
        on_host = self.tables if device.type == "cpu" else torch.full(shape, NULL_BLOCK, dtype=torch.int32)
        self._host = on_host.numpy()
        # Index of each group's tables; None: all entries belong to the only group.
        self._place = None
        if len(groups) > 1:
            self._place = np.zeros(max(groups) + 1, np.int64)
            self._place[list(groups)] = np.arange(len(groups))

    @staticmethod
    def of_step(
        step: StepMetadata, block_size: int, device: torch.device, groups: Sequence[int] = (0,)
    ) -> "BlockTables":
        """Return tables as small as possible for `step`, if it writes all entries that it reads."""
        rows, columns = step.table_rows.max(initial=0), step.table_columns.max(initial=0)
        made = BlockTables(int(rows) + 1, int(columns) + 1, block_size, device, groups)
        made.write(step)
        return made

    def write(self, step: StepMetadata) -> None:
        """Write the entries that change with `step`, before the step reads any. Does not wait for a device."""
        if not len(step.table_blocks):
            return
        self.write_on_host(step)
        if self.tables.device.type != "cpu":
            device, indices = self.tables.device, self.table_indices(step)
            blocks = torch.from_numpy(step.table_blocks).to(device, non_blocking=True)
            self.tables.view(-1).index_copy_(0, torch.from_numpy(indices).to(device, non_blocking=True), blocks)

    def write_on_host(self, step: StepMetadata) -> None:
        """Write the entries that change with `step` to the host's tables."""
        groups = 0 if self._place is None else self._place[step.table_groups]
        self._host[groups, step.table_rows, step.table_columns] = step.table_blocks

    def table_indices(self, step: StepMetadata) -> np.ndarray:
        """Return the indices of the entries that change with `step` in the flattened `tables`: int64 [N]."""
        _, rows, width = self.tables.shape
        indices = step.table_rows.astype(np.int64) * width + step.table_columns
        return indices if self._place is None else indices + self._place[step.table_groups] * (rows * width)

    def slots(self, step: StepMetadata, out: np.ndarray) -> None:
        """Write the slots of the step's tokens to `out` int64 [groups, T]: block id * block size + offset.

        The entries that change with the step must be written already.
        """
        size, rows, starts = self.block_size, step.rows, step.query_start_loc
        if len(step.token_ids) != len(rows):
            rows = rows.repeat(starts[1:] - starts[:-1])  # [T]
        columns = step.positions // size
        offsets = step.positions - columns * size
        for tables, slots in zip(self._host, out, strict=False):
            slots[...] = tables[rows, columns] * np.int64(size) + offsets


@dataclass(slots=True)
class ForwardBatch:
    """Inputs of one forward pass."""

    num_tokens: int
    num_logits: int
    query_lens: list[int]  # [S]   host
    context_lens: list[int]  # [S]   host: tokens in the KV cache after this step
    token_ids: Tensor  # int64 [T]
    positions: Tensor  # int64 [T]
    slots: dict[int, Tensor]  # int64 [T]   slots in the pages of each group of pages, by its number
    query_start_loc: Tensor  # int32 [S + 1]
    seq_lens: Tensor  # int32 [S]
    rows: Tensor  # int32 [S]   rows of `block_tables`
    block_tables: dict[int, Tensor]  # int32 [R, B]   the rank's tables of each group, not copies
    logits_indices: Tensor  # int64 [L]
    state: StateStep | None = None  # slots of recurrent state; None: the model has no recurrent layers
    adapters: AdaptedRows | None = None  # rows whose sequences have an adapter; None: no sequence has one

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
            tensors, slots = step.made_once(_HostInputs).of(step, tables)
        else:
            arrays = {name: getattr(step, name) for name in _AS_THEY_ARE}
            arrays |= {name: getattr(step, name).astype(np.int64) for name in _WIDENED}
            tensors = {name: torch.from_numpy(array).to(device, non_blocking=True) for name, array in arrays.items()}
            each = np.empty((len(tables.groups), len(step.token_ids)), np.int64)
            tables.slots(step, each)
            slots = dict(zip(tables.groups, torch.from_numpy(each).to(device, non_blocking=True), strict=True))
        return ForwardBatch(
            num_tokens=len(step.token_ids),
            num_logits=len(step.logits_indices),
            query_lens=(starts[1:] - starts[:-1]).tolist(),
            context_lens=step.seq_lens.tolist(),
            slots=slots,
            block_tables=tables.of_group,
            state=state_step(step, device) if len(step.state_writes) else None,
            adapters=adapted_rows(step.adapter_slots_of_tokens, device) if len(step.adapter_slots) else None,
            **tensors,
        )


_AS_THEY_ARE = ("query_start_loc", "seq_lens", "rows")
_WIDENED = ("token_ids", "positions", "logits_indices")


class _HostInputs:
    """Tensors of a step in host memory: views of its arrays, and int64 copies."""

    def __init__(self, step: StepMetadata) -> None:
        self._tensors = {name: torch.from_numpy(getattr(step, name)) for name in _AS_THEY_ARE}
        self._wide = {name: np.empty(len(getattr(step, name)), np.int64) for name in _WIDENED}
        self._tensors |= {name: torch.from_numpy(array) for name, array in self._wide.items()}
        self._slots: tuple[np.ndarray, dict[int, Tensor]] | None = None  # int64 [groups, T]; [T] of each group

    def of(self, step: StepMetadata, tables: BlockTables) -> tuple[dict[str, Tensor], dict[int, Tensor]]:
        """Return the tensors by name and the slots by group, with the current values of the arrays. Valid until the
        next call."""
        for name, array in self._wide.items():
            array[...] = getattr(step, name)
        if self._slots is None:
            slots = np.empty((len(tables.groups), len(step.token_ids)), np.int64)
            self._slots = slots, dict(zip(tables.groups, torch.from_numpy(slots), strict=True))
        slots, of_group = self._slots
        tables.slots(step, slots)
        return self._tensors, of_group


def state_step(step: StepMetadata, device: torch.device) -> StateStep:
    """Return the slots of recurrent state that `step` reads and writes, on `device`."""
    if device.type == "cpu":
        return step.made_once(_HostStates).of(step)
    own = _HostStates(step).of(step)
    return StateStep(*(getattr(own, each.name).to(device, non_blocking=True) for each in fields(own)))


class _HostStates:
    """Slots of a step in host memory: views of its arrays, and copies of the columns of its saves."""

    def __init__(self, step: StepMetadata) -> None:
        self._starts = np.zeros(step.num_seqs + 1, np.int32)
        self._saves = np.empty((2, len(step.state_saves)), np.int32)  # lengths, slots
        arrays = (step.query_start_loc, step.state_reads, step.state_writes, self._starts, *self._saves)
        self._step = StateStep(*map(torch.from_numpy, arrays))

    def of(self, step: StepMetadata) -> StateStep:
        """Return the slots with the current values of the arrays. Valid until the next call."""
        saves = step.state_saves
        if len(saves):
            self._starts[...] = np.searchsorted(saves[:, 0], np.arange(len(self._starts)))
            self._saves[...] = saves[:, 1:].T
        return self._step


def with_sampled(token_ids: Tensor, sampled: Tensor) -> Tensor:
    """Return `token_ids` int64 [T] with each -1 - r replaced by entry r of `sampled`, integers [R]. Waits for no
    device."""
    return torch.where(token_ids < 0, sampled[(-1 - token_ids).clamp(min=0)], token_ids)
