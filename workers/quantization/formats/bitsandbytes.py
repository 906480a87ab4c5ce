"""bitsandbytes with 4 bits (NF4 and FP4): indices into a table of 16 values, and the maximum of every 64 weights.

The blocks follow one another through the whole matrix, row by row. With double quantisation their maxima are themselves
indices into a table of 256 values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oarlock.workers.quantization.formats.weight_format import (
    USE_ANOTHER,
    Arithmetic,
    QuantizationSettings,
    StoredTensor,
    UniformScheme,
    check_divides,
    stored,
)

if TYPE_CHECKING:
    from oarlock.workers.quantization.method import LinearMethod

BLOCK = 64  # weights per block
NESTED_BLOCK = 256  # blocks per nested block


@dataclass(frozen=True, slots=True)
class BitsAndBytesFormat(UniformScheme):
    """`StoredFormat`, and the `Scheme` of every module."""

    kind: str  # nf4 | fp4
    nested: bool

    @property
    def description(self) -> str:
        return f"bitsandbytes ({self.kind}{', double quantisation' if self.nested else ''}), dequantised at load"

    @property
    def state(self) -> str:
        """Name of the tensor whose bytes are a table of settings in JSON."""
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic.DENSE

    def method(self) -> LinearMethod:
        from oarlock.workers.quantization.bitsandbytes import BitsAndBytesLinearMethod

        return BitsAndBytesLinearMethod(self.state, BLOCK, NESTED_BLOCK if self.nested else None)

    def tensors(self, rows: int, inputs: int) -> Mapping[str, StoredTensor]:
        blocks = -(-rows * inputs // BLOCK)
        found = {
            "weight": stored("U8", rows * inputs // 2, 1),
            "weight.absmax": stored("U8" if self.nested else "F32", blocks),
            "weight.quant_map": stored("F32", 16),
            self.state: stored("U8", None),
        }
        if self.nested:
            found["weight.nested_absmax"] = stored("F32", -(-blocks // NESTED_BLOCK))
            found["weight.nested_quant_map"] = stored("F32", 256)
        return found

    def check(self, module: str, rows: int, inputs: int) -> None:
        check_divides(module, "pairs", inputs, 2)

    def weight_bytes(self, rows: int, inputs: int, item_bytes: int, slices: int = 1) -> int:
        return rows * inputs * item_bytes


def bitsandbytes(settings: QuantizationSettings) -> BitsAndBytesFormat:
    """Parse bitsandbytes' settings. Raise `StartupError` for unsupported settings."""
    if not settings.flag("load_in_4bit", "_load_in_4bit", default=False):
        raise settings.unsupported("load_in_4bit", False, f"Only its 4-bit formats are supported. {USE_ANOTHER}")
    settings.one_of(("bnb_4bit_quant_storage",), "uint8", ("uint8",))
    kind = settings.one_of(("bnb_4bit_quant_type",), "fp4", ("nf4", "fp4"))
    return BitsAndBytesFormat(kind, settings.flag("bnb_4bit_use_double_quant", default=False))
