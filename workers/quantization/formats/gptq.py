"""GPTQ: 32-bit words packed along the inputs, and a scale and a zero point for each group of inputs.

AutoGPTQ and GPTQModel write it. The first version of the format stores zero points minus one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from oarlock.workers.quantization.formats.module_pattern import ModulePattern
from oarlock.workers.quantization.formats.weight_format import (
    SCALES,
    Arithmetic,
    QuantizationSettings,
    StoredTensor,
    check_divides,
    stored,
)
from oarlock.workers.quantization.groups import integer_bytes

if TYPE_CHECKING:
    from oarlock.workers.quantization.method import LinearMethod


@dataclass(frozen=True, slots=True)
class GPTQFormat:
    """`StoredFormat` of GPTQ."""

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
        return integer_bytes(rows, inputs, self.bits, self.group, offsets=not self.symmetric)


@dataclass(frozen=True, slots=True)
class GPTQScheme:
    """`Scheme` of GPTQ."""

    weight_format: GPTQFormat
    exceptions: tuple[tuple[ModulePattern, GPTQFormat | None], ...]  # the first pattern that matches a module counts

    @property
    def description(self) -> str:
        weight_format = self.weight_format
        groups = "one group" if weight_format.group is None else f"groups of {weight_format.group}"
        return f"gptq ({weight_format.bits} bits, {groups}{', act-order' if weight_format.ordered else ''})"

    def format_of(self, module: str) -> GPTQFormat | None:
        return next(
            (weight_format for pattern, weight_format in self.exceptions if pattern.matches(module)), self.weight_format
        )


def gptq(settings: QuantizationSettings) -> GPTQScheme:
    """Parse GPTQ's settings. Raise `StartupError` for unsupported settings."""
    settings.refuse("is_marlin_format", (False,))
    settings.refuse("pack_dtype", ("int32",))
    settings.refuse("adapter", ({},))
    version = settings.one_of(("checkpoint_format", "format"), "gptq", ("gptq", "gptq_v2"))
    weight_format = GPTQFormat(
        bits=settings.one_of(("bits",), None, (4, 8)),
        group=settings.group_size(("group_size",), 128),
        symmetric=settings.flag("sym", default=True),
        ordered=settings.flag("desc_act", default=False),
        zeros_less_one=version == "gptq",
    )
    dynamic = settings.table("dynamic")
    return GPTQScheme(weight_format, tuple(_exception(weight_format, dynamic, name) for name in dynamic.raw))


def _exception(
    weight_format: GPTQFormat, dynamic: QuantizationSettings, name: str
) -> tuple[ModulePattern, GPTQFormat | None]:
    """Return GPTQModel's settings for modules whose names match. A pattern after `-:` leaves modules unquantised."""
    pattern = ModulePattern(name.removeprefix("-:").removeprefix("+:"), dynamic.location)
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
    return pattern, replace(weight_format, **changes)
