"""Steps of recurrent layers without an engine."""

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import torch

from oarlock.workers.attention.backend import LayerStep
from oarlock.workers.recurrent.states import LayerStates, StateStep


def state_step_of(
    lens: Sequence[int], reads: Sequence[int], writes: Sequence[int], saves: Sequence[tuple[int, int, int]] = ()
) -> StateStep:
    """Return the step of sequences with these numbers of tokens. `saves` (sequence, its tokens, slot), in order."""
    starts = [0, *torch.tensor(lens).cumsum(0).tolist()]
    firsts = [sum(seq < s for seq, _, _ in saves) for s in range(len(lens) + 1)]
    arrays = (starts, reads, writes, firsts, [save[1] for save in saves], [save[2] for save in saves])
    return StateStep(*(torch.tensor(array, dtype=torch.int32) for array in arrays))


def layer_step_of(
    states: LayerStates, starts: list[int], slots: list[tuple[int, int]], saves: list[tuple[int, int]]
) -> LayerStep:
    """Return a step of sequences that begin at `starts`. `slots`: read and write of each. `saves` (length, slot) are of
    the first."""
    lens = [after - before for before, after in pairwise(starts)]
    reads, writes = zip(*slots, strict=True)
    step = state_step_of(lens, reads, writes, [(0, length, slot) for length, slot in saves])
    batch: Any = SimpleNamespace(state=step)
    return LayerStep(None, batch, None, None, None, states=states)
