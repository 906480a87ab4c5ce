"""Recurrent states of a class that transformers computes, in the slots of the step's sequences.

A step runs the class once, on a row [1, T] of all its sequences. Modules that keep states do not know where a sequence
of the row begins, so each of them (`make_stateful`) runs once for each piece of a sequence instead: on the piece's
tokens, with the states of the sequence. Linear layers and attention outside of these modules see the whole row, and so
do the linear layers of such a module that read its input: their weights are read once for all sequences.

Knows the methods of transformers' `Cache` that classes call. Does not know the classes.

T  tokens of the step      P  tokens of a piece      C  slots
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oarlock.workers.recurrent.states import NULL_SLOT, LayerStates, StateStep
from oarlock.workers.transformers_backend.class_description import StateCall


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens of one sequence in the row, after which its state is final or saved."""

    first: int  # index of the first token in the row
    end: int
    read: int  # slot of the state before the piece; `NULL_SLOT`: the sequence begins; `write`: the state is there
    write: int  # slot of the state after the piece
    save: int | None = None  # slot that gets a copy of the state after the piece


def pieces_of(step: StateStep) -> Iterator[Piece]:
    """Yield the pieces of all sequences in the order of the row. A sequence is cut behind each of its saves."""
    starts, reads, writes = step.starts.tolist(), step.reads.tolist(), step.writes.tolist()
    first_saves, lens, slots = step.save_starts.tolist(), step.save_lens.tolist(), step.save_slots.tolist()
    for s, (first, last) in enumerate(pairwise(starts)):
        at, read = first, reads[s]
        for save in range(first_saves[s], first_saves[s + 1]):
            end = first + lens[save]
            yield Piece(at, end, read, writes[s], slots[save])
            at, read = end, writes[s]
        if at < last:
            yield Piece(at, last, read, writes[s])


class MemoryWithoutKeys:
    """The answers of transformers' `Cache` about keys, if it has none: a class gets the same ones in the look at it and
    in a step, so no mask or position that it makes may follow from its memory."""

    is_compileable = False
    is_sliding = is_linear = is_dummy = ()  # of each layer: no class may choose its mask by the memory

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, *_: object) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, *_: object) -> tuple[int, int]:
        return query_length, 0

    def is_recording_past(self, *_: object) -> bool:
        return False


class SequenceStates(MemoryWithoutKeys):
    """The memory that a class gets as `past_key_values` or `cache_params`: no keys, and the states of one piece.

    Keys and values are in pages, which the attention function writes, so this memory answers like an empty one if a
    class asks for lengths; masks and positions do not follow from it. States are those before the current piece, and
    there are none if its sequence begins: classes begin with other values than zeros, for example with a bias.

    As in transformers, a state that the class gets is the stored one: classes change it in place without an update. It
    lies in the slot that the piece writes, where it is copied at its first use. A convolution's state holds as many
    inputs as it has taps, the latest last; a recurrent state has the dtype of its slot, and the class's results are
    converted to it.
    """

    def __init__(self, calls: Sequence[StateCall]) -> None:
        """Describe the states. `calls`: in the order of the parts of each layer's slots."""
        self._parts: dict[tuple[int, int, bool], int] = {}  # layer, number, whether it is a convolution's -> part
        counts: dict[int, int] = {}
        for call in calls:
            number = self._parts[call.layer, call.number, call.is_convolution] = counts.get(call.layer, 0)
            counts[call.layer] = number + 1
        self._layers: Mapping[int, LayerStates] = {}
        self._pieces: list[Piece] = []
        self._num_tokens = 0
        self._piece: Piece | None = None
        self._found: dict[tuple[int, int], Tensor] = {}  # layer, part -> its state [1, ...] in the piece's slot
        # Arguments that were cut for the piece: id of the cut -> the cut, which stays alive, and its row [1, T, ...].
        self._rows: dict[int, tuple[Tensor, Tensor]] = {}
        self._products: dict[tuple[nn.Module, int], Tensor] = {}  # linear layer, id of a row -> its result [1, T, ...]

    def begin_step(self, step: StateStep, layers: Mapping[int, LayerStates]) -> None:
        """Take the sequences of a step, before the class runs. `layers`: states of each layer that has any."""
        self._layers = layers
        self._pieces = list(pieces_of(step))
        self._num_tokens = self._pieces[-1].end

    def run(self, forward: Callable[..., Any], arguments: tuple, named: Mapping[str, Any]) -> Any:
        """Call `forward` for each piece of the step, with the tokens of the piece from all arguments; join the results.

        Arguments are cut if they are tensors [1, T, ...], [T] or [T, width], or hold such tensors; others are passed as
        they are. Results are tensors [1, P, ...] or [P, ...], or tuples of them.
        """
        if self._piece is not None:  # a stateful module inside of another
            return forward(*arguments, **named)
        try:
            results = [self._run_piece(piece, forward, arguments, named) for piece in self._pieces]
        finally:
            self._products.clear()
        return results[0] if len(results) == 1 else _joined(results, self._pieces)

    def _run_piece(self, piece: Piece, forward: Callable[..., Any], arguments: tuple, named: Mapping[str, Any]) -> Any:
        self._piece = piece
        try:
            result = forward(*self._cut(arguments), **{key: self._cut(one) for key, one in named.items()})
            self._save(piece)
            return result
        finally:
            self._piece = None
            self._found.clear()
            self._rows.clear()

    def multiply(self, linear: nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Return `forward(x)` of the layer `linear`. If `x` was cut from a row, the layer runs once for the whole row.

        The layer's result for a token must not depend on other tokens.
        """
        cut, row = self._rows.get(id(x), (None, None))
        if row is None or cut is not x or self._piece is None:
            return forward(x)
        key = linear, id(row)
        if key not in self._products:
            self._products[key] = forward(row)
        return self._products[key][:, self._piece.first : self._piece.end]

    def _cut(self, value: Any) -> Any:
        """Return the part of `value` that belongs to the current piece."""
        assert self._piece is not None
        first, end = self._piece.first, self._piece.end
        if isinstance(value, Tensor):
            if value.dim() > 1 and value.shape[0] == 1 and value.shape[1] == self._num_tokens:
                cut = value[:, first:end]
                self._rows[id(cut)] = cut, value
                return cut
            return value[first:end] if value.dim() in (1, 2) and value.shape[0] == self._num_tokens else value
        if type(value) in (tuple, list):
            return type(value)(self._cut(one) for one in value)
        return {key: self._cut(one) for key, one in value.items()} if type(value) is dict else value

    def _save(self, piece: Piece) -> None:
        """Copy the states that the module used to the slot in which they are saved."""
        if piece.save is not None:
            for (layer, part), state in self._found.items():
                self._layers[layer].parts[part][piece.save].copy_(state[0])

    # Methods of transformers' `Cache` for states.

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return whether the current sequence has a state before the piece; False outside of stateful modules."""
        return self._piece is not None and self._piece.read != NULL_SLOT

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return the latest inputs of a convolution [1, channels, taps], or None if the sequence begins."""
        return self._previous(layer_idx, state_idx, is_convolution=True)

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """Return a recurrent state [1, ...], or None if the sequence begins."""
        return self._previous(layer_idx, state_idx, is_convolution=False)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Store the latest of the inputs `conv_states` [1, channels, P].

        Return them behind the earlier ones, [1, channels, taps + P], or behind zeros up to [1, channels, taps] if the
        sequence begins.
        """
        state = self._previous(layer_idx, state_idx, is_convolution=True)
        if state is None:
            state = self._state(layer_idx, state_idx, is_convolution=True)
            joined = F.pad(conv_states, (max(0, state.shape[-1] - conv_states.shape[-1]), 0))
        else:
            joined = torch.cat([state.to(conv_states.dtype), conv_states], dim=-1)
        _store(state, joined[..., -state.shape[-1] :], layer_idx)
        return joined

    def update_recurrent_state(self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0) -> Tensor:
        """Store a recurrent state [1, ...], and return the stored one."""
        state = self._state(layer_idx, state_idx, is_convolution=False)
        _store(state, recurrent_states, layer_idx)
        return state

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise StateError(f"the class uses {name} of its memory, which is not known here")

    def _previous(self, layer: int, number: int, *, is_convolution: bool) -> Tensor | None:
        """Return a state before the piece, or as it was left by this call; None if the sequence begins."""
        part = layer, self._part(layer, number, is_convolution=is_convolution)
        piece = self._piece
        if part not in self._found and piece is not None:
            if piece.read == NULL_SLOT:
                return None
            if piece.read != piece.write:
                states = self._layers[layer].parts[part[1]]
                states[piece.write].copy_(states[piece.read])
        return self._state(layer, number, is_convolution=is_convolution)

    def _state(self, layer: int, number: int, *, is_convolution: bool) -> Tensor:
        """Return a state in the slot that the piece writes: [1, ...]."""
        part = self._part(layer, number, is_convolution=is_convolution)
        if (layer, part) not in self._found:
            if self._piece is None:
                raise StateError(f"a module of layer {layer} that the look at the class did not find uses its state")
            slot = self._piece.write
            self._found[layer, part] = self._layers[layer].parts[part][slot : slot + 1]
        return self._found[layer, part]

    def _part(self, layer: int, number: int, *, is_convolution: bool) -> int:
        part = self._parts.get((layer, number, is_convolution))
        if part is None:
            raise StateError(f"layer {layer} uses a state that the look at the class did not find")
        return part


class StateError(Exception):
    """The class uses its memory in a way that the look at it did not see."""


def make_stateful(module: nn.Module, states: SequenceStates) -> None:
    """Make `module`, which uses `states` in a step, run once for each piece of a sequence.

    A prompt's result is that of one call up to rounding: classes compute prompts in blocks, and a piece begins a new
    one. The first piece of a sequence is the call that the class makes without any memory.
    """
    own = module.forward

    def forward(*arguments: Any, **named: Any) -> Any:
        return states.run(own, arguments, named)

    module.forward = forward


def multiply_rows(linear: nn.Module, states: SequenceStates) -> None:
    """Make a linear layer inside of a stateful module multiply the inputs of all pieces at once, if it can."""
    own = linear.forward

    def forward(x: Tensor) -> Tensor:
        return states.multiply(linear, own, x)

    linear.forward = forward


def make_all_stateful(
    model: nn.Module, calls: Sequence[StateCall], linears: tuple[type[nn.Module], ...] = (nn.Linear,)
) -> SequenceStates:
    """Make the modules of `calls` in `model` stateful, and return the memory that a step passes to the model.

    `linears`: classes of linear layers, which take one tensor. They must have replaced the class's own before.
    """
    states = SequenceStates(calls)
    modules = [model.get_submodule(name) for name in dict.fromkeys(call.module for call in calls)]
    for module in modules:
        make_stateful(module, states)
    for linear in dict.fromkeys(one for module in modules for one in module.modules() if isinstance(one, linears)):
        multiply_rows(linear, states)
    return states


def _joined(results: Sequence[Any], pieces: Sequence[Piece]) -> Any:
    """Return the results of all pieces as one: tensors [1, T, ...] or [T, ...], tuples by their elements."""
    first, tokens = results[0], pieces[0].end - pieces[0].first
    if isinstance(first, Tensor):
        return torch.cat(list(results), 1 if first.dim() > 1 and first.shape[:2] == (1, tokens) else 0)
    if type(first) in (tuple, list):
        return type(first)(_joined(parts, pieces) for parts in zip(*results, strict=True))
    return first


def _store(state: Tensor, value: Tensor, layer: int) -> None:
    if value.shape != state.shape or value.is_floating_point() != state.is_floating_point():
        raise StateError(
            f"layer {layer} keeps a state {list(value.shape)} of {value.dtype} that was {list(state.shape)} of "
            f"{state.dtype} in the look at the class"
        )
    state.copy_(value)
