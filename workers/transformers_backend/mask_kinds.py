"""The kind of a mask of attention, found from its values: a class may build its mask in any way.

transformers describes a mask by a function of a query's and a key's position. It is computed for all pairs of the first
positions and for a few queries that are far away, and compared with the masks that the attention backends know.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

NEAR = 64  # all pairs of these first positions are compared
# Queries that are compared with all keys up to them. Their distances differ, so a window has other values than chunks.
FAR = (262_143, 262_142, 261_120, 200_000)

MaskFunction = Callable[[Any, Any, Any, Any], Any]  # of batch, head, query position, key position


class MaskKind(NamedTuple):
    """A causal mask, with or without a window, or another one."""

    window: int | None = None  # latest tokens that a query sees, itself included; None: all
    other: str | None = None  # set if the mask is none of these: what it does instead, for a message


def mask_kind(function: MaskFunction) -> MaskKind:
    """Return the kind of the mask that `function` describes, judged by its values."""
    near = torch.arange(NEAR)
    try:
        rows = [(near[:, None], near[None], _values(function, near[:, None], near[None]))]
        for position in FAR:
            query, key = torch.tensor([[position]]), torch.arange(position + 1)[None]
            rows.append((query, key, _values(function, query, key)))
    except Exception as error:  # the function is the class's code, which may raise anything
        return MaskKind(other=f"cannot be computed ({type(error).__name__})")
    if any(bool((found & (key > query)).any()) for query, key, found in rows):
        return MaskKind(other="lets tokens see later ones")
    seen = int(rows[1][2].sum())  # keys that the first of the far queries sees
    if all(torch.equal(found, (key <= query) & (query - key < seen)) for query, key, found in rows):
        return MaskKind(None if seen == FAR[0] + 1 else seen)
    return MaskKind(other="hides earlier tokens in a way that no backend knows")


def _values(function: MaskFunction, query: Tensor, key: Tensor) -> Tensor:
    """Return the mask of the positions `query` [Q, 1] and `key` [1, K] as bool [Q, K]."""
    query, key = torch.broadcast_tensors(query, key)
    zeros = torch.zeros(query.numel(), dtype=torch.int64)
    found = torch.as_tensor(function(zeros, zeros, query.reshape(-1), key.reshape(-1)))
    return found.cpu().expand(query.numel()).reshape(query.shape).bool()
