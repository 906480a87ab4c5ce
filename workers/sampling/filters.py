"""Drawing from the tokens that min-p, top-k and top-p keep, without sorting the vocabulary.

The kept set is always a prefix of the order (larger logit first, then lower id). A short list of candidates nearly
always holds it, and says whether it does. Where it does not, either the list grows (top-k asks for more), or the row
draws in rounds: a draw from the whole min-p set is a draw from the nucleus whenever it lands there, and whether it did
takes one sum, the mass of the tokens before it. A draw that missed becomes the new end of the row, which draws again.

Every rank runs the same rounds, decided from gathered numbers alone. Kept sets are decided in float64. What remains is
the sum over a whole vocabulary: its float32 exponentials are added rank by rank, so a nucleus may end one token
earlier or later at another number of ranks when its mass meets top-p to within about one part in 10^7.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from workers.parallel import TensorParallel
from workers.sampling.candidates import best, block_maxima, decode
from workers.sampling.logprobs import block_sum
from workers.sampling.noise import Noise, gumbel, mixed_ids, noise_bits

CANDIDATES = 64  # per rank and row: more than a usual top-k and than most nuclei
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
        """The smallest logit that min-p keeps beside the largest, `peak` [R]: float64 [R], -inf where it is off."""
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
    # The list holds all that min-p and top-k keep; else its mass is only known if neither is in force.
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
    """Tokens of rows whose top-k is beyond the short list: int64 [R]. The list is as long as the largest of them."""
    tokens = []
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        some = filters.take(torch.arange(start, min(start + _ROWS_AT_ONCE, len(rows)), device=rows.device))
        here = rows[start : start + _ROWS_AT_ONCE]
        count = int(some.top_k.max())
        keys = best(x, here, block_maxima(x[here]), count, first_id)
        merged = tp.all_gather(keys).transpose(0, 1).flatten(1).topk(count).values
        tokens.append(draw_from_list(merged, some, some.top_p)[0])  # top-k makes the list whole: no total is needed
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


def _rounds(
    tp: TensorParallel, noise: Noise, left: Tensor, peak: Tensor, filters: Filters, first_id: int
) -> Tensor:
    """`left` [R, V] is this rank's own copy: what can no longer be drawn becomes -inf in it."""
    left.masked_fill_(left < _rounded_up(filters.lowest(peak)).unsqueeze(1), float("-inf"))
    scale = filters.temperature.reciprocal().float()
    weights = (left - peak.unsqueeze(1)).mul_(scale.unsqueeze(1)).exp_()  # [R, V]
    total = tp.all_gather(block_sum(weights)).sum(0)  # [R]
    ids = torch.arange(first_id, first_id + left.shape[1], device=left.device)
    tokens = torch.zeros(len(left), dtype=torch.int64, device=left.device)
    pending = torch.arange(len(left), device=left.device)
    while len(pending):
        some = filters.take(pending)
        scores, local = noise.argmax(left, pending, block_maxima(left[pending]), some.temperature, some.keys)
        answers = torch.stack([scores, left[pending, local].double(), (local + first_id).double()])
        gathered = tp.all_gather(answers)  # [ranks, 3, R]
        winner = gathered[:, 0].argmax(0, keepdim=True)
        value = gathered[:, 1].gather(0, winner).float().transpose(0, 1)  # [R, 1]
        token = gathered[:, 2].gather(0, winner).long().transpose(0, 1)
        here = left[pending]
        earlier = (here > value) | ((here == value) & (ids < token))  # [R, V]
        before = tp.all_gather(block_sum(weights[pending].masked_fill_(~earlier, 0.0))).sum(0)
        inside = (before < some.top_p * total[pending]) | (some.top_p >= 1) | (before == 0)
        tokens[pending[inside]] = token.squeeze(1)[inside]
        pending = pending[~inside]
        left[pending] = left[pending].masked_fill_(~earlier[~inside], float("-inf"))
    return tokens


def _rounded_up(value: Tensor) -> Tensor:
    """The smallest float32 that is not below a float64: comparing with it decides as float64 would."""
    near = value.float()
    above = torch.nextafter(near, torch.full_like(near, float("inf")))
    return torch.where(near.double() < value, above, near)
