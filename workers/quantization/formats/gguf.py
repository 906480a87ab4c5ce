"""GGUF: every tensor has a type of its own, and weights of blocks are multiplied as they are stored. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from oarlock.workers.quantization.formats.form import Arithmetic, Form
from oarlock.workers.quantization.groups import group_of_blocks, packed_bytes
from oarlock.workers.quantization.registry import NONE
from oarlock.workers.weights.checkpoint import FUSED_TENSORS
from oarlock.workers.weights.gguf_header import GROUP_FORMS, GroupForm
from oarlock.workers.weights.gguf_model import GGUFCheckpoint

if TYPE_CHECKING:
    from oarlock.workers.quantization.method import LinearMethod

_SIBLINGS = {part: (fused, parts) for fused, parts in FUSED_TENSORS.items() for part in parts}


@dataclass(frozen=True, slots=True)
class GGUFForm:
    """`Form` of weights of blocks."""

    group: int
    bits: int
    has_offsets: bool

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic.ROUNDED_INPUTS

    def method(self) -> LinearMethod:
        from oarlock.workers.quantization.readers.gguf import GGUFLinearMethod

        return GGUFLinearMethod(GroupForm(self.group, self.bits, self.has_offsets))

    def weight_bytes(self, rows: int, inputs: int, item_bytes: int, slices: int = 1) -> int:
        group = group_of_blocks(self.group, inputs, slices)
        if group is None:
            return rows * inputs * item_bytes
        return packed_bytes(rows, inputs, self.bits, group, offsets=self.has_offsets)


class GGUFForms:
    """`WeightForms` of a model in GGUF."""

    def __init__(self, checkpoint: GGUFCheckpoint) -> None:
        self._checkpoint = checkpoint

    @property
    def description(self) -> str:
        """The types of its matrices, those that there are most of first."""
        kinds = [found.entry.dtype for found in self._checkpoint.tensors.values() if len(found.entry.shape) == 2]
        return f"gguf ({', '.join(sorted(set(kinds), key=lambda kind: (-kinds.count(kind), kind)))})"

    @property
    def of_head(self) -> GGUFForms:
        return self

    def form_of(self, module: str) -> Form:
        """Weights that make one product, such as those of q, k and v, get one form, which can hold all their types.

        One among them that is stored in floating point leaves the others to be dequantised.
        """
        above, _, last = module.rpartition(".")
        layer, _, parent = above.rpartition(".")
        fused, parts = _SIBLINGS.get(f"{parent}.{last}", ("", ()))
        names = [f"{layer}.{part}" for part in parts] or [module]
        if self._checkpoint.find(f"{layer}.{fused}.weight") is not None:
            names = [f"{layer}.{fused}"]
        found = [self._checkpoint.find(f"{name}.weight") for name in names]
        forms = [GROUP_FORMS.get(one.entry.dtype) for one in found if one is not None]
        known = [form for form in forms if form is not None]
        if not known or len(known) < len(forms):
            return NONE
        return GGUFForm(
            min(form.group for form in known),
            max(form.bits for form in known),
            any(form.has_offsets for form in known),
        )

    def ignores(self, name: str) -> bool:
        """False: every tensor of a GGUF model has its place."""
        return False
