"""One rank's logits of a step, and the operations that sampling needs: with torch, or with the C++ kernels.

Rows are indices, int64 [R]. A method with `low` and `end` only uses the remaining part of a row in the order of logits:
ids whose logit is above `low`, and ids with logit `low` that are below `end`.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.kernels.cpu.sampling import KernelLogitsShard, can_serve
from oarlock.workers.kernels.cpu.sampling import floors as kernel_floors
from oarlock.workers.sampling.candidates import BLOCK, argmax, best, block_maxima, is_left, take_blocks
from oarlock.workers.sampling.noise import Noise
from oarlock.workers.sampling_parameters import RowColumns

_ROWS_AT_ONCE = 8


class LogitsShard(Protocol):
    """Float32 logits `x` [L, V] of the ids from `first_id` on. `x` is not copied, and must not change."""

    x: Tensor
    first_id: int
    top: Tensor  # float32 [L]   largest logit; NaN or +inf if any logit is NaN or +inf

    def argmax(self, rows: Tensor) -> Tensor:
        """Return the lowest local id of the largest logit: int64 [R]; any id if the largest logit is not finite."""
        ...

    def best(self, rows: Tensor, count: int) -> Tensor:
        """Return the keys of the `count` largest logits, best first: int64 [R, count], see `candidates.encode`."""
        ...

    def draw(self, rows: Tensor, temperature: Tensor, keys: Tensor, low: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        """Return the largest `x / temperature + noise` of the remaining part, float64 [R], and its local id.

        The score is -inf if nothing remains. `temperature` float64 [R], `keys` of the noise int32 [R, 2], `low` float32
        [R], `end` int64 [R].
        """
        ...

    def mass(self, rows: Tensor, temperature: Tensor, peak: Tensor, low: Tensor, end: Tensor) -> Tensor:
        """Return sum(exp((x - peak) / temperature)) of the remaining part: float64 [R, slices].

        The caller adds the slices in order. `peak` float32 [R]: the largest logits over all ranks. The mass is 0 for
        rows whose peak is not finite.
        """
        ...

    def spread(self, rows: Tensor) -> Tensor:
        """Return number, sum and sum of squares of the logits that are not -inf: float64 [R, slices, 3].

        Within a slice the order of additions is the order of `slice_spread` (csrc/sampling/sample_row.h), so that the
        bits are the same for every number of ranks, ISA level and device.
        """
        ...

    def count_above(self, rows: Tensor, values: Tensor) -> Tensor:
        """Return the number of logits that are larger than `values` float32 [R]: int64 [R]."""
        ...


class TorchLogitsShard:
    """`LogitsShard` with torch operations, for every device."""

    def __init__(self, x: Tensor, first_id: int, slice_length: int, noise: Noise) -> None:
        self.x = x
        self.first_id = first_id
        self._slice_length = slice_length
        self._noise = noise
        self._maxima = block_maxima(x)  # [L, B]
        self.top = self._maxima.amax(1)

    def argmax(self, rows: Tensor) -> Tensor:
        return argmax(self.x, rows, self._maxima[rows])

    def best(self, rows: Tensor, count: int) -> Tensor:
        parts = [best(self.x, some, self._maxima[some], count, self.first_id) for some in rows.split(_ROWS_AT_ONCE)]
        return torch.cat(parts) if parts else rows.new_empty(0, count)

    def draw(self, rows: Tensor, temperature: Tensor, keys: Tensor, low: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
        return self._noise.argmax(self.x, rows, self._maxima[rows], temperature, keys, low, end - self.first_id)

    def mass(self, rows: Tensor, temperature: Tensor, peak: Tensor, low: Tensor, end: Tensor) -> Tensor:
        """Sum the shard as one slice.

        torch's softmax is several times faster than its exp. Its own sum is not exact enough, but cancels here.
        """
        masses = torch.zeros_like(temperature)
        ids = torch.arange(self.x.shape[1], device=self.x.device)
        low, end = low.unsqueeze(1), (end - self.first_id).unsqueeze(1)
        scale = temperature.reciprocal().clamp(max=torch.finfo(torch.float32).max).float().unsqueeze(1)
        step = 1 if self.x.device.type == "cpu" else _ROWS_AT_ONCE  # one row stays in the cache
        for start in range(0, len(rows), step):
            some = slice(start, start + step)
            x, top = self.x[rows[some]], self.top[rows[some]].unsqueeze(1)
            weights = ((x - top) * scale[some]).softmax(1)
            largest = weights.amax(1).double()
            if not (torch.isneginf(low[some]) & (end[some] <= 0)).all():  # some ids are excluded
                weights.masked_fill_(~is_left(x, ids, low[some], end[some]), 0.0)
            lower = (top.squeeze(1).double() - peak[some].double()) / temperature[some]
            masses[some] = (_sums(weights) / largest * lower.exp()).masked_fill_(~peak[some].isfinite(), 0.0)
            masses[some] = masses[some].masked_fill(torch.isneginf(top.squeeze(1)), 0.0)
        return masses.unsqueeze(1)

    def spread(self, rows: Tensor) -> Tensor:
        slices = -(-self.x.shape[1] // self._slice_length)
        length = -(-self._slice_length // BLOCK) * BLOCK
        spreads = torch.empty((len(rows), slices, 3), dtype=torch.float64, device=self.x.device)
        for index, row in enumerate(rows.tolist()):
            parts = self.x[row].split(self._slice_length)
            whole = torch.stack([F.pad(part, (0, length - len(part)), value=float("-inf")) for part in parts])
            counts = whole > float("-inf")
            values = whole.double().masked_fill_(~counts, 0.0)
            lanes = torch.zeros((slices, 2, BLOCK), dtype=torch.float64, device=self.x.device)
            for block in torch.stack([values, values * values], 1).split(BLOCK, 2):
                lanes += block
            while lanes.shape[2] > 1:
                half = lanes.shape[2] // 2
                lanes = lanes[..., :half] + lanes[..., half:]
            spreads[index] = torch.cat([counts.sum(1, keepdim=True).double(), lanes.squeeze(2)], 1)
        return spreads

    def count_above(self, rows: Tensor, values: Tensor) -> Tensor:
        which, blocks = (self._maxima[rows] > values.unsqueeze(1)).nonzero().unbind(1)
        counts = (take_blocks(self.x, rows[which], blocks) > values[which].unsqueeze(1)).sum(1)
        return torch.zeros_like(rows).index_add_(0, which, counts)


def _sums(weights: Tensor) -> Tensor:
    """Return row sums, float64 [R]: blocks are summed in float32, and their sums in float64.

    The result is exact to a few parts in 10^8.
    """
    whole = weights.shape[1] // BLOCK * BLOCK
    sums = weights[:, :whole].unflatten(1, (-1, BLOCK)).sum(2).sum(1, dtype=torch.float64)
    return sums + weights[:, whole:].sum(1, dtype=torch.float64)


class LogitsShards:
    """Maker of the shards of one rank's slice of the vocabulary, with the kernels if they are loaded."""

    def __init__(self, first_id: int, count: int, slice_length: int) -> None:
        self.first_id = first_id
        self._count = count
        self._slice_length = slice_length
        self._noise: Noise | None = None  # created on the device of the first logits

    def __call__(self, x: Tensor) -> LogitsShard:
        if can_serve(x.device):
            return KernelLogitsShard(x, self.first_id, self._slice_length)
        if self._noise is None:
            self._noise = Noise(self.first_id, self._count, x.device)
        return TorchLogitsShard(x, self.first_id, self._slice_length, self._noise)


def floors(tp: TensorParallel, shard: LogitsShard, rows: Tensor, peak: Tensor, columns: RowColumns[Tensor]) -> Tensor:
    """Return bounds below which `rows` keep no logits: float64 [R]; -inf: no bound.

    `peak` float32 [R]: the largest logits over all ranks; columns are float64 [R].
    """
    spreads = torch.zeros((len(rows), 3), dtype=torch.float64, device=peak.device)
    wanted = (columns.top_n_sigma > 0).nonzero().squeeze(1)
    if len(wanted):
        for part in tp.all_gather(shard.spread(rows[wanted])).transpose(1, 2).flatten(0, 1):  # [R, 3] of each slice
            spreads[wanted] += part
    if can_serve(peak.device):
        return kernel_floors(peak, columns, spreads)
    count, total, squares = spreads.unbind(1)
    mean = total / count
    distance = columns.top_n_sigma * (squares / count - mean * mean).clamp(min=0).sqrt()
    bound = torch.where(columns.top_n_sigma > 0, peak.double() - distance, float("-inf"))
    return torch.maximum(peak.double() + columns.temperature * columns.min_p.log(), bound)


def total_mass(
    tp: TensorParallel,
    shard: LogitsShard,
    rows: Tensor,
    temperature: Tensor,
    peak: Tensor,
    left: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Return `mass` over all ranks, float64 [R], added slice by slice as in `masses_of` (csrc/sampling/logits_row.h).

    `left`: (`low`, `end`), or None for all ids.
    """
    low, end = left or (torch.full_like(peak, float("-inf")), torch.zeros_like(rows))
    parts = tp.all_gather(shard.mass(rows, temperature, peak, low, end))  # [ranks, R, slices]
    total = torch.zeros_like(temperature)
    for part in parts.transpose(1, 2).flatten(0, 1):
        total = total + part
    return total
