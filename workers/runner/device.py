"""A rank's device: its index, and its memory.

CUDA keeps the current device for each thread, initially device 0. Streams, events, collectives and launches use the
current device by default, not the device of their tensors, and a thread that only waits for an event would allocate
some hundred MB there. So every thread that calls CUDA first calls `use_device`.
"""

from collections.abc import Callable

import torch

from oarlock.base.host_memory import free_host_bytes
from oarlock.workers.config import WorkerConfig
from oarlock.workers.runner.kv_room import MemoryMeter


def device_of(config: WorkerConfig, rank: int) -> torch.device:
    """Return the device of `rank`, its index among the replica's ranks on this host: its own GPU, a shared GPU, or the
    CPU."""
    if config.device != "cuda":
        return torch.device("cpu")
    place = config.first_on_host + rank
    return torch.device("cuda", place % torch.cuda.device_count() if config.share_device else place)


def use_device(config: WorkerConfig, rank: int) -> torch.device:
    """Make `device_of` the calling thread's CUDA device, and return it."""
    device = device_of(config, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


class CudaMeter:
    """Meter of a CUDA device that counts the blocks of torch's caching allocator, which are larger than their
    tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def total_bytes(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]

    def peak_of(self, run: Callable[[], object]) -> int:
        """Return the most memory that `run` took.

        Memory that libraries allocate by themselves is not included: they keep it, which lowers `free_bytes` later.
        """
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
    """Return the meter of a CUDA device, or None for the CPU: other processes use its memory, so steps are
    estimated."""
    return CudaMeter(device) if device.type == "cuda" else None


def free_bytes(device: torch.device) -> int:
    """Return the free bytes of the memory of `device`."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()
