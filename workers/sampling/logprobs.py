"""Log-probabilities of the raw logits for the rows that want them: the token's, its rank, and the most likely ones.

Works on shards: each rank contributes its sum of exponentials, its largest logits and its counts. Rows are computed in
small groups, so that scoring a long prompt does not double the memory of its logits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from workers.distributed.parallel_state import TensorParallel
from workers.sampling.candidates import best, block_maxima, decode, take_blocks

_ROWS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """For R rows; the same on every rank."""

    logprobs: Tensor  # float64 [R]
    ranks: Tensor  # int64 [R]   1 = most likely; equal logits share the best rank
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
    numbers = torch.stack([top.double(), softmax_and_sum(here, top)[1], value.double()], 1).view(torch.int64)
    gathered = tp.all_gather(torch.cat([numbers, keys], 1))  # [ranks, R, 3 + K]
    tops, sums, values = gathered[..., :3].contiguous().view(torch.float64).unbind(2)  # each [ranks, R]
    peak = tops.amax(0)
    total = peak + ((tops - peak).exp() * sums).sum(0).log()
    value = values.amax(0)  # [R]   only one rank has the token
    merged = gathered[..., 3:].transpose(0, 1).flatten(1).topk(count).values
    top_values, top_ids = decode(merged)
    ranks = 1 + tp.all_gather(_count_above(here, maxima, value.float())).sum(0)
    return value - total, ranks, top_ids, top_values.double() - total.unsqueeze(1)


def softmax_and_sum(x: Tensor, top: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax of each row of `x` [R, V] with largest values `top` [R], and sum(exp(x - top)) as float64 [R].

    torch's softmax is several times faster than its exp, and the largest probability is one over that sum. Rows without
    a finite value give zeros.
    """
    weights = x.softmax(1)
    empty = top == float("-inf")
    weights.masked_fill_(empty.unsqueeze(1), 0.0)
    return weights, weights.amax(1).double().reciprocal().masked_fill_(empty, 0.0)


def _count_above(x: Tensor, maxima: Tensor, value: Tensor) -> Tensor:
    """How many logits of each row are larger than `value` [R]: int64 [R]."""
    rows, blocks = (maxima > value.unsqueeze(1)).nonzero().unbind(1)
    counts = (take_blocks(x, rows, blocks) > value[rows].unsqueeze(1)).sum(1)
    return torch.zeros_like(value, dtype=torch.int64).index_add_(0, rows, counts)
