"""The blocks of GGUF tensors as whole numbers with scales: one function for each type.

A block of a type holds `elements` neighbours of a row in `size` bytes (block_types.py). The layouts of bytes are
ggml's (ggml-common.h, and dequantize_row_* in ggml-quants.c).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from oarlock.workers.weights.gguf.block_types import BY_NAME, GROUP_FORMS


@dataclass(frozen=True, slots=True)
class Groups:
    """Rows of a weight: weight[n, k] = values[n, k] * scales[n, k // group] + offsets[n, k // group]."""

    values: Tensor  # int8 [N, K]
    scales: Tensor  # float32 [N, ceil(K / group)]
    offsets: Tensor | None  # float32, the same shape
    group: int

    @staticmethod
    def empty(rows: int, inputs: int, group: int, *, offsets: bool) -> "Groups":
        """Allocates groups without initialising them, except for offsets, which are zero."""
        scales = torch.empty((rows, -(-inputs // group)))
        values = torch.empty((rows, inputs), dtype=torch.int8)
        return Groups(values, scales, torch.zeros_like(scales) if offsets else None, group)

    def rows(self, first: int, count: int) -> "Groups":
        """A view of `count` rows from `first` on."""
        part = slice(first, first + count)
        return Groups(
            self.values[part], self.scales[part], None if self.offsets is None else self.offsets[part], self.group
        )

    def dequantised(self) -> Tensor:
        """float32 [N, K]."""
        group_of = torch.arange(self.values.shape[1]) // self.group
        weight = self.values.float() * self.scales[:, group_of]
        return weight if self.offsets is None else weight.add_(self.offsets[:, group_of])


def unpacked(kind: str, raw: Tensor) -> Groups:
    """Rows of blocks: uint8 [N, bytes of a row]."""
    rows = len(raw)
    values, scales, offsets = _UNPACK[kind](raw.reshape(-1, BY_NAME[kind].size))
    offsets = None if offsets is None else offsets.reshape(rows, -1)
    return Groups(values.reshape(rows, -1), scales.reshape(rows, -1), offsets, GROUP_FORMS[kind].group)


def _half(raw: Tensor, start: int) -> Tensor:
    """The number of 16 bits at byte `start` of each block: float32 [B, 1]."""
    return raw[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(raw: Tensor) -> Tensor:
    """uint8 [B, n] -> [B, 2 * n]: the lower halves of all bytes, then the upper ones."""
    return torch.cat((raw & 15, raw >> 4), 1)


def _fifth_bits(raw: Tensor) -> Tensor:
    """Bit k of each four bytes, as 16 or 0: uint8 [B, 4] -> [B, 32]."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (raw.unsqueeze(2) >> shifts & 1).view(len(raw), 32) << 4


def _signed(values: Tensor, zero: int) -> Tensor:
    """uint8 numbers less `zero`, as int8."""
    return values.view(torch.int8) - zero


def _q4_0(raw: Tensor) -> tuple[Tensor, Tensor, None]:
    return _signed(_nibbles(raw[:, 2:]), 8), _half(raw, 0), None


def _q4_1(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales = _half(raw, 0)
    return _signed(_nibbles(raw[:, 4:]), 8), scales, _half(raw, 2) + 8 * scales


def _q5_0(raw: Tensor) -> tuple[Tensor, Tensor, None]:
    return _signed(_nibbles(raw[:, 6:]) | _fifth_bits(raw[:, 2:6]), 16), _half(raw, 0), None


def _q5_1(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _signed(_nibbles(raw[:, 8:]) | _fifth_bits(raw[:, 4:8]), 0), _half(raw, 0), _half(raw, 2)


def _q8_0(raw: Tensor) -> tuple[Tensor, Tensor, None]:
    return raw[:, 2:].contiguous().view(torch.int8), _half(raw, 0), None


def _scales_and_minima(raw: Tensor) -> tuple[Tensor, Tensor]:
    """The eight pairs of numbers of 6 bits in 12 bytes: uint8 [B, 12] -> float32 [B, 8] twice."""
    scale, minimum, both = raw.view(-1, 3, 4).unbind(1)
    scales = torch.cat((scale & 63, (both & 15) | (scale >> 2 & 48)), 1)
    minima = torch.cat((minimum & 63, (both >> 4) | (minimum >> 2 & 48)), 1)
    return scales.float(), minima.float()


def _q4_k(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales, minima = _scales_and_minima(raw[:, 4:16].contiguous())
    scales = _half(raw, 0) * scales
    values = _nibbles(raw[:, 16:].reshape(-1, 32)).view(-1, 256)  # 32 bytes are two groups of 32
    return _signed(values, 8), scales, 8 * scales - _half(raw, 2) * minima


def _q5_k(raw: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scales, minima = _scales_and_minima(raw[:, 4:16].contiguous())
    lower = _nibbles(raw[:, 48:].reshape(-1, 32)).view(-1, 8, 32)
    groups = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    fifth = (raw[:, 16:48].unsqueeze(1) >> groups & 1) << 4  # bit g of byte k belongs to number k of group g
    return _signed((lower | fifth).view(-1, 256), 0), _half(raw, 0) * scales, -_half(raw, 2) * minima


def _q6_k(raw: Tensor) -> tuple[Tensor, Tensor, None]:
    lower = _nibbles(raw[:, :128].reshape(-1, 64)).view(-1, 2, 4, 32)  # of each half of a block: four times 32 numbers
    shifts = torch.tensor((0, 2, 4, 6), dtype=torch.uint8).view(1, 1, 4, 1)
    upper = (raw[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3) << 4
    scales = raw[:, 192:208].contiguous().view(torch.int8).float() * _half(raw, 208)
    return _signed((lower | upper).view(-1, 256), 32), scales, None


# uint8 [B, size of a block] -> values int8 [B, elements], scales float32 [B, groups], offsets the same or None
_UNPACK: dict[str, Callable[[Tensor], tuple[Tensor, Tensor, Tensor | None]]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
