"""AWQ: 32-bit words packed along the outputs, and a scale and a zero point for each group of inputs.

AutoAWQ writes it in its GEMM layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oarlock.workers.quantization.formats.weight_format import (
    SCALES,
    Arithmetic,
    QuantizationSettings,
    StoredTensor,
    UniformScheme,
    check_divides,
    stored,
)
from oarlock.workers.quantization.groups import integer_bytes

if TYPE_CHECKING:
    from oarlock.workers.quantization.method import LinearMethod

_IN_WORD = 8  # 4-bit values in a word


@dataclass(frozen=True, slots=True)
class AWQFormat(UniformScheme):
    """`StoredFormat`, and the `Scheme` of every module."""

    group: int | None  # inputs per group; None: all

    @property
    def description(self) -> str:
        return f"awq (4 bits, {'one group' if self.group is None else f'groups of {self.group}'})"

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic.ROUNDED_INPUTS

    def method(self) -> LinearMethod:
        from oarlock.workers.quantization.packed_integers import AWQReader, GroupedLinearMethod

        return GroupedLinearMethod(AWQReader(self.group))

    def tensors(self, rows: int, inputs: int) -> Mapping[str, StoredTensor]:
        groups = inputs // (self.group or inputs)
        return {
            "qweight": stored("I32", inputs, rows // _IN_WORD),
            "qzeros": stored("I32", groups, rows // _IN_WORD),
            "scales": stored(SCALES, groups, rows),
        }

    def check(self, module: str, rows: int, inputs: int) -> None:
        check_divides(module, "groups", inputs, self.group or inputs)
        check_divides(module, "words", rows, _IN_WORD)

    def weight_bytes(self, rows: int, inputs: int, item_bytes: int, slices: int = 1) -> int:
        return integer_bytes(rows, inputs, 4, self.group, offsets=True)


def awq(settings: QuantizationSettings) -> AWQFormat:
    """Parse AWQ's settings. Raise `StartupError` for unsupported settings.

    The second name of each key comes from AutoAWQ's own file.
    """
    settings.one_of(("bits", "w_bit"), 4, (4,))
    settings.one_of(("version", "format"), "gemm", ("gemm",))
    settings.one_of(("zero_point",), True, (True,))
    return AWQFormat(settings.group_size(("group_size", "q_group_size"), 128))
