"""Sampling from the tokens that min-p, top-k and top-p keep, without sorting the vocabulary.

The kept set is always a prefix of the ids in order of logit (largest first, then lowest id). A short list of
candidates nearly always contains it, and it is known whether it does. Otherwise either a longer list is taken (top-k),
or the row is sampled in rounds (rejection sampling): a sample from the whole min-p set that lies in the nucleus is a
sample from the nucleus, and whether it lies there takes one sum, the probability mass of the tokens before it. After a
rejected sample everything from it on is excluded, and the row is sampled again.

Every rank runs the same rounds, decided from gathered numbers alone. Kept sets are decided in float64, except for the
sum over a whole vocabulary: its float32 exponentials are added rank by rank, so with another number of ranks a nucleus
may end one token earlier or later if its mass equals top-p to within about one part in 10^7.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from workers.distributed.parallel_state import TensorParallel
from workers.sampling.candidates import BLOCK, best, block_maxima, decode
from workers.sampling.logprobs import softmax_and_sum
from workers.sampling.noise import Noise, gumbel, mixed_ids, noise_bits

CANDIDATES = 64  # per rank and row; more than usual values of top-k and most nuclei have
_ROWS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Filters:
    """Sampling columns of R rows, on the device."""

    temperature: Tensor  # float64 [R]
    top_p: Tensor  # float64 [R]   1: off
    top_k: Tensor  # int64 [R]   0: off
    min_p: Tensor  # float64 [R]   0: off
    keys: Tensor  # int32 [R, 2]   of the noise

    def take(self, rows: Tensor) -> "Filters":
        return Filters(*(getattr(self, column.name)[rows] for column in fields(self)))

    def lowest(self, peak: Tensor) -> Tensor:
        """The smallest logit that min-p keeps, from the largest `peak` [R]: float64 [R], -inf where min-p is off."""
        return peak.double() + self.temperature * self.min_p.log()


def draw_from_list(keys: Tensor, filters: Filters, total: Tensor) -> tuple[Tensor, Tensor]:
    """A token per row from its candidates, and whether they were enough: int64 [R], bool [R].

    `keys` [R, C] are the best of all ranks, best first; `total` [R] is sum(exp((x - largest) / temperature)).
    """
    values, ids = decode(keys)
    peak = values[:, :1].double()
    lowest = filters.lowest(peak.squeeze(1)).unsqueeze(1)
    logits = values.double()  # [R, C]
    top_k, top_p = filters.top_k.unsqueeze(1), filters.top_p.unsqueeze(1)
    place = torch.arange(keys.shape[1], device=keys.device)
    kept = (logits >= lowest) & (logits > float("-inf")) & ((place < top_k) | (top_k == 0))
    scaled = (logits - peak) / filters.temperature.unsqueeze(1)
    mass = scaled.exp().masked_fill(~kept, 0.0)
    last = logits[:, -1]
    # The list contains all that min-p and top-k keep. If not, the total mass is only known when both are off.
    whole = (last < lowest.squeeze(1)) | (last == float("-inf"))
    whole |= (filters.top_k > 0) & (filters.top_k <= keys.shape[1])
    plain = (filters.top_k == 0) & (filters.min_p == 0)
    target = top_p * torch.where(whole, mass.sum(1), total).unsqueeze(1)
    before = mass.cumsum(1) - mass
    kept &= (before < target) | (top_p >= 1) | (place == 0)
    enough = whole | (plain & ~kept[:, -1])
    noise = gumbel(noise_bits(mixed_ids(ids), filters.keys))
    winner = (scaled + noise).masked_fill_(~kept, float("-inf")).argmax(1, keepdim=True)
    return ids.gather(1, winner).squeeze(1), enough


def draw_from_long_list(tp: TensorParallel, x: Tensor, rows: Tensor, filters: Filters, first_id: int) -> Tensor:
    """Tokens int64 [R] of rows whose top-k is longer than the short list, from lists of the largest top-k."""
    tokens = []
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        some = filters.take(torch.arange(start, min(start + _ROWS_AT_ONCE, len(rows)), device=rows.device))
        here = rows[start : start + _ROWS_AT_ONCE]
        count = int(some.top_k.max())
        keys = best(x, here, block_maxima(x[here]), count, first_id)
        merged = tp.all_gather(keys).transpose(0, 1).flatten(1).topk(count).values
        tokens.append(draw_from_list(merged, some, some.top_p)[0])  # complete: the total is not used
    return torch.cat(tokens)


def draw_in_rounds(
    tp: TensorParallel, noise: Noise, x: Tensor, rows: Tensor, peak: Tensor, filters: Filters, first_id: int
) -> Tensor:
    """Tokens of rows without top-k whose kept set is long: int64 [R]. `peak` [R] is each row's largest logit."""
    tokens = []
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        some = torch.arange(start, min(start + _ROWS_AT_ONCE, len(rows)), device=rows.device)
        tokens.append(_rounds(tp, noise, x[rows[some]], peak[some], filters.take(some), first_id))
    return torch.cat(tokens)


def _rounds(tp: TensorParallel, noise: Noise, left: Tensor, peak: Tensor, filters: Filters, first_id: int) -> Tensor:
    """`left` [R, V]: a copy of this rank's logits, in which excluded ids become -inf."""
    left.masked_fill_(left < _rounded_up(filters.lowest(peak)).unsqueeze(1), float("-inf"))
    nucleus = _Nucleus(tp, left, peak, filters) if bool((filters.top_p < 1).any()) else None
    tokens = torch.zeros(len(left), dtype=torch.int64, device=left.device)
    pending = torch.arange(len(left), device=left.device)
    while len(pending):
        some = filters.take(pending)
        maxima = block_maxima(left)[pending]
        scores, local = noise.argmax(left, pending, maxima, some.temperature, some.keys)
        answers = torch.stack([scores, left[pending, local].double(), (local + first_id).double()])
        gathered = tp.all_gather(answers)  # [ranks, 3, R]
        winner = gathered[:, 0].argmax(0, keepdim=True)
        values = gathered[:, 1].gather(0, winner).squeeze(0)
        tokens[pending] = gathered[:, 2].gather(0, winner).squeeze(0).long()
        if nucleus is None:
            break
        missed = nucleus.missed(pending, values, tokens[pending] - first_id)
        pending = pending[missed]
    return tokens


class _Nucleus:
    """Checks whether sampled tokens lie in the nucleus, and excludes everything from a rejected token on."""

    def __init__(self, tp: TensorParallel, left: Tensor, peak: Tensor, filters: Filters) -> None:
        top = left.amax(1)
        self._tp, self._left, self._top_p = tp, left, filters.top_p
        scale = filters.temperature.reciprocal().float().unsqueeze(1)
        self._weights, mass = softmax_and_sum(left * scale, top)
        self._mass = mass * ((top.double() - peak) / filters.temperature).exp()  # [R]   of this rank
        self._total = tp.all_gather(self._mass).sum(0)

    def missed(self, rows: Tensor, values: Tensor, local_ids: Tensor) -> Tensor:
        """Whether the tokens of `rows` [n], given by logit and local id, lie outside the nucleus: bool [n]."""
        later = []
        shares = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
        for place, (row, value, token) in enumerate(
            zip(rows.tolist(), values.tolist(), local_ids.tolist(), strict=True)
        ):
            here = self._left[row]
            split = min(max(token, 0), len(here))  # equal logits come before the token if their ids do
            later.append(torch.cat([here[:split] < value, here[split:] <= value]))
            shares[place] = _sum(self._weights[row].masked_fill(later[-1], 0.0))
        before = self._tp.all_gather(shares * self._mass[rows]).sum(0)
        top_p = self._top_p[rows]
        missed = (before >= top_p * self._total[rows]) & (top_p < 1) & (before > 0)
        for place in missed.nonzero().squeeze(1).tolist():
            self._left[rows[place]].masked_fill_(later[place], float("-inf"))
        return missed


def _sum(weights: Tensor) -> Tensor:
    """The sum, of blocks in float32 and of their sums in float64: exact to a few parts in 10^8."""
    whole = len(weights) // BLOCK * BLOCK
    sums = weights[:whole].view(-1, BLOCK).sum(1).sum(dtype=torch.float64)
    return sums + weights[whole:].sum(dtype=torch.float64)


def _rounded_up(value: Tensor) -> Tensor:
    """The smallest float32 that is not below a float64: comparing float32 numbers with it gives the same results."""
    near = value.float()
    above = torch.nextafter(near, torch.full_like(near, float("inf")))
    return torch.where(near.double() < value, above, near)
