"""The largest logits of a row without sorting it: maxima of blocks of 128 ids, then only the blocks that can matter.

One pass over the vocabulary (the block maxima) serves greedy sampling, the NaN check, the candidate lists and the
bounds of random sampling. Equal logits are common (16-bit heads), so every order here is by value, then by lowest id.

Knows float32 rows and local ids. Does not know ranks or sampling parameters.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 128
_LOW_31 = 0x7FFFFFFF


def block_maxima(x: Tensor) -> Tensor:
    """Return the largest logit of each block of 128 ids: [R, V] -> [R, ceil(V / 128)]. NaN is larger than any
    number."""
    rows, width = x.shape
    whole = width // BLOCK
    maxima = x[:, : whole * BLOCK].unflatten(1, (whole, BLOCK)).amax(-1) if whole else x.new_empty(rows, 0)
    if width % BLOCK:
        maxima = torch.cat([maxima, x[:, whole * BLOCK :].amax(-1, keepdim=True)], 1)
    return maxima


def take_blocks(x: Tensor, rows: Tensor, blocks: Tensor) -> Tensor:
    """Return the logits of `blocks` [M] in `rows` [M]: [M, 128], -inf beyond the end.

    Local ids are `block * 128 + column`.
    """
    width = x.shape[1]
    if width % BLOCK == 0 and x.is_contiguous():
        return x.view(-1, BLOCK).index_select(0, rows * (width // BLOCK) + blocks)
    ids = blocks.unsqueeze(1) * BLOCK + torch.arange(BLOCK, device=x.device)
    values = x[rows.unsqueeze(1), ids.clamp(max=width - 1)]
    return values.masked_fill_(ids >= width, float("-inf"))


def argmax(x: Tensor, rows: Tensor, maxima: Tensor) -> Tensor:
    """Return the lowest local id of the largest logit of `rows` [R], given their block maxima [R, B]."""
    blocks = maxima.argmax(-1)
    return blocks * BLOCK + take_blocks(x, rows, blocks).argmax(-1)


def best(x: Tensor, rows: Tensor, maxima: Tensor, count: int, first_id: int) -> Tensor:
    """Return the keys of the `count` largest logits of `rows` [R], best first: int64 [R, count].

    They are padded with `-inf` keys. The `count` blocks with the best (maximum, lowest block index) contain all of
    them, ties included. An element of any other block is preceded, in value or in id, by one element of each of these
    blocks.
    """
    columns = torch.arange(maxima.shape[1], device=x.device)
    blocks = encode(maxima, columns).topk(min(count, maxima.shape[1])).indices.sort(1).values  # [R, C]
    values = take_blocks(x, rows.repeat_interleave(blocks.shape[1]), blocks.flatten())
    values = values.view(len(rows), blocks.shape[1] * BLOCK)  # [R, C * 128]   in the order of ids
    order = encode(values, torch.arange(values.shape[1], device=x.device))
    values, columns = decode(order.topk(min(count, order.shape[1])).values)
    ids = blocks.gather(1, columns // BLOCK) * BLOCK + columns % BLOCK + first_id
    return F.pad(encode(values, ids), (0, count - ids.shape[1]), value=_PADDING)


def is_left(values: Tensor, ids: Tensor, low: Tensor, end: Tensor) -> Tensor:
    """Return whether each (value, id) precedes (`low`, `end`) in this module's order: all broadcast together."""
    return (values > low) | ((values == low) & (ids < end))


def encode(values: Tensor, ids: Tensor) -> Tensor:
    """Return one int64 per (float32 value, id), ordered by larger value first, then by lower id."""
    bits = (values + 0.0).view(torch.int32)  # adding zero turns -0 into 0
    ordered = (bits >> 31).bitwise_and_(_LOW_31).bitwise_xor_(bits)
    return ordered.long().bitwise_left_shift_(32).bitwise_or_(_LOW_31 - ids)


def decode(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return values and ids of the keys that `encode` makes."""
    ordered = (keys >> 32).int()
    bits = ordered ^ ((ordered >> 31) & _LOW_31)
    return bits.view(torch.float32), _LOW_31 - (keys & 0xFFFFFFFF)


_PADDING = int(encode(torch.tensor([float("-inf")]), torch.tensor([_LOW_31])))
