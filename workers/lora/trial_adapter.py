"""An adapter of random values in a slot, for the self-tests at the start of a rank.

The adapter updates every module that adapters may update in the layers that are tried. Its rank is low, so that its
values take few milliseconds: kernels compute each value of `A x` in the same way, whatever the rank is.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor

from oarlock.workers.lora.adapter_slots import AdapterSlots, HostAdapter, adapted_layers
from oarlock.workers.lora.low_rank import RankPair
from oarlock.workers.models.decoder import Decoder
from oarlock.workers.quantization.method import WeightShard

_SLOT, _RANK, _SCALE = 1, 8, 0.5
_DIGEST = "trial"  # no digest of files, so that no command can name the adapter


@contextmanager
def trial_adapter(slots: AdapterSlots, tried: Decoder) -> Generator[int]:
    """Fill a slot while self-tests run, and return its number. Afterwards all slots are empty, as at the start.

    `tried`: the layers that are tried, of the model of `slots`. Every rank must call this at the same point.
    """
    assert not slots.digests, "self-tests run before any adapter is loaded"
    draw, wanted = torch.Generator().manual_seed(0), set(map(id, tried.parts))
    dtype, rank = slots.model.placement.dtype, min(_RANK, slots.max_rank)
    pairs: dict[int, list[RankPair]] = {}
    index = 0
    for layer, shards in adapted_layers(slots.model, slots.targets):
        for shard in shards:
            if id(layer) in wanted:
                pairs[index] = _pairs(shard, rank, dtype, draw)
            index += 1
    slots.put(HostAdapter(_DIGEST, pairs), _SLOT)
    try:
        yield _SLOT
    finally:
        slots.clear(_SLOT)


def _pairs(shard: WeightShard, rank: int, dtype: torch.dtype, draw: torch.Generator) -> list[RankPair]:
    """Return a pair for each part of `shard`."""

    def drawn(width: int, size: float) -> Tensor:
        return (torch.randn((rank, width), generator=draw) * size).to(dtype)

    a_size, b_size = shard.inputs**-0.5, rank**-0.5
    return [
        RankPair(number, _SCALE, drawn(shard.local_inputs, a_size), drawn(part.count, b_size))
        for number, part in enumerate(shard.parts)
    ]
