"""GPTQ: 32-bit words packed along the inputs, and a scale and a zero point for each group of inputs.

AutoGPTQ and GPTQModel write it. The first version of the format stores zero points minus one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from oarlock.workers.quantization.formats.form import (
    SCALES,
    Arithmetic,
    Settings,
    StoredTensor,
    check_divides,
    stored,
)
from oarlock.workers.quantization.formats.module_pattern import ModulePattern
from oarlock.workers.quantization.groups import whole_number_bytes

if TYPE_CHECKING:
    from oarlock.workers.quantization.method import LinearMethod


@dataclass(frozen=True, slots=True)
class GPTQForm:
    """`StoredForm` of GPTQ."""

    bits: int
    group: int | None  # inputs per group; None: all
    symmetric: bool
    ordered: bool  # True if `g_idx` has the group of each input
    zeros_less_one: bool

    @property
    def spare(self) -> tuple[str, ...]:
        return ("g_idx",)

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic.ROUNDED_INPUTS

    def method(self) -> LinearMethod:
        from oarlock.workers.quantization.packed_integers import GPTQReader, GroupedLinearMethod

        return GroupedLinearMethod(GPTQReader(self.bits, self.group, self.symmetric, self.zeros_less_one))

    def tensors(self, rows: int, inputs: int) -> Mapping[str, StoredTensor]:
        groups = inputs // (self.group or inputs)
        in_word = 32 // self.bits
        return {
            "qweight": stored("I32", inputs // in_word, rows),
            "qzeros": stored("I32", groups, rows // in_word),
            "scales": stored(SCALES, groups, rows),
            "g_idx": stored("I32", inputs, required=self.ordered),
        }

    def check(self, module: str, rows: int, inputs: int) -> None:
        check_divides(module, "groups", inputs, self.group or inputs)
        check_divides(module, "words", inputs, 32 // self.bits)
        check_divides(module, "words", rows, 32 // self.bits)

    def weight_bytes(self, rows: int, inputs: int, item_bytes: int, slices: int = 1) -> int:
        return whole_number_bytes(rows, inputs, self.bits, self.group, offsets=not self.symmetric)


@dataclass(frozen=True, slots=True)
class GPTQScheme:
    """`Scheme` of GPTQ."""

    form: GPTQForm
    exceptions: tuple[tuple[ModulePattern, GPTQForm | None], ...]  # the first pattern that matches a module counts

    @property
    def description(self) -> str:
        form = self.form
        groups = "one group" if form.group is None else f"groups of {form.group}"
        return f"gptq ({form.bits} bits, {groups}{', act-order' if form.ordered else ''})"

    def form_of(self, module: str) -> GPTQForm | None:
        return next((form for pattern, form in self.exceptions if pattern.matches(module)), self.form)


def gptq(settings: Settings) -> GPTQScheme:
    """Parse GPTQ's settings. Raise `StartupError` for unsupported settings."""
    settings.refuse("is_marlin_format", (False,))
    settings.refuse("pack_dtype", ("int32",))
    settings.refuse("adapter", ({},))
    version = settings.one_of(("checkpoint_format", "format"), "gptq", ("gptq", "gptq_v2"))
    form = GPTQForm(
        bits=settings.one_of(("bits",), None, (4, 8)),
        group=settings.group_size(("group_size",), 128),
        symmetric=settings.flag("sym", default=True),
        ordered=settings.flag("desc_act", default=False),
        zeros_less_one=version == "gptq",
    )
    dynamic = settings.table("dynamic")
    return GPTQScheme(form, tuple(_exception(form, dynamic, name) for name in dynamic.raw))


def _exception(form: GPTQForm, dynamic: Settings, name: str) -> tuple[ModulePattern, GPTQForm | None]:
    """Return GPTQModel's settings for modules whose names match. A pattern after `-:` leaves modules unquantised."""
    pattern = ModulePattern(name.removeprefix("-:").removeprefix("+:"), dynamic.where)
    if name.startswith("-:"):
        return pattern, None
    own = dynamic.table(name)
    changes: dict[str, Any] = {}
    if "bits" in own.raw:
        changes["bits"] = own.one_of(("bits",), None, (4, 8))
    if "group_size" in own.raw:
        changes["group"] = own.group_size(("group_size",))
    if "sym" in own.raw:
        changes["symmetric"] = own.flag("sym", default=True)
    if "desc_act" in own.raw:
        changes["ordered"] = own.flag("desc_act", default=False)
    return pattern, replace(form, **changes)
