"""Reads the memory of a device: an interface of three numbers, so that sizes can be tested on a made-up device."""

from collections.abc import Callable
from typing import Protocol

import torch

from oarlock.workers.platform.host_memory import free_host_bytes


class MemoryMeter(Protocol):
    """Memory of one device, in bytes."""

    def total_bytes(self) -> int:
        """Bytes of the whole device."""

    def free_bytes(self) -> int:
        """Bytes that no process holds, after this one has given back those that it does not use."""

    def peak_of(self, run: Callable[[], object]) -> int:
        """The most that `run` took from the device beside what was held before; it is given back."""


class CudaMeter:
    """A CUDA device, through torch's caching allocator: its blocks, which are larger than the tensors in them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def peak_of(self, run: Callable[[], object]) -> int:
        """Leaves out memory that libraries allocate by themselves: they keep it, which lowers `free_bytes` later."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_reserved(self._device)
        run()
        torch.cuda.synchronize(self._device)
        peak = torch.cuda.max_memory_reserved(self._device) - before
        torch.cuda.empty_cache()
        return peak


def meter_of(device: torch.device) -> MemoryMeter | None:
    """The meter of a CUDA device; None on the CPU, whose memory others use as well: steps are estimated there."""
    return CudaMeter(device) if device.type == "cuda" else None


def free_bytes(device: torch.device) -> int:
    """Free bytes of the memory of `device`."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()
