"""Slots of recurrent state on one rank, and the part of a step that names them.

S  sequences in the step      V  saved states      C  slots
"""

from dataclasses import dataclass

from torch import Tensor

NULL_SLOT = 0  # holds zeros, the state before the first token; it is never written


@dataclass(frozen=True, slots=True)
class LayerStates:
    """States of one layer: a tensor [C + 1, ...] for each part of its `SlotsSpec`, in the same order.

    Slot 0 is `NULL_SLOT`. The last slot, which the engine does not know, takes the states of padding sequences.
    """

    parts: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class StateStep:
    """Slots that the sequences of a step read and write. A slot that is read is not written in the same step.

    Sequence s has the tokens `starts[s]` to `starts[s + 1]`. It starts from the state in slot `reads[s]` and leaves its
    new state in slot `writes[s]`. Its saves are the entries `save_starts[s]` to `save_starts[s + 1]`: the state after
    its first `save_lens[v]` tokens of the step goes to slot `save_slots[v]`, in ascending order of these lengths.
    """

    starts: Tensor  # int32 [S + 1]
    reads: Tensor  # int32 [S]
    writes: Tensor  # int32 [S]
    save_starts: Tensor  # int32 [S + 1]
    save_lens: Tensor  # int32 [V]
    save_slots: Tensor  # int32 [V]
