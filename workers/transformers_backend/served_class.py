"""The specification of a class that transformers computes, made from its `ClassDescription`. Torch-free.

It is a `DecoderSpec` like any other: each layer has one branch for each kind of memory, so memory groups, limits and
plans are computed as for described families. The tensors belong to the class as a whole.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from oarlock.workers.layers.decoder_spec import BranchSpec, DecoderSpec, LayerSpec
from oarlock.workers.layers.memory_spec import MemorySpec, PagesSpec, SlotsSpec, StatePart
from oarlock.workers.layers.sharding import LARGEST_TP
from oarlock.workers.layers.tensor_spec import NormSpec, Tap, TensorSpec
from oarlock.workers.model_files.tensor_names import AS_STORED
from oarlock.workers.transformers_backend.class_description import AttentionCall, ClassDescription, StateCall
from oarlock.workers.transformers_backend.placement_plan import (
    Division,
    division_on,
    smallest_shared_inputs,
    tensor_specs,
)

# Tokens of a class whose config.json has no limit: by default, and at most.
DEFAULT_LENGTH, LONGEST_LENGTH = 32768, 2**20
_WHOLE_OUTPUTS = (Division.WHOLE, Division.GATHERED_COLUMN)  # of linear layers whose results every rank has


@dataclass(frozen=True, slots=True)
class ClassSublayer:
    """One layer's memory of sequences, and the sizes from which its work is estimated; the class's code computes it."""

    memory: MemorySpec | None
    ranks: int  # tensor-parallel size that the class was tried with
    shared_inputs: int  # inputs of its linear layers that ranks divide; 0: none
    values: int  # per token, which exist at the same time, over all ranks
    pair_ops: int = 0  # multiplications and additions of a token for each token of its context, over all ranks

    module: ClassVar[str] = "layer"
    title: ClassVar[str] = "layer"
    reads: ClassVar[str] = "input"
    leaves: ClassVar[str] = "output"
    fused: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    gguf: ClassVar[Mapping[str, str]] = {}
    gguf_norms: ClassVar[tuple[str, str]] = ("", "")

    def tensors(self, hidden: int) -> list[TensorSpec]:
        """Return none: the tensors belong to the class (`DecoderSpec.class_tensors`)."""
        return []

    @property
    def taps(self) -> list[Tap]:
        """No tensors: nothing inside of the class's code is verified one by one."""
        return []

    @property
    def most_ranks(self) -> int:
        return LARGEST_TP

    def divides(self, size: int) -> bool:
        """Return whether `size` ranks are known to work: one, or as many as the class was tried with."""
        return size in (1, self.ranks)

    @property
    def sizes(self) -> str:
        return "the heads and widths of the class"

    @property
    def shared_inputs_name(self) -> str:
        """`shared_inputs` for messages."""
        return f"{self.shared_inputs} inputs of a linear layer"

    def step_values(self, size: int) -> int:
        """Return the values per token that exist at the same time on each of `size` ranks."""
        return self.values // size

    def for_length(self, length: int) -> Self:
        """Return the same specification: it does not depend on `length`."""
        return self


def spec_of(description: ClassDescription, dtype: str | None) -> DecoderSpec:
    """Return the specification of a class that is not refused. `dtype`: declared dtype of the checkpoint's weights."""
    assert description.refusal is None, description.refusal
    tensors = tuple(tensor_specs(description))
    longest = description.longest_length or LONGEST_LENGTH
    return DecoderSpec(
        architecture=description.architecture,
        vocab_size=description.vocab_size,
        hidden_size=description.hidden_size,
        layers=_layers(description),
        norm=NormSpec(),
        default_length=description.longest_length or DEFAULT_LENGTH,
        longest_length=longest,
        tie_word_embeddings=description.is_tied,
        dtype=dtype,
        names=AS_STORED,
        class_tensors=tensors,
        is_remote_code=description.is_remote,
    )


def _layers(description: ClassDescription) -> tuple[LayerSpec, ...]:
    """Return the layers, each with a branch for its pages, one for its slots, or one without memory."""
    pages = {call.layer: call for call in description.attention}
    states: dict[int, list[StateCall]] = {}
    for state in description.states:
        states.setdefault(state.layer, []).append(state)
    shared, ranks = smallest_shared_inputs(description), description.ranks

    def over_ranks(count: int, is_divided: bool) -> int:
        """Return the sum over all ranks of `count`, which ranks divide, or each of them has."""
        return count if is_divided else count * ranks

    outputs = sum(
        over_ranks(tensor.shape[0], division_on(ranks, tensor) not in _WHOLE_OUTPUTS)
        for tensor in description.tensors
        if tensor.role == "linear"
    )
    values = -(-outputs // max(1, description.layers))  # every linear layer's output, as if all were kept

    def sublayer(memory: MemorySpec | None, values: int, pair_ops: int = 0) -> BranchSpec:
        return BranchSpec(ClassSublayer(memory, ranks, shared, values, pair_ops), None)

    found = []
    for layer in range(description.layers):
        branches = []
        if layer in pages:
            call = pages[layer]
            pair_ops = over_ranks(2 * call.heads * (call.key_width + call.value_width), call.is_divided)
            branches.append(sublayer(_pages(call), values, pair_ops))
        if layer in states:
            branches.append(sublayer(slots_of(states[layer]), 0 if branches else values))
        found.append(LayerSpec(tuple(branches) or (sublayer(None, values),)))
    return tuple(found)


def _pages(call: AttentionCall) -> PagesSpec:
    span = None if call.window is None else call.window
    return PagesSpec(call.kv_heads, call.key_width, call.value_width, span, is_copied=not call.is_divided)


def slots_of(states: list[StateCall]) -> SlotsSpec:
    """Return the slots of one layer: a part for each of its states, in their order."""
    return SlotsSpec(tuple(map(_part, states)))


def _part(state: StateCall) -> StatePart:
    name = f"{'conv' if state.is_convolution else 'recurrent'}{state.number}"
    rows, rest = state.shape[0], state.shape[1:]
    is_float32 = state.dtype == "float32"
    if state.is_divided:
        return StatePart(name, rows, rest, is_float32=is_float32)
    return StatePart(name, 0, rest, copied_rows=rows, is_float32=is_float32)
