"""Slots of host memory, each for one block: the pages of all its layers side by side. Copies to and from pages.

Copies on a device take their turn among its other work: a slot may be read on the host once the step is answered.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from oarlock.workers.attention.backend import LayerKV
from oarlock.workers.platform.huge_pages import huge_page_empty

_BLOCKS_AT_ONCE = 32  # through a buffer on the device


class HostSlots(Protocol):
    """Slots in `memory`, uint8 [slots, bytes of a block]: for each layer, the block's page of keys, then of values."""

    memory: np.ndarray

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        """Copy each of `blocks` to its slot."""

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        """Copy each of `slots` to its block. No block comes twice."""


def bytes_per_block(pages: Sequence[LayerKV]) -> int:
    """Bytes of this rank's share of a block, in the layout of the backend that allocated `pages`."""
    return sum(page.shape[1] for page in _as_bytes(pages))


def make_slots(pages: Sequence[LayerKV], num_slots: int) -> HostSlots:
    """Allocates slots. `pages`: of all layers of this rank; the first dimension of each tensor is the block."""
    return (SlotsOfHost if pages[0].k.device.type == "cpu" else SlotsOfDevice)(pages, num_slots)


class SlotsOfHost:
    """Slots for pages in host memory."""

    def __init__(self, pages: Sequence[LayerKV], num_slots: int) -> None:
        self._pages = [page.numpy() for page in _as_bytes(pages)]
        widths = [page.shape[1] for page in self._pages]
        self.memory = huge_page_empty((num_slots, sum(widths)), torch.uint8).numpy()
        self._parts = np.split(self.memory, np.cumsum(widths)[:-1], axis=1)

    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        for page, part in zip(self._pages, self._parts, strict=True):
            part[slots] = page[blocks]

    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        for page, part in zip(self._pages, self._parts, strict=True):
            page[blocks] = part[slots]


class SlotsOfDevice:
    """Slots for pages on a device: pinned memory of the host. Copies pass through a buffer on the device."""

    def __init__(self, pages: Sequence[LayerKV], num_slots: int, *, pinned: bool = True) -> None:
        self._pages, self._pinned = _as_bytes(pages), pinned
        self._widths = [page.shape[1] for page in self._pages]
        self._device = self._pages[0].device
        self._slots = torch.empty((num_slots, sum(self._widths)), dtype=torch.uint8, pin_memory=pinned)
        self.memory = self._slots.numpy()
        self._buffer = torch.empty((_BLOCKS_AT_ONCE, sum(self._widths)), dtype=torch.uint8, device=self._device)

    @torch.inference_mode()
    def save(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
            ids, some = self._on_device(blocks[start:][:_BLOCKS_AT_ONCE]), slots[start:][:_BLOCKS_AT_ONCE]
            buffer = self._buffer[: len(some)]
            for page, part in zip(self._pages, buffer.split(self._widths, 1), strict=True):
                part.copy_(page.index_select(0, ids))
            for slot, content in zip(some, buffer, strict=True):
                self._slots[slot].copy_(content, non_blocking=True)

    @torch.inference_mode()
    def load(self, slots: Sequence[int], blocks: Sequence[int]) -> None:
        for start in range(0, len(blocks), _BLOCKS_AT_ONCE):
            ids, some = self._on_device(blocks[start:][:_BLOCKS_AT_ONCE]), slots[start:][:_BLOCKS_AT_ONCE]
            buffer = self._buffer[: len(some)]
            for slot, content in zip(some, buffer, strict=True):
                content.copy_(self._slots[slot], non_blocking=True)
            for page, part in zip(self._pages, buffer.split(self._widths, 1), strict=True):
                page.index_copy_(0, ids, part)

    def _on_device(self, numbers: Sequence[int]) -> Tensor:
        """int64 [n]. From pinned memory: a copy from any other would wait for the device."""
        return torch.tensor(numbers, pin_memory=self._pinned).to(self._device, non_blocking=True)


def _as_bytes(pages: Sequence[LayerKV]) -> list[Tensor]:
    """uint8 [blocks, bytes of a page], of each layer's keys, then values."""
    return [tensor.flatten(1).view(torch.uint8) for layer in pages for tensor in (layer.k, layer.v)]
