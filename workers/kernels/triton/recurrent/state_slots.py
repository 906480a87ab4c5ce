"""Slots of recurrent state in kernels: a step of one sequence is cut at the lengths whose state is saved.

All of this is read on the device from a `StateStep`, so a captured launch serves any step of the same shape. A slot
that is read is not written in the same step, so programs need no order. Only padding sequences may have no tokens.
Graphs of prompts have hundreds of these, which are not worth a copy of a state.
"""

import triton
import triton.language as tl


@triton.jit
def segment(number, last, first_token, stop_token, write, save_lens, save_slots):
    """Return the end of segment `number` of a sequence, in tokens, and the slot for the state there.

    The first segments end where the state is saved, in ascending order. Segment `last` ends with the sequence.
    """
    is_save = number < last
    end = tl.where(is_save, first_token + tl.load(save_lens + number, mask=is_save, other=0), stop_token)
    slot = tl.where(is_save, tl.load(save_slots + number, mask=is_save, other=0), write)
    return end, slot.to(tl.int64)
