"""The forms of keys and values in KV memory, by name: as they are, or rounded to 8 bits (`--kv-cache-dtype`).

A row is one KV head's key or value of one token. It is rounded by itself, so what a page holds depends on nothing but
the token: not on the tokens that share its block, nor on how its prompt was cut into chunks. These operations of torch
define the numbers; the C++ kernels (`csrc/attention/pages.h`) store the same bits.
"""

from typing import Protocol

import torch
from torch import Tensor

from oarlock.workers.platform.dtypes import ITEM_BYTES, row_bytes

_LARGEST_E4M3 = 448.0


class KVFormat(Protocol):
    """Storage format of a row of numbers [D] in the pages of backends that compute with torch."""

    def elements(self, head_dim: int) -> int:
        """Elements of a stored row."""

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        """The type of these elements."""

    def rounded(self, x: Tensor) -> Tensor:
        """Rows `x` [..., D] in the model's dtype as they are stored: [..., elements]."""

    def numbers(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """Stored rows -> numbers [..., D] that `dtype` holds exactly, and the scales float32 [...] to multiply them by.

        No scales: 1.
        """


class Unrounded:
    """Rows stored in the model's dtype."""

    def elements(self, head_dim: int) -> int:
        return head_dim

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return model_dtype

    def rounded(self, x: Tensor) -> Tensor:
        return x

    def numbers(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        return rows.to(dtype), None


class Int8:
    """Whole numbers from -127 to 127, then their scale in bfloat16: the row's largest size / 127, rounded up, so that
    no number is beyond 127. A row with a number that is not finite has scale NaN."""

    def elements(self, head_dim: int) -> int:
        return row_bytes("int8", head_dim, 1)

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return torch.uint8

    def rounded(self, x: Tensor) -> Tensor:
        scales = (x.float().abs().amax(-1, keepdim=True) / 127).view(torch.int32)  # bits of floats from 0 on
        scales = ((scales + 0xFFFF) >> 16).to(torch.int16).view(torch.bfloat16)  # [..., 1]
        finite = x.isfinite().all(-1, keepdim=True)
        divisors = torch.where(finite & (scales > 0), scales.float(), 1.0)
        values = torch.where(finite, x.float() / divisors, 0.0).round().to(torch.int8)  # ties to even
        scales = torch.where(finite, scales, torch.nan)
        return torch.cat([values.view(torch.uint8), scales.view(torch.uint8)], -1)

    def numbers(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        values, scales = rows[..., :-2].view(torch.int8), rows[..., -2:].contiguous().view(torch.bfloat16)
        # From -1 to 1, so that products in float16 do not overflow.
        return values.to(dtype) / 128, scales.squeeze(-1).float() * 128


class Fp8:
    """e4m3: sign, 4 bits of exponent, 3 of mantissa. What is beyond 448, the largest number, becomes 448, and what is
    not finite NaN."""

    def elements(self, head_dim: int) -> int:
        return head_dim

    def dtype(self, model_dtype: torch.dtype) -> torch.dtype:
        return torch.uint8

    def rounded(self, x: Tensor) -> Tensor:
        kept = x.float().clamp(-_LARGEST_E4M3, _LARGEST_E4M3)
        return torch.where(x.isfinite(), kept, torch.nan).to(torch.float8_e4m3fn).view(torch.uint8)

    def numbers(self, rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        return rows.view(torch.float8_e4m3fn).to(dtype), None


ROUNDED: dict[str, KVFormat] = {"int8": Int8(), "fp8": Fp8()}
FORMATS: dict[str, KVFormat] = dict.fromkeys(("auto", *ITEM_BYTES), Unrounded()) | ROUNDED


def dequantized(form: KVFormat, rows: Tensor) -> Tensor:
    """The keys or values that stored rows stand for: float32 [..., D]."""
    numbers, scales = form.numbers(rows, torch.float32)
    return numbers if scales is None else numbers * scales.unsqueeze(-1)
