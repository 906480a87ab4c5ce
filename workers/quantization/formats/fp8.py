"""FP8: float8 (e4m3) weights with a scale per tensor or per block, as DeepSeek and Qwen3 publish them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oarlock.workers.quantization.formats.weight_format import (
    SCALES,
    USE_ANOTHER,
    Arithmetic,
    QuantizationSettings,
    StoredTensor,
    UniformScheme,
    stored,
)
from oarlock.workers.quantization.groups import fp8_bytes

if TYPE_CHECKING:
    from oarlock.workers.quantization.method import LinearMethod

FLOAT8 = "F8_E4M3"


@dataclass(frozen=True, slots=True)
class FP8Format(UniformScheme):
    """`StoredFormat`, and the `Scheme` of every module."""

    block: tuple[int, int] | None  # (outputs, inputs); None: one scale for the tensor
    scale: str = "weight_scale_inv"  # a factor despite its name
    rounds_rows: bool = True  # True if the settings round inputs to float8

    @property
    def description(self) -> str:
        return f"fp8 ({'one scale' if self.block is None else f'blocks of {self.block[0]} x {self.block[1]}'})"

    @property
    def arithmetic(self) -> Arithmetic:
        if not self.rounds_rows:
            return Arithmetic.EXACT_INPUTS
        by_block = Arithmetic.FLOAT8_BLOCKS if self.block == (128, 128) else Arithmetic.EXACT_INPUTS
        return Arithmetic.FLOAT8_INPUTS if self.block is None else by_block

    def method(self) -> LinearMethod:
        from oarlock.workers.quantization.fp8 import FP8LinearMethod

        return FP8LinearMethod(self.scale, self.block, rounds_rows=self.rounds_rows)

    def tensors(self, rows: int, inputs: int) -> Mapping[str, StoredTensor]:
        if self.block is None:
            return {"weight": stored(FLOAT8, rows, inputs), self.scale: StoredTensor(SCALES, ((), (1,)))}
        height, width = self.block
        scales = stored(SCALES, -(-rows // height), -(-inputs // width))
        return {"weight": stored(FLOAT8, rows, inputs), self.scale: scales}

    def check(self, module: str, rows: int, inputs: int) -> None:
        """Accept all lengths: the last blocks may be smaller than the others."""

    def weight_bytes(self, rows: int, inputs: int, item_bytes: int, slices: int = 1) -> int:
        return fp8_bytes(rows, inputs, inputs if self.block is None else self.block[1])


def fp8(settings: QuantizationSettings) -> FP8Format:
    """Parse the settings of float8 weights. Raise `StartupError` for unsupported settings."""
    settings.one_of(("activation_scheme",), "dynamic", ("dynamic",))
    settings.one_of(("fmt",), "e4m3", ("e4m3", "float8_e4m3fn"))
    settings.one_of(("scale_fmt",), "float", ("float", "ue8m0"))  # ue8m0: scales are powers of two
    block = settings.get("weight_block_size")
    return FP8Format(None, "weight_scale") if block is None else FP8Format(block_of(settings, "weight_block_size"))


def block_of(settings: QuantizationSettings, key: str) -> tuple[int, int]:
    block = settings.get(key)
    if not isinstance(block, list) or len(block) != 2 or not all(type(x) is int and x > 0 for x in block):
        raise settings.unsupported(key, block, f"It must be a number of outputs and one of inputs. {USE_ANOTHER}")
    return block[0], block[1]
