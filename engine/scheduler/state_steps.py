"""Slots of recurrent state of the running sequences as arrays by row, and the slots that each step reads and writes.

A step takes a few operations on whole arrays. Only a sequence that saves a checkpoint is handled individually: at the
lengths that were planned when its prompt was admitted, and at the ends of blocks while it decodes.

Knows sequences, positions and slots. Does not know policy, blocks or tensors.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Outputs

import numpy as np

from oarlock.engine.kv_cache.manager import hash_at
from oarlock.engine.kv_cache.state_slots import NULL_SLOT, StateSlots
from oarlock.engine.scheduler.decode_state import DecodeState
from oarlock.engine.scheduler.sequence import (
    ModelRunnerOutput,
    SchedulerOutput,
    Sequence,
    StateSave,
    Status,
    StepStates,
)


class StateRows:
    """Slots by row of the engine's tables.

    A row has a slot to read, and two slots of its own that are written in turn. Before its first step the slot to read
    is the checkpoint from which it starts, or the null slot; then it is the slot that the previous step wrote.
    """

    def __init__(
        self, slots: StateSlots, num_rows: int, block_size: int, *, saves_checkpoints: bool, has_stages: bool
    ) -> None:
        self.slots = slots
        self._block_size = block_size
        self._saves_checkpoints = saves_checkpoints
        self._has_stages = has_stages  # pipeline stages
        self._reads = np.zeros(num_rows, np.int32)
        self._writes = np.zeros(num_rows, np.int32)
        self._others = np.zeros(num_rows, np.int32)  # the other slot of the sequence: the one to read, once it started

    def take(self, seq: Sequence) -> None:
        """Fill the row of `seq`, which has just got its row and slots."""
        assert seq.slots is not None
        self._reads[seq.row], self._writes[seq.row], self._others[seq.row] = seq.slots

    def has_started(self, seq: Sequence) -> bool:
        """Return whether the first step of `seq`, which runs, was scheduled."""
        return bool(self._reads[seq.row] == self._others[seq.row])

    def release(self, seq: Sequence) -> None:
        """Give back the slots of `seq`, which stops running and still has its row."""
        assert seq.slots is not None
        self.slots.give_back(seq.slots, has_started=self.has_started(seq))
        self.slots.expect_no_more(seq.checkpoints_at, list(seq.checkpoints_at))
        seq.slots = seq.rolling_checkpoint = None

    # -- one step

    def schedule(self, output: SchedulerOutput) -> None:
        """Choose the slots of `output`, whose sequences are final. Their next step reads what this step writes."""
        output.scheduled = [item for item in output.scheduled if item.seq.status is Status.RUNNING]
        if not output.num_seqs:
            return
        rows = _rows(output)
        reads, writes, others = self._reads[rows], self._writes[rows], self._others[rows]
        for slot in reads[reads != others].tolist():
            if slot != NULL_SLOT:
                self.slots.start(slot)
        self._reads[rows], self._writes[rows], self._others[rows] = writes, others, writes
        output.states = StepStates(reads, writes, [])
        if self._saves_checkpoints:
            output.states.saves.extend(self._rolling_saves(output))
            output.states.saves.extend(self._planned_saves(output))

    def _rolling_saves(self, output: SchedulerOutput) -> Iterator[StateSave]:
        """Save the states of decodes that fill a block. Their tokens need not be known yet."""
        ends = output.decodes.positions + 1
        indices = (ends % self._block_size == 0).nonzero()[0]
        for index, row, end in zip(
            *(some.tolist() for some in (indices, output.decodes.rows[indices], ends[indices])), strict=True
        ):
            seq = output.decodes.seqs[row]
            assert seq is not None
            slot = self.slots.allocate_save(seq.rolling_checkpoint)
            if slot is not None:
                yield StateSave(index, 1, slot, seq, end // self._block_size, is_rolling=True)

    def _planned_saves(self, output: SchedulerOutput) -> list[StateSave]:
        """Save the states of prompts at their planned lengths, the last lengths first if slots are short."""
        saves = []
        for index, item in reversed([*enumerate(output.scheduled, len(output.decodes.rows))]):
            seq, end = item.seq, item.start + item.num_tokens
            for length, block_hash in reversed([*seq.checkpoints_at.items()]):
                if not item.start < length <= end:
                    continue
                if self.slots.has(block_hash) or (slot := self.slots.allocate_save()) is None:
                    self.slots.expect_no_more(seq.checkpoints_at, [length])
                    continue
                num_blocks = length // self._block_size
                saves.append(StateSave(index, length - item.start, slot, seq, num_blocks, is_rolling=False))
        return saves[::-1]

    def name_saves(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Name the checkpoints that `output` has written, unless their sequence no longer runs or has failed."""
        if output.states is None or not output.states.saves:
            return
        logits: list[tuple[int, int]] = []  # rows of each sequence
        if not result.all_finite:
            logits += [(index, index + 1) for index in range(len(output.decodes.rows))]
            logits += [(first, end) for _, first, end in output.with_rows()]
        for save in output.states.saves:
            seq = save.seq
            is_finite = result.all_finite or result.are_finite(*logits[save.index])
            if seq.status is not Status.RUNNING or not is_finite:
                self.slots.drop(save.slot)
                continue
            block_hash = hash_at(seq, save.num_blocks - 1, self._block_size)
            self.slots.name(save.slot, block_hash, is_rolling=save.is_rolling)
            if save.is_rolling:
                seq.rolling_checkpoint = block_hash
            else:
                self.slots.expect_no_more(seq.checkpoints_at, [save.num_blocks * self._block_size])

    # -- steps that do not run as scheduled

    def undo(self, outputs: Outputs[SchedulerOutput], state: DecodeState) -> list[Sequence]:
        """Return the sequences of `outputs`, which are all steps in flight and were refused, to their slots before.

        Return the running sequences whose state before is lost, so that they must give up their slots: the checkpoint
        of their first step may be overwritten since. So may be a slot that a later step writes, if there are several
        pipeline stages: the first stages run a step that a later stage refuses, and the steps after it.
        """
        restarts: dict[Sequence, None] = {}
        written = np.empty(0, np.int32)  # by later steps
        for output in reversed(outputs):
            if output.states is None:
                continue
            self._drop(output.states.saves)
            runs = state.still_run(output.decodes.rows, output.decodes.num_released)
            runs = np.append(runs, [item.seq.status is Status.RUNNING for item in output.scheduled]).astype(bool)
            rows, reads, writes = _rows(output)[runs], output.states.reads[runs], output.states.writes[runs]
            is_kept = (reads == self._writes[rows]) | (reads == self._others[rows])
            if self._has_stages:
                is_kept &= ~np.isin(reads, written)
                written = np.append(written, output.states.writes)
            restarts |= {seq: None for row in rows[~is_kept].tolist() if (seq := state.seqs[row]) is not None}
            rows, reads, writes = rows[is_kept], reads[is_kept], writes[is_kept]
            self._reads[rows], self._writes[rows], self._others[rows] = reads, writes, reads
        return list(restarts)

    def keep(self, output: SchedulerOutput, kept: list[int]) -> None:
        """Remove all sequences but `kept`, indices into the step, from the slots of `output`, which is not sent yet."""
        states = output.states
        if states is None:
            return
        new_index = {index: place for place, index in enumerate(kept)}
        self._drop(save for save in states.saves if save.index not in new_index)
        saves = [save._replace(index=new_index[save.index]) for save in states.saves if save.index in new_index]
        output.states = StepStates(states.reads[kept], states.writes[kept], saves)

    def _drop(self, saves: Iterable[StateSave]) -> None:
        for save in saves:
            self.slots.drop(save.slot)

    def audit(self, running: list[Sequence]) -> None:
        """Raise AssertionError if arrays, sequences and slots disagree."""
        holders = []
        for seq in running:
            assert seq.slots is not None, "a sequence runs without slots"
            row, (start, *own) = seq.row, seq.slots
            started = self.has_started(seq)
            assert sorted((self._writes[row], self._others[row])) == sorted(own), f"row {row} has slots of another"
            assert started or self._reads[row] == start, f"row {row} starts from another slot"
            holders.append((seq.slots, started))
        self.slots.audit(holders)
        expected = Counter(name for seq in running for name in seq.checkpoints_at.values())
        assert expected == self.slots.expected, "a checkpoint is expected that no sequence will leave"


def _rows(output: SchedulerOutput) -> np.ndarray:
    """Return the rows of the sequences of `output` in their order in the step, int64 [S]."""
    if not output.scheduled:
        return output.decodes.rows
    return np.append(output.decodes.rows, [item.seq.row for item in output.scheduled])
