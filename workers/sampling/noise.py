"""Random noise without state: the noise of a token is a function of (seed, position, vocabulary id) only.

Adding Gumbel noise to logits and taking the largest samples from their softmax (the Gumbel-max trick). Each id has its
own noise, so the sample does not depend on the batch, the row or the sharding of the vocabulary.

A 32-bit counter-based hash: ids are mixed once (lowbias32 of C. Wellons' hash prospector), then keyed per row by two
words derived from seed and position (splitmix64; Steele, Lea and Flood, 2014). Every step is a bijection of 32-bit
words, so no two ids of a row share their noise. Integers are exact on every device. Logarithms are computed in float64,
so the differences between implementations are negligible.
"""

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.sampling.candidates import BLOCK, is_left, take_blocks

_MULTIPLIERS = (0x7FEB352D, 0x846CA68B - (1 << 32))  # as signed 32-bit words
# Ids hashed at once. The chunk fits the L2 cache on a CPU; on other devices it is large, for few kernel launches.
_CPU_CHUNK = 1 << 17
_DEVICE_CHUNK = 1 << 25


def row_keys(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return two 32-bit words per row for int64 seeds and int32 positions: int32 [R, 2], the second odd."""
    with np.errstate(over="ignore"):
        word = _mixed64(seeds.astype(np.int64).view(np.uint64))
        word = _mixed64(word + positions.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    words = np.stack([word & np.uint64(0xFFFFFFFF), (word >> np.uint64(32)) | np.uint64(1)], 1)
    return words.astype(np.uint32).view(np.int32)


def _mixed64(word: np.ndarray) -> np.ndarray:
    word = word + np.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


def mixed_ids(ids: Tensor) -> Tensor:
    """Return the part of the hash that depends only on the id: int64 ids -> int32."""
    word = ids.to(torch.int32)
    return _xorshift(_xorshift(_xorshift(word, 16) * _MULTIPLIERS[0], 15) * _MULTIPLIERS[1], 16)


def noise_bits(mixed: Tensor, keys: Tensor) -> Tensor:
    """Return uniform 32-bit words, to be compared as signed integers.

    `mixed`: int32 [..., n] mixed ids. `keys`: [..., 2], keys of their row.
    """
    word = (mixed ^ keys[..., :1]) * keys[..., 1:]
    return _xorshift(_xorshift(word, 16) * _MULTIPLIERS[0], 15).mul_(_MULTIPLIERS[1])


def _xorshift(word: Tensor, by: int) -> Tensor:
    """Return `word ^ (word >>> by)`: a shift of a signed word copies its sign bit, which the mask removes."""
    return (word >> by).bitwise_and_((1 << (32 - by)) - 1).bitwise_xor_(word)


def gumbel(bits: Tensor) -> Tensor:
    """Return standard Gumbel noise in float64, strictly increasing in `bits`, between -3.1 and 22.9."""
    uniform = (bits.double() + (2**31 + 0.5)) * 2.0**-32  # between 0 and 1, both excluded
    return uniform.log_().neg_().log_().neg_()


class Noise:
    """The noise of one rank's slice of the vocabulary."""

    def __init__(self, first_id: int, count: int, device: torch.device) -> None:
        self._count = count
        whole = -(-count // BLOCK) * BLOCK
        ids = torch.arange(first_id, first_id + whole, device=device)  # includes ids beyond the slice, with logits -inf
        self._mixed = mixed_ids(ids).view(-1, BLOCK)  # int32 [B, 128]

    def argmax(
        self, x: Tensor, rows: Tensor, maxima: Tensor, temperature: Tensor, keys: Tensor, low: Tensor, end: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the largest `x / temperature + noise` of `rows` [R] and its local id.

        They are -inf and 0 if no value is finite. `maxima` [R, B] are the rows' block maxima, `temperature` float64
        [R], `keys` int32 [R, 2]. `low` float32 [R] and `end` int64 [R], a local id, are the end of the row in the order
        of logits (`candidates.is_left`). The sum of a block's largest noise and largest logit is an upper bound of the
        block. So only blocks that could win are computed, and in them only logits that could win with the block's
        largest noise.
        """
        noise = gumbel(self._block_noise(keys))  # [R, B]
        maxima = maxima.masked_fill(maxima < low.unsqueeze(1), float("-inf"))
        bound = maxima.double() / temperature.unsqueeze(1) + noise
        start = bound.argmax(1)
        values = self._left(x, rows, start, low, end)
        bits = noise_bits(self._mixed[start], keys)
        # [R]   best score of one block of each row
        reached = (values.double() / temperature.unsqueeze(1) + gumbel(bits)).amax(1)
        owner, blocks = ((bound >= reached.unsqueeze(1)) & (bound > float("-inf"))).nonzero().unbind(1)
        values = self._left(x, rows[owner], blocks, low[owner], end[owner])  # [M, 128]
        least = (reached[owner] - noise[owner, blocks]) * temperature[owner]
        least = (least - (least.abs() + temperature[owner]) * 1e-6).float()  # below the bound in spite of rounding
        which, inside = ((values >= least.unsqueeze(1)) & (values > float("-inf"))).nonzero().unbind(1)
        owner, blocks = owner[which], blocks[which]
        bits = noise_bits(self._mixed[blocks, inside].unsqueeze(1), keys[owner]).squeeze(1)
        scores = values[which, inside].double() / temperature[owner] + gumbel(bits)
        result = torch.full_like(temperature, float("-inf")).scatter_reduce_(0, owner, scores, "amax")
        winners = (scores == result[owner]).nonzero().squeeze(1)
        ids = torch.full_like(rows, self._count)
        ids.scatter_reduce_(0, owner[winners], (blocks * BLOCK + inside)[winners], "amin")
        return result, ids.masked_fill_(ids == self._count, 0)

    def _left(self, x: Tensor, rows: Tensor, blocks: Tensor, low: Tensor, end: Tensor) -> Tensor:
        """Return `take_blocks`, with -inf for excluded logits: [M, 128]."""
        values = take_blocks(x, rows, blocks)
        ids = blocks.unsqueeze(1) * BLOCK + torch.arange(BLOCK, device=x.device)
        return values.masked_fill(~is_left(values, ids, low.unsqueeze(1), end.unsqueeze(1)), float("-inf"))

    def _block_noise(self, keys: Tensor) -> Tensor:
        """Return the largest noise word of each block of ids: int32 [R, B]."""
        step = max(1, (_CPU_CHUNK if keys.device.type == "cpu" else _DEVICE_CHUNK) // self._count)
        mixed = self._mixed.view(1, -1)
        parts = [
            noise_bits(mixed, keys[start : start + step]).unflatten(1, (-1, BLOCK)).amax(2)
            for start in range(0, len(keys), step)
        ]
        return torch.cat(parts)
