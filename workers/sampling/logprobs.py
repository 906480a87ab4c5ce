"""Log-probabilities of the raw logits for the rows that want them: the token's, its rank, and the most likely ones.

Works on shards: each rank contributes its sums of exponentials, its largest logits and its counts.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.kernels.cpu.sampling import can_serve, log_totals
from oarlock.workers.sampling.candidates import decode
from oarlock.workers.sampling.logits_shard import LogitsShard, total_mass


@dataclass(frozen=True, slots=True)
class RawLogprobs:
    """Logprobs of R rows; the same on every rank."""

    logprobs: Tensor  # float64 [R]
    ranks: Tensor  # int64 [R]   1 = most likely; equal logits share the best rank
    top_ids: Tensor  # int64 [R, K]
    top_logprobs: Tensor  # float64 [R, K]


def raw_logprobs(tp: TensorParallel, shard: LogitsShard, rows: Tensor, tokens: Tensor, count: int) -> RawLogprobs:
    """Logprobs of `tokens` [R] in `rows` [R] of the raw logits, with the `count` most likely of each row."""
    index = tokens - shard.first_id
    width = shard.x.shape[1]
    ours = (index >= 0) & (index < width)
    value = shard.x[rows, index.clamp(0, width - 1)].masked_fill(~ours, float("-inf"))
    keys = shard.best(rows, count) if count else tokens.new_empty(len(rows), 0)
    numbers = torch.stack([shard.top[rows].double(), value.double()], 1).view(torch.int64)
    gathered = tp.all_gather(torch.cat([numbers, keys], 1))  # [ranks, R, 2 + K]
    tops, values = gathered[..., :2].contiguous().view(torch.float64).unbind(2)  # each [ranks, R]
    peak = tops.amax(0)
    mass = total_mass(tp, shard, rows, torch.ones_like(peak), peak.float())
    total = log_totals(peak, mass) if can_serve(peak.device) else peak + mass.log()
    value = values.amax(0)  # [R]   only one rank has the token
    merged = gathered[..., 2:].transpose(0, 1).flatten(1).topk(count).values
    top_values, top_ids = decode(merged)
    ranks = 1 + tp.all_gather(shard.count_above(rows, value.float())).sum(0)
    return RawLogprobs(value - total, ranks, top_ids, top_values.double() - total.unsqueeze(1))
