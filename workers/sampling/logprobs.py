"""Log-probabilities of the raw distribution, for the rows that ask: a token's own, its rank, and the best few.

Works on shards: each rank contributes the sum of its exponentials, its best few and its counts. Rows go through in
small groups, so that scoring a long prompt does not double the memory of its logits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.parallel import TensorParallel
from workers.sampling.candidates import BLOCK, best, block_maxima, decode, take_blocks

_ROWS_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """For R rows; every rank holds the same."""

    logprobs: Tensor  # float64 [R]
    ranks: Tensor  # int64 [R]   1 = most likely; equals share the best rank
    top_ids: Tensor  # int64 [R, K]
    top_logprobs: Tensor  # float64 [R, K]


def raw_logprobs(tp: TensorParallel, x: Tensor, first_id: int, rows: Tensor, tokens: Tensor, count: int) -> RawLogprobs:
    """Of `tokens` [R] in `rows` [R] of the raw local logits `x` [L, V], with the `count` most likely of each row."""
    parts = [
        _some(tp, x, first_id, rows[start : start + _ROWS_AT_ONCE], tokens[start : start + _ROWS_AT_ONCE], count)
        for start in range(0, len(rows), _ROWS_AT_ONCE)
    ]
    return RawLogprobs(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def _some(
    tp: TensorParallel, x: Tensor, first_id: int, rows: Tensor, tokens: Tensor, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    here = x[rows]  # [R, V]
    local = torch.arange(len(rows), device=x.device)
    maxima = block_maxima(here)
    top = maxima.amax(1)
    index = tokens - first_id
    ours = (index >= 0) & (index < x.shape[1])
    value = here[local, index.clamp(0, x.shape[1] - 1)].masked_fill(~ours, float("-inf"))
    keys = best(here, local, maxima, count, first_id) if count else tokens.new_empty(len(rows), 0)
    numbers = torch.stack([top.double(), exp_sum(here, top), value.double()], 1).view(torch.int64)
    gathered = tp.all_gather(torch.cat([numbers, keys], 1))  # [ranks, R, 3 + K]
    tops, sums, values = gathered[..., :3].contiguous().view(torch.float64).unbind(2)  # each [ranks, R]
    peak = tops.amax(0)
    total = peak + ((tops - peak).exp() * sums).sum(0).log()
    value = values.amax(0)  # [R]   of the one rank that has the token
    merged = gathered[..., 3:].transpose(0, 1).flatten(1).topk(count).values
    top_values, top_ids = decode(merged)
    ranks = 1 + tp.all_gather(_count_above(here, maxima, value.float())).sum(0)
    return value - total, ranks, top_ids, top_values.double() - total.unsqueeze(1)


def exp_sum(x: Tensor, top: Tensor, inverse_temperature: Tensor | None = None) -> Tensor:
    """Sum of exp((x - top) / temperature) per row: [R, V] -> float64 [R]. Zero where the row has no finite value."""
    shift = torch.where(top == float("-inf"), 0.0, top)
    weights = x - shift.unsqueeze(1)
    if inverse_temperature is not None:
        weights.mul_(inverse_temperature.unsqueeze(1))
    return block_sum(weights.exp_())


def block_sum(weights: Tensor) -> Tensor:
    """Row sums, short ones in float32 and sums of those in float64: quick, and good to a few parts in 10^8."""
    whole = weights.shape[1] // BLOCK * BLOCK
    sums = weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(-1) if whole else weights[:, :0]
    return sums.sum(1, dtype=torch.float64) + weights[:, whole:].sum(1, dtype=torch.float64)


def _count_above(x: Tensor, maxima: Tensor, value: Tensor) -> Tensor:
    """How many logits of each row are larger than `value` [R]: int64 [R]."""
    rows, blocks = (maxima > value.unsqueeze(1)).nonzero().unbind(1)
    counts = (take_blocks(x, rows, blocks)[0] > value[rows].unsqueeze(1)).sum(1)
    return torch.zeros_like(value, dtype=torch.int64).index_add_(0, rows, counts)
