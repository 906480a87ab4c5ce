"""Attention of encoders: every token of a text attends to all of them, or to those near it, in both directions.

No pages and no state: keys and values are those of the step, which has each text whole. Texts are computed one by one,
and long ones with a reach in blocks at fixed places, so that a text's bits depend on nothing else in the step.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.platform import processor

_BLOCK = 512  # queries at a time, where a token attends to its neighbourhood alone


def attend_both_ways(q: Tensor, k: Tensor, v: Tensor, lens: Sequence[int], reach: int | None, scale: float) -> Tensor:
    """Attends to both sides within each text: `q`, `k`, `v` [T, H, D] -> [T, H * D] of `q`'s type.

    `lens`: how many of the T tokens are each text's. `reach`: to how many tokens on each side a token attends; None: to
    all. `scale`: of scores.
    """
    mixed = torch.empty_like(q)
    # Products of 16 bits are summed in float32. Where the processor would emulate them they are made of float32.
    dtype = q.dtype if q.device.type != "cpu" or processor.here().multiplies(_name(q.dtype)) else torch.float32
    start = 0
    for length in lens:
        text = slice(start, start + length)
        # [1, H, n, D], as torch's attention takes it
        parts = [x[text].to(dtype).transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
        mixed[text] = _of_text(*parts, reach, scale).squeeze(0).transpose(0, 1)
        start += length
    return mixed.flatten(1)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _of_text(q: Tensor, k: Tensor, v: Tensor, reach: int | None, scale: float) -> Tensor:
    """Attends within one text: `q`, `k`, `v` [1, H, n, D] -> [1, H, n, D]."""
    length = q.shape[2]
    if reach is None or reach >= length - 1:
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
    places = torch.arange(length, device=q.device)
    blocks = []
    for start in range(0, length, _BLOCK):
        own = slice(start, min(start + _BLOCK, length))
        near = slice(max(0, start - reach), min(own.stop + reach, length))
        mask = (places[own, None] - places[None, near]).abs() <= reach  # [block, keys]
        blocks.append(
            F.scaled_dot_product_attention(q[:, :, own], k[:, :, near], v[:, :, near], attn_mask=mask, scale=scale)
        )
    return torch.cat(blocks, 2)
