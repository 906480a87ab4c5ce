"""Sampling from the tokens that floors, top-k and top-p keep, without sorting the vocabulary.

The kept set is always a prefix of the ids in the order of logits (largest first, then lowest id). A short list of
candidates nearly always contains it, and whether it does is known. Otherwise either a longer list is used (top-k), or
the row is sampled in rounds (rejection sampling): a sample from all ids above the floor that falls into the nucleus is
a sample from the nucleus, and one sum decides whether it does, the probability mass of the tokens before it. After a
rejected sample it and everything after it are excluded, and the row is sampled again.

Every rank runs the same rounds, decided only by gathered values. Kept sets are decided in float64, except for sums over
a whole vocabulary: they add float32 exponentials, in blocks in float32 and the blocks in float64, slice by slice of the
vocabulary. The C++ kernels compute everything that rounds, here as for a single rank (`sample_row.h`), so the bits are
the same for every number of ranks that hold whole slices. On another device, or with kernels of another ISA level, a
nucleus may end one token earlier or later if its mass equals top-p to within about one part in 10^7.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.kernels.cpu.sampling import can_serve, draw_from_lists
from oarlock.workers.sampling.candidates import decode
from oarlock.workers.sampling.logits_shard import LogitsShard, total_mass
from oarlock.workers.sampling.noise import gumbel, mixed_ids, noise_bits
from oarlock.workers.sampling_parameters import RowColumns

CANDIDATES = 64  # per rank and row; more than usual values of top-k and than most nuclei have
_ROWS_AT_ONCE = 8
_ALL_IDS = 2**31 - 1  # larger than every id


@dataclass(slots=True)
class Filters(RowColumns[Tensor]):
    """Sampling columns of R rows, on the device: float64 and int64."""

    keys: Tensor  # int32 [R, 2]   keys of the noise
    floor: Tensor  # float64 [R]   smallest logit that is kept; -inf: none, or not known yet

    def take(self, rows: Tensor) -> "Filters":
        return Filters(**{column.name: getattr(self, column.name)[rows] for column in fields(self)})


def draw_from_list(keys: Tensor, filters: Filters, total: Tensor) -> tuple[Tensor, Tensor]:
    """Return a token per row, sampled from its candidates, and whether they were enough: int64 [R], bool [R].

    `keys` [R, C]: the best of all ranks, best first. `total` [R]: sum(exp((x - largest) / temperature)).
    """
    if can_serve(keys.device):
        f = filters
        return draw_from_lists(keys, f.temperature, f.top_p, f.top_k, f.floor, f.keys, total)
    return draw_from_list_with_torch(keys, filters, total)


def draw_from_list_with_torch(keys: Tensor, filters: Filters, total: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `draw_from_list` with torch operations, for every device; tests compare the kernel with it."""
    values, ids = decode(keys)
    peak = values[:, :1].double()
    lowest = filters.floor.unsqueeze(1)
    logits = values.double()  # [R, C]
    top_k, top_p = filters.top_k.unsqueeze(1), filters.top_p.unsqueeze(1)
    index = torch.arange(keys.shape[1], device=keys.device)
    kept = (logits >= lowest) & (logits > float("-inf")) & ((index < top_k) | (top_k == 0))
    scaled = (logits - peak) / filters.temperature.unsqueeze(1)
    mass = scaled.exp().masked_fill(~kept, 0.0)
    last = logits[:, -1]
    # The list contains all ids that floor and top-k keep. If not, the total mass is only known if both are off.
    whole = (last < lowest.squeeze(1)) | (last == float("-inf"))
    whole |= (filters.top_k > 0) & (filters.top_k <= keys.shape[1])
    plain = (filters.top_k == 0) & filters.floor.isneginf()
    target = top_p * torch.where(whole, mass.sum(1), total).unsqueeze(1)
    before = mass.cumsum(1) - mass
    kept &= (before < target) | (top_p >= 1) | (index == 0)
    enough = whole | (plain & ~kept[:, -1])
    noise = gumbel(noise_bits(mixed_ids(ids), filters.keys))
    winner = (scaled + noise).masked_fill_(~kept, float("-inf")).argmax(1, keepdim=True)
    return ids.gather(1, winner).squeeze(1), enough


def draw_from_long_list(tp: TensorParallel, shard: LogitsShard, rows: Tensor, filters: Filters) -> Tensor:
    """Return tokens int64 [R] of rows whose top-k is longer than the short list, from lists of the largest top-k."""
    tokens = []
    for here in torch.arange(len(rows), device=rows.device).split(_ROWS_AT_ONCE):
        some = filters.take(here)
        count = int(some.top_k.max())
        merged = tp.all_gather(shard.best(rows[here], count)).transpose(0, 1).flatten(1).topk(count).values
        tokens.append(draw_from_list(merged, some, some.top_p)[0])  # complete: the total is not used
    return torch.cat(tokens)


def draw_in_rounds(
    tp: TensorParallel, shard: LogitsShard, rows: Tensor, peak: Tensor, filters: Filters, totals: Tensor
) -> Tensor:
    """Return tokens of rows without top-k whose kept set is long: int64 [R].

    `peak` [R]: each row's largest logit. `totals` [R]: the mass of the whole row, if it has no floor. Each round
    samples from the remaining part of the order of logits: first from all ids that reach the floor, then from the ids
    before the rejected token.
    """
    low = _rounded_up(filters.floor)
    end = torch.where(low == float("-inf"), 0, _ALL_IDS)
    bounded = (~filters.floor.isneginf() & (filters.top_p < 1)).nonzero().squeeze(1)
    if len(bounded):
        left = low[bounded], end[bounded]
        mass = total_mass(tp, shard, rows[bounded], filters.temperature[bounded], peak[bounded], left)
        totals = totals.index_copy(0, bounded, mass)
    tokens = torch.zeros_like(rows)
    pending = torch.arange(len(rows), device=rows.device)
    while len(pending):
        some, which = filters.take(pending), rows[pending]
        scores, local = shard.draw(which, some.temperature, some.keys, low[pending], end[pending])
        answers = torch.stack([scores, shard.x[which, local].double(), (local + shard.first_id).double()])
        gathered = tp.all_gather(answers)  # [ranks, 3, R]
        winner = gathered[:, 0].argmax(0, keepdim=True)
        low[pending] = gathered[:, 1].gather(0, winner).squeeze(0).float()
        end[pending] = tokens[pending] = gathered[:, 2].gather(0, winner).squeeze(0).long()
        pending = pending[some.top_p < 1]
        some, which = filters.take(pending), rows[pending]
        if len(pending):
            left = low[pending], end[pending]
            before = total_mass(tp, shard, which, some.temperature, peak[pending], left)
            pending = pending[(before >= some.top_p * totals[pending]) & (before > 0)]
    return tokens


def _rounded_up(value: Tensor) -> Tensor:
    """Return the smallest float32 that is not below a float64: comparing float32 values with it gives the same
    results."""
    near = value.float()
    above = torch.nextafter(near, torch.full_like(near, float("inf")))
    return torch.where(near.double() < value, above, near)
