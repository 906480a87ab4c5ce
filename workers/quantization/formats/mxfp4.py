"""MXFP4: 4-bit floats (e2m1) with a power of two for each 32 inputs of an output, as gpt-oss stores its experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oarlock.workers.quantization.formats.weight_format import (
    Arithmetic,
    QuantizationSettings,
    StoredTensor,
    UniformScheme,
    check_divides,
    stored,
)
from oarlock.workers.quantization.groups import packed_bytes

if TYPE_CHECKING:
    from oarlock.workers.quantization.method import LinearMethod

GROUP = 32


@dataclass(frozen=True, slots=True)
class MXFP4Format(UniformScheme):
    """`StoredFormat`, and the `Scheme` of every module."""

    @property
    def description(self) -> str:
        return f"mxfp4 (4 bits, groups of {GROUP})"

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic.ROUNDED_INPUTS

    def method(self) -> LinearMethod:
        from oarlock.workers.quantization.mxfp4 import MXFP4LinearMethod

        return MXFP4LinearMethod()

    def tensors(self, rows: int, inputs: int) -> Mapping[str, StoredTensor]:
        return {"blocks": stored("U8", rows, inputs // 2), "scales": stored("U8", rows, inputs // GROUP)}

    def check(self, module: str, rows: int, inputs: int) -> None:
        check_divides(module, "groups", inputs, GROUP)

    def weight_bytes(self, rows: int, inputs: int, item_bytes: int, slices: int = 1) -> int:
        return packed_bytes(rows, inputs, 4, GROUP, offsets=False)


def mxfp4(settings: QuantizationSettings) -> MXFP4Format:
    """Parse the settings. Only the method's name affects how weights are stored."""
    settings.names("modules_to_not_convert")
    return MXFP4Format()
