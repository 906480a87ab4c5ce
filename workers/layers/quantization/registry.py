"""The forms that weights of products can have, by name: what each takes in memory, and the method that reads it.

Torch-free: memory is counted before any rank starts. A new form is one file beside this one and one entry here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.layers.quantization.method import LinearMethod


@dataclass(frozen=True, slots=True)
class Quantization:
    """One form of weights."""

    method: Callable[[], LinearMethod]
    bits: int | None = None  # of one weight; None: those of the dtype that the model computes in
    bytes_per_row: int = 0  # beside the weights, for each output

    def weight_bytes(self, rows: int, inputs: int, item_bytes: int) -> int:
        """Of a weight [rows, inputs] whose model computes in a dtype of `item_bytes`."""
        row = inputs * item_bytes if self.bits is None else -(-inputs * self.bits // 8)
        return rows * (row + self.bytes_per_row)


def _unquantized() -> LinearMethod:
    from workers.layers.quantization.unquantized import UnquantizedLinearMethod

    return UnquantizedLinearMethod()


def _int8() -> LinearMethod:
    from workers.layers.quantization.int8 import Int8LinearMethod

    return Int8LinearMethod()


NONE = Quantization(_unquantized)
QUANTIZATIONS = {
    "none": NONE,
    "int8": Quantization(_int8, bits=8, bytes_per_row=8),  # a scale, and the sum that the kernel begins with
}
