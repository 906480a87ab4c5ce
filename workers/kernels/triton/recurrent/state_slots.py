"""Slots of recurrent state in kernels: a step of one sequence is cut at the lengths whose state is saved.

All of this is read on the device from a `StateStep`, so a captured launch serves any step of the same shape. A slot
that is read is not written in the same step, so programs need no order.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from oarlock.workers.recurrent.states import StateStep


class StepSlots(NamedTuple):
    """Tensors of a `StateStep` in the order of the kernels' arguments."""

    starts: Tensor
    reads: Tensor
    writes: Tensor
    save_starts: Tensor
    save_lens: Tensor
    save_slots: Tensor

    @staticmethod
    def of(step: StateStep) -> "StepSlots":
        return StepSlots(step.starts, step.reads, step.writes, step.save_starts, step.save_lens, step.save_slots)


def rows_of(x: Tensor) -> Tensor:
    """Return `x` [T, ...], copied if a row's elements are not next to each other. Rows may be any distance apart."""
    stride = 1
    for size, found in zip(reversed(x.shape[1:]), reversed(x.stride()[1:]), strict=True):
        if size > 1 and found != stride:
            return x.contiguous()
        stride *= size
    return x


@triton.jit
def segment(number, last, first_token, stop_token, write, save_lens, save_slots):
    """Return the end of segment `number` of a sequence, in tokens, and the slot for the state there.

    The first segments end where the state is saved, in ascending order. Segment `last` ends with the sequence.
    """
    is_save = number < last
    end = tl.where(is_save, first_token + tl.load(save_lens + number, mask=is_save, other=0), stop_token)
    slot = tl.where(is_save, tl.load(save_slots + number, mask=is_save, other=0), write)
    return end, slot.to(tl.int64)
