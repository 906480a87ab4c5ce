"""Whether a loaded tensor is all finite numbers, for the price of one sum.

A NaN or an infinity anywhere makes the sum of its tensor one too, and a sum runs at the speed of memory; an element by
element test costs thirty times as much. Finite values can overflow a sum as well, so a suspect is looked at closely.
Knows tensors; does not know files or names.
"""

import math

import torch
from torch import Tensor


def first_not_finite(x: Tensor) -> tuple[int, ...] | None:
    """The index of the first NaN or infinity in `x`, None when there is none."""
    if math.isfinite(float(x.sum())):
        return None
    bad = torch.isfinite(x).logical_not_()
    place = int(bad.flatten().int().argmax())
    if not bad.flatten()[place]:
        return None  # large numbers whose sum overflowed
    return tuple(int(index) for index in torch.unravel_index(torch.tensor(place), x.shape))
