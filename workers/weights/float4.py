"""Values of MXFP4: 4-bit floats (e2m1), 32 of which share a scale, a power of two stored in 8 bits.

They are read as integers of twice the value, from -12 to 12, with half the scale.
"""

import torch
from torch import Tensor

GROUP = 32  # values that share a scale
NOT_A_NUMBER = 255  # scale that means NaN
# A scale is 2 ** (stored - 127), and half of it applies to the doubled values.
_BIAS = 128
_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # doubled value of each of the sixteen bit patterns
_MOST = 12


def twice(bits: Tensor) -> Tensor:
    """Return the doubled values of `bits` uint8, each below 16: int8 of the same shape."""
    return torch.tensor(_TWICE, dtype=torch.int8)[bits.int()]


def scales_of(exponents: Tensor) -> Tensor:
    """Return stored scales, uint8, as factors of doubled values: float32 of the same shape."""
    return torch.pow(2.0, exponents.double() - _BIAS).float()


def unpacked(pairs: Tensor) -> Tensor:
    """Unpack uint8 [N, K / 2], the first of two values in the low half, to doubled values, int8 [N, K]."""
    all_pairs = torch.arange(256, dtype=torch.uint8)
    both = twice(torch.stack((all_pairs & 15, all_pairs >> 4), 1)).view(torch.int16).flatten()
    return both[pairs.int()].view(torch.int8)


def packed(values: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Invert `unpacked` and `scales_of`: return uint8 [N, K / 2], and uint8 [N, groups], which is 0 if a scale is 0."""
    bits = torch.tensor([_TWICE.index(value) if value in _TWICE else 0 for value in range(-_MOST, _MOST + 1)])
    low, high = bits.to(torch.uint8)[values.int() + _MOST].unflatten(1, (-1, 2)).unbind(2)
    _, exponents = torch.frexp(scales)  # n + 1 for a scale of 2 ** n
    exponents = (exponents + (_BIAS - 1)).clamp(0, NOT_A_NUMBER - 1)
    return low | high << 4, torch.where(scales == 0, 0, exponents).to(torch.uint8)
