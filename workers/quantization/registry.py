"""The quantizations of linear weights, by name: the memory they take, and the method that reads them.

Torch-free, because memory is counted before any rank starts. A new quantization at load is one file in this folder and
one entry here. A new quantization of checkpoints is a file in `formats/`, a reader that uses torch, and one line in
`STORED`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oarlock.workers.quantization.formats.awq import awq
from oarlock.workers.quantization.formats.bitsandbytes import bitsandbytes
from oarlock.workers.quantization.formats.compressed_tensors import compressed_tensors
from oarlock.workers.quantization.formats.fp8 import fp8
from oarlock.workers.quantization.formats.gptq import gptq
from oarlock.workers.quantization.formats.mxfp4 import mxfp4
from oarlock.workers.quantization.formats.weight_format import Arithmetic, QuantizationSettings, Scheme

if TYPE_CHECKING:
    from oarlock.workers.quantization.method import LinearMethod


@dataclass(frozen=True, slots=True)
class Quantization:
    """`WeightFormat`, and `WeightFormats` of a model, for weights that a checkpoint stores in floating point."""

    method: Callable[[], LinearMethod]
    bits: int | None = None  # bits of a weight; None: the bits of the model's dtype
    bytes_per_row: int = 0  # additional bytes for each output
    # Inputs that are stored together. Shards begin at the start of a group, and rows are padded to whole groups.
    group: int = 1
    bytes_per_group: int = 0  # additional bytes for each group
    head: Quantization | None = None  # format of the output head and the embedding; None: this format
    gates: Quantization | None = None  # format of projections to the gates of a gated delta net; None: this format

    @property
    def of_head(self) -> Quantization:
        """Format of the head's weight."""
        return self.head or self

    @property
    def of_gates(self) -> Quantization:
        """Format of the weights of gates."""
        return self.gates or self

    @property
    def arithmetic(self) -> Arithmetic:
        return Arithmetic.DENSE if self.bits is None else Arithmetic.ROUNDED_INPUTS

    def format_of(self, module: str) -> Quantization:
        """Return this format, which all modules have."""
        return self

    def ignores(self, name: str) -> bool:
        """Return False: quantization at load leaves no tensor of a checkpoint unused."""
        return False

    def weight_bytes(self, rows: int, inputs: int, item_bytes: int, slices: int = 1) -> int:
        """Return the bytes of a weight [rows, inputs] of a model whose dtype has `item_bytes` bytes."""
        groups = -(-inputs // self.group)
        stored = groups * self.group
        row = stored * item_bytes if self.bits is None else -(-stored * self.bits // 8)
        return rows * (row + groups * self.bytes_per_group + self.bytes_per_row)

    def can_split(self, inputs: int, parts: int) -> bool:
        """Return whether `inputs` can be cut into `parts` equal parts."""
        return parts == 1 or (inputs // parts) % self.group == 0


def _unquantized() -> LinearMethod:
    from oarlock.workers.quantization.method import UnquantizedLinearMethod

    return UnquantizedLinearMethod()


def _int8() -> LinearMethod:
    from oarlock.workers.quantization.int8 import Int8LinearMethod

    return Int8LinearMethod()


def _int4() -> LinearMethod:
    from oarlock.workers.quantization.int4 import Int4LinearMethod

    return Int4LinearMethod()


NONE = Quantization(_unquantized)
_INT8 = Quantization(_int8, bits=8, bytes_per_row=8, gates=NONE)  # a scale, and the sum that the kernel begins with
QUANTIZATIONS = {
    "none": NONE,
    "int8": _INT8,
    # A factor for each output, and a scale for each group. A head of 4 bits would add more to the perplexity than all
    # layers do (docs/accuracy.md).
    "int4": Quantization(_int4, bits=4, group=32, bytes_per_row=4, bytes_per_group=2, head=_INT8, gates=NONE),
}


STORED: dict[str, Callable[[QuantizationSettings], Scheme]] = {
    "awq": awq,
    "bitsandbytes": bitsandbytes,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "gptq": gptq,
    "mxfp4": mxfp4,
}
