"""Copies of KV blocks between pages and slots: each way against one block at a time."""

import numpy as np
import pytest
import torch

from oarlock.workers.attention.backend import LayerKV
from oarlock.workers.kv_tiers.rank_offload import HostSlots, SlotsOfDevice, SlotsOfHost, bytes_per_block

NUM_BLOCKS, NUM_SLOTS = 90, 80


def pages_of(dtype: torch.dtype, width: int) -> list[LayerKV]:
    def page() -> torch.Tensor:
        return torch.randint(0, 200, (NUM_BLOCKS, 2, 4, width)).to(dtype)

    return [LayerKV(page(), page()) for _ in range(3)]


def content(pages: list[LayerKV], block: int) -> np.ndarray:
    parts = [tensor[block].flatten().view(torch.uint8).numpy() for layer in pages for tensor in (layer.k, layer.v)]
    return np.concatenate(parts)


@pytest.mark.parametrize("kind", [SlotsOfHost, lambda pages, count: SlotsOfDevice(pages, count, pinned=False)])
@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 16), (torch.float32, 16), (torch.uint8, 18)])
def test_blocks_come_back(kind, dtype: torch.dtype, width: int) -> None:
    pages = pages_of(dtype, width)
    slots: HostSlots = kind(pages, NUM_SLOTS)
    assert slots.memory.shape == (NUM_SLOTS, bytes_per_block(pages))
    blocks = torch.randperm(NUM_BLOCKS)[:70].tolist()
    places = torch.randperm(NUM_SLOTS)[:70].tolist()
    before = [content(pages, block) for block in range(NUM_BLOCKS)]
    slots.save(blocks, places)
    for block, slot in zip(blocks, places, strict=True):
        assert np.array_equal(slots.memory[slot], before[block])
    others = list(reversed(blocks))
    slots.load(places, others)
    for block, source in zip(others, blocks, strict=True):
        assert np.array_equal(content(pages, block), before[source])
    for block in set(range(NUM_BLOCKS)) - set(blocks):
        assert np.array_equal(content(pages, block), before[block])
