"""Recurrent state of ranks without a model: each slot holds the history of the tokens that led to it, and their number.

A step that reads the slot of another sequence, of another length, of a refused step, or one that is written in the same
step, fails here at once.
"""

import numpy as np

from oarlock.engine.kv_cache.state_slots import NULL_SLOT
from oarlock.workers.protocol import StepMetadata
from tests.unit.engine.pooling_fakes import ROOT, chain

_SPOILED = (-1, -1)


class FakeStates:
    """Slots of one rank. A state is (history, number of tokens)."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._states = {NULL_SLOT: (ROOT, 0)}
        self.num_saved = self.num_resumed = 0  # states saved as checkpoints; sequences that started from one
        self._saved: set[int] = set()  # slots with a checkpoint that nothing was written to since

    def check(self, step: StepMetadata) -> None:
        """Check the slots of a step by themselves."""
        reads, writes, saves = step.state_reads.tolist(), step.state_writes.tolist(), step.state_saves.tolist()
        assert len(reads) == len(writes) == step.num_seqs
        written = writes + [slot for _, _, slot in saves]
        assert len({*written}) == len(written), "a slot is written twice"
        assert not {*reads} & {*written}, "a slot that is read is written in the same step"
        assert all(NULL_SLOT < slot < self._num_slots for slot in written)
        assert all(0 <= slot < self._num_slots for slot in reads)
        places = [(index, count) for index, count, _ in saves]
        assert sorted({*places}) == places, "saves are not in order"
        counts = np.diff(step.query_start_loc).tolist()
        assert all(1 <= count <= counts[index] for index, count in places), "a state is saved that no token leads to"

    def run(self, step: StepMetadata) -> list[int]:
        """Return the history up to and including each token, and write the states that they lead to."""
        ends, saves, histories = step.query_start_loc.tolist(), step.state_saves.tolist(), []
        for s, (read, write) in enumerate(zip(step.state_reads.tolist(), step.state_writes.tolist(), strict=True)):
            start = int(step.positions[ends[s]])
            history, length = self._states.get(read, _SPOILED)
            assert length == start, f"slot {read} has the state after {length} tokens instead of {start}"
            self.num_resumed += read in self._saved
            own = []
            for position, token in enumerate(step.token_ids[ends[s] : ends[s + 1]].tolist(), start):
                history = chain(history, token, position)
                own.append(history)
            self._write(write, own, start, len(own))
            for _, count, slot in [save for save in saves if save[0] == s]:
                self._write(slot, own, start, count)
                self._saved.add(slot)
            histories += own
        self.num_saved += len(saves)
        return histories

    def spoil(self, step: StepMetadata) -> None:
        """Spoil everything that a refused step may have written."""
        for slot in [*step.state_writes.tolist(), *step.state_saves[:, 2].tolist()]:
            self._states[slot] = _SPOILED
            self._saved.discard(slot)

    def _write(self, slot: int, histories: list[int], start: int, count: int) -> None:
        self._states[slot] = histories[count - 1], start + count
        self._saved.discard(slot)
