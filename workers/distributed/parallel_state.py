"""The tensor-parallel process group as a value that layers get in their constructor.

The only module that imports `torch.distributed`. CPU ranks of an x86 host use shared memory (`shm_all_reduce.py`), on
other processors gloo; CUDA ranks use NCCL.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from workers.distributed.rendezvous import RendezvousInfo
from workers.distributed.shm_all_reduce import SharedMemoryGroup
from workers.distributed.shm_layout import Flags
from workers.distributed.tree_sum import tree_sum
from workers.errors import StartupError


class TensorParallel:
    """`rank` of `size` identical processes. Sums on the CPU run over a tree (`tree_sum.py`): all get the same bits."""

    def __init__(
        self, rank: int = 0, size: int = 1, shared: SharedMemoryGroup | None = None, flags: Flags | None = None
    ) -> None:
        """`flags`: where to record which collective this rank has reached, if `shared` does not do it."""
        self.rank = rank
        self.size = size
        self._shared = shared
        self._flags = flags
        self._collectives = 0

    @staticmethod
    def solo() -> TensorParallel:
        """A group of one rank: every collective is the identity."""
        return TensorParallel()

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks of `x` (any shape), bitwise the same on every rank. May reuse `x`'s memory."""
        if self.size > 1:
            if self._shared is None:
                if x.device.type == "cpu":
                    return tree_sum([part.float() for part in self.all_gather(x)]).to(x.dtype)
                self._count_collective()
                dist.all_reduce(x)
            else:
                x = self._shared.all_reduce(x.contiguous())
        return x

    @property
    def group_for_kernels(self) -> SharedMemoryGroup | None:
        """The group in which kernels compute sums over ranks themselves; None: they leave them to `all_reduce`."""
        return self._shared

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x` (equal shapes), stacked in rank order: [size, *x.shape]."""
        if self.size == 1:
            return x.unsqueeze(0)
        if self._shared is not None:
            return self._shared.all_gather(x)
        self._count_collective()
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather(list(out.unbind(0)), x.contiguous())
        return out

    def destroy(self) -> None:
        """Destroy the process group and close its sockets. It cannot be used afterwards."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _count_collective(self) -> None:
        self._collectives += 1
        if self._flags is not None:
            self._flags[self.rank] = self._collectives


def init_distributed(info: RendezvousInfo, device: torch.device, *, shared_memory: bool = True) -> TensorParallel:
    """The process group of all ranks; one rank alone needs none. Blocks until all are there, at most `info.timeout_s`.

    `shared_memory=False` keeps CPU ranks on gloo.
    """
    if info.size == 1:
        return TensorParallel.solo()
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        os.environ["GLOO_SOCKET_IFNAME"] = loopback_interface()
    timeout = timedelta(seconds=info.timeout_s)
    store = dist.TCPStore(
        "127.0.0.1",
        info.port,
        info.size,
        is_master=info.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=info.listen_fd,
    )
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=info.rank,
        world_size=info.size,
        timeout=timeout,
        device_id=device if device.type == "cuda" else None,
    )
    if device.type == "cpu" and shared_memory and SharedMemoryGroup.supported():
        shared = SharedMemoryGroup(
            info.memory_fd, info.rank, info.size, info.buffer_bytes, info.timeout_s, shares_cores=info.shares_cores
        )
        return TensorParallel(info.rank, info.size, shared)
    return TensorParallel(info.rank, info.size, flags=Flags(info.memory_fd, info.size))


def loopback_interface() -> str:
    """The name of the interface that has 127.0.0.1: `lo` on Linux, `lo0` on macOS. Raises `StartupError`."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(address.family == socket.AF_INET and address.address == "127.0.0.1" for address in addresses):
            return name
    raise StartupError(
        "No network interface has the address 127.0.0.1, over which ranks communicate.",
        "Bring the loopback interface up, or name another interface in GLOO_SOCKET_IFNAME.",
    )
