"""Storage formats of keys and values in the KV cache (`--kv-cache-dtype`): the model's dtype, or quantized to 8 bits.

A row is one KV head's key or value of one token. Each row is quantized separately, so the content of a page depends
only on its tokens: not on other tokens in the block, nor on how the prompt was divided into chunks. These torch
operations define the values; the C++ kernels (`csrc/attention/pages.h`) store the same bits.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from oarlock.workers.platform.dtypes import ITEM_BYTES, row_bytes

_LARGEST_E4M3 = 448.0


class KVFormat(Protocol):
    """Storage format of a row of values [D] in the pages of backends that compute with torch."""

    def elements(self, head_dim: int) -> int:
        """Return the number of elements of a stored row."""

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of these elements."""

    def rounded(self, x: Tensor) -> Tensor:
        """Return rows `x` [..., D] of the model's dtype in this format: [..., elements]."""

    def values_and_scales(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Return the values of stored rows and their scales, so that row = values * scale.

        The values [..., D] are exact in `dtype`. The scales are float32 [...], or None if all are 1.
        """


class Unrounded:
    """Rows stored in the model's dtype."""

    def elements(self, head_dim: int) -> int:
        return head_dim

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return model_dtype

    def rounded(self, x: Tensor) -> Tensor:
        return x

    def values_and_scales(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        return rows.to(dtype), None


class Int8:
    """Format with integers from -127 to 127, followed by their scale in bfloat16.

    The scale is the row's largest absolute value / 127, rounded up so that no integer exceeds 127. A row with a value
    that is not finite has scale NaN.
    """

    def elements(self, head_dim: int) -> int:
        return row_bytes("int8", head_dim, 1)

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return torch.uint8

    def rounded(self, x: Tensor) -> Tensor:
        scales = (x.float().abs().amax(-1, keepdim=True) / 127).view(torch.int32)  # bits of non-negative floats
        scales = ((scales + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)  # [..., 1]
        finite = x.isfinite().all(-1, keepdim=True)
        divisors = torch.where(finite & (scales > 0), scales.float(), 1.0)
        values = torch.where(finite, x.float() / divisors, 0.0).round().to(torch.int8)  # ties to even
        scales = torch.where(finite, scales, torch.nan)
        return torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], -1)

    def values_and_scales(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        values, scales = rows[..., :-2].view(torch.int8), rows[..., -2:].contiguous().view(torch.bfloat16)
        # Values from -1 to 1, so that float16 matmuls do not overflow.
        return values.to(dtype) / 128, scales.squeeze(-1).float() * 128


class Fp8:
    """The e4m3 format: sign, 4 bits of exponent, 3 of mantissa.

    Values beyond 448, the maximum, are clamped; values that are not finite become NaN.
    """

    def elements(self, head_dim: int) -> int:
        return head_dim

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return torch.uint8

    def rounded(self, x: Tensor) -> Tensor:
        kept = x.float().clamp(-_LARGEST_E4M3, _LARGEST_E4M3)
        return torch.where(x.isfinite(), kept, torch.nan).to(torch.float8_e4m3fn).view(torch.uint8)

    def values_and_scales(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        return rows.view(torch.float8_e4m3fn).to(dtype), None


ROUNDED: dict[str, KVFormat] = {"int8": Int8(), "fp8": Fp8()}
FORMATS: dict[str, KVFormat] = dict.fromkeys(("auto", *ITEM_BYTES), Unrounded()) | ROUNDED


def dequantized(kv_format: KVFormat, rows: Tensor) -> Tensor:
    """Return the keys or values of stored rows: float32 [..., D]."""
    numbers, scales = kv_format.values_and_scales(rows, torch.float32)
    return numbers if scales is None else numbers * scales.unsqueeze(-1)


@dataclass(frozen=True, slots=True)
class KeyFormat:
    """Storage format of a key of several parts (`KVShape.key_parts`), which are quantized separately and stored one
    after the other."""

    kv_format: KVFormat
    widths: tuple[int, ...]  # values of each part

    @property
    def elements(self) -> int:
        """Number of elements of a stored key."""
        return sum(map(self.kv_format.elements, self.widths))

    def rounded(self, keys: Tensor) -> Tensor:
        """Return `keys` [..., sum of widths] of the model's dtype in this format: [..., elements]."""
        if len(self.widths) == 1:
            return self.kv_format.rounded(keys)
        return torch.cat([self.kv_format.rounded(part) for part in keys.split(self.widths, -1)], -1)

    def parts(self, rows: Tensor) -> list[Tensor]:
        """Return the parts of stored keys [..., elements], each [..., elements of the part]."""
        return list(rows.split([self.kv_format.elements(width) for width in self.widths], -1))

    def dequantized(self, rows: Tensor) -> Tensor:
        """Return the keys of stored rows: float32 [..., sum of widths]."""
        return torch.cat([dequantized(self.kv_format, part) for part in self.parts(rows)], -1)
