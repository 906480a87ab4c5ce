"""The tensor-parallel process group, a value that layers get in their constructor.

CPU ranks of one x86 host use shared memory, and ranks of several x86 hosts gloo as well (`all_reduce.py` has both). On
other processors CPU ranks use only gloo. CUDA ranks use NCCL, or symmetric memory for small all-reduces.
"""

import logging
import os
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.cuda.nccl
import torch.distributed as dist
from torch import Tensor

from oarlock.base.errors import StartupError
from oarlock.workers.distributed.all_reduce import (
    SIZES,
    AllReduce,
    NodeAllReduce,
    PeerLostError,
    SharedMemoryGroup,
    choose_device_all_reduce,
    seconds_on_device,
    tree_sum,
)
from oarlock.workers.distributed.shm_layout import Flags
from oarlock.workers.distributed.topology import RendezvousInfo
from oarlock.workers.platform.network import interface_with

LOOPBACK = "127.0.0.1"
_OF_PEER = ("gloo", "closed by peer", "timeout caused pair closure")  # parts of gloo's messages for a lost peer

logger = logging.getLogger("oarlock.runner")


class TensorParallel:
    """`rank` of `size` identical processes. All-reduces on the CPU add over a tree (`tree_sum`), so all ranks get the
    same bits."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        shared: SharedMemoryGroup | NodeAllReduce | None = None,
        record: Callable[[int], None] | None = None,
        group: dist.ProcessGroup | None = None,
        *,
        over_host: bool = False,
        in_order: bool = False,
    ) -> None:
        """Set how collectives are computed. `shared`: computes all-reduces on the CPU; None: torch's collectives do.
        `record`: called with the number of each of torch's collectives that this rank reaches. `group`: the ranks; None
        if they are all. `over_host`: the group supports only CPU tensors, so others are copied to the host and back.
        `in_order`: all-reduces on a device add over the tree too; NCCL would choose an order by their size."""
        self.rank = rank
        self.size = size
        self._shared = shared
        # The group in which kernels compute all-reduces themselves; None: they leave them to `all_reduce`.
        self.group_for_kernels = shared if isinstance(shared, SharedMemoryGroup) else None
        self._record = record
        self._group = group
        self._over_host = over_host
        self._in_order = in_order
        self._collectives = 0
        # backend of the all-reduces for logs; on CUDA devices with the measured times
        self.all_reduce_method = "gloo" if shared is None else shared.all_reduce_method
        self._device_all_reduce: AllReduce = self._nccl_all_reduce

    @staticmethod
    def solo() -> "TensorParallel":
        """Return a group of one rank, whose collectives are all the identity."""
        return TensorParallel()

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over ranks of `x` (any shape), with the same bits on every rank. May reuse `x`'s memory."""
        if self.size > 1:
            if self._shared is None:
                if x.device.type == "cpu" or self._over_host or self._in_order:
                    return tree_sum([part.float() for part in self.all_gather(x)]).to(x.dtype)
                self._count_collective()
                return self._device_all_reduce(x.contiguous())
            else:
                x = self._shared.all_reduce(x.contiguous())
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's `x` (equal shapes), stacked in rank order: [size, *x.shape]."""
        if self.size == 1:
            return x.unsqueeze(0)
        if self._shared is not None:
            return self._shared.all_gather(x)
        if self._over_host and x.device.type != "cpu":
            return self.all_gather(x.cpu()).to(x.device)
        self._count_collective()
        out = torch.empty((self.size, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather(list(out.unbind(0)), x.contiguous(), self._group)
        return out

    def all_to_all(self, x: Tensor) -> Tensor:
        """Return `x[self.rank]` of every rank (equal shapes), stacked in rank order: [size, *x.shape[1:]].

        `x`: [size, ...], a part for each rank.
        """
        if self.size == 1:
            return x
        if self._shared is not None or self._over_host:
            return self.all_gather(x)[:, self.rank]
        self._count_collective()
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(out, x.contiguous(), group=self._group)
        return out

    def choose_all_reduce(self, device: torch.device, dtype: torch.dtype) -> None:
        """Measure the algorithms for an all-reduce of `dtype` on a CUDA device, and log the choice. All ranks must call
        this."""

        def agree(number: float) -> float:
            return float(self.all_gather(torch.tensor([number], dtype=torch.float64, device=device)).max())

        most = max(SIZES) // dtype.itemsize
        whole = (torch.arange(most, device=device) % (256 // self.size)).to(dtype)
        if agree(float(not torch.equal(self._nccl_all_reduce(whole.clone()), self.size * whole))):
            raise StartupError(f"NCCL's all-reduce over {self.size} devices returns wrong values.", WITHOUT_PEERS)
        others = symmetric_all_reduces(most, dtype, device, self._group)
        self._device_all_reduce, self.all_reduce_method = choose_device_all_reduce(
            self._nccl_all_reduce, others, whole, self.size, agree, seconds_on_device
        )
        apart = [other for other in range(torch.cuda.device_count()) if not _reads(device, other)]
        if apart:
            names = ", ".join(map(str, apart))
            logger.warning("event=no_peer_access device=%s others=%r fix=%r", device.index, names, WITHOUT_PEERS)
        logger.info("event=all_reduce ranks=%d chosen=%r", self.size, self.all_reduce_method)

    def destroy(self) -> None:
        """Destroy the process group and close its sockets. It cannot be used afterwards."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _nccl_all_reduce(self, x: Tensor) -> Tensor:
        """Return `x` after an all-reduce in place."""
        dist.all_reduce(x, group=self._group)
        return x

    def _count_collective(self) -> None:
        self._collectives += 1
        if self._record is not None:
            self._record(self._collectives)


# Some drivers of consumer cards offer peer access that then hangs, or copies wrong values.
WITHOUT_PEERS = "If the start hangs or all-reduce results are wrong, set NCCL_P2P_DISABLE=1."


def _reads(device: torch.device, other: int) -> bool:
    return other == device.index or torch.cuda.can_device_access_peer(device.index, other)


def open_store(info: RendezvousInfo) -> dist.Store:
    """Return the store in which ranks find each other. On one host it is in shared memory, so that nothing listens."""
    if info.store is None:
        return dist.FileStore(f"/dev/fd/{info.store_fd}", -1)
    timeout = timedelta(seconds=info.timeout_s)
    store = dist.TCPStore(info.store.address, info.store.port, is_master=False, timeout=timeout, wait_for_workers=False)
    return dist.PrefixStore(f"{info.store.prefix}/ranks", store)


def init_distributed(info: RendezvousInfo, device: torch.device, *, share_device: bool = False) -> None:
    """Form torch's process group of all ranks. Blocks until all have joined, at most `info.timeout_s`.

    `share_device`: several ranks share one CUDA device. NCCL refuses that, so they use gloo.
    """
    interface = info.interface or interface_with(LOOPBACK).name
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    if info.nnodes > 1:
        os.environ["NCCL_SOCKET_IFNAME"] = f"={interface}"
    on_nccl = device.type == "cuda" and not share_device
    dist.init_process_group(
        "gloo" if not on_nccl else "nccl" if info.nnodes == 1 else "cpu:gloo,cuda:nccl",
        store=open_store(info),
        rank=info.rank,
        world_size=info.size,
        timeout=timedelta(seconds=info.timeout_s),
        device_id=device if on_nccl else None,
    )


def subgroups(groups: Iterable[Sequence[int]], rank: int) -> dist.ProcessGroup | None:
    """Form disjoint `groups` of ranks, and return the group of `rank`. Every rank must call this with the same
    groups."""
    own = None
    for ranks in groups:
        group = dist.new_group(list(ranks))
        if rank in ranks:
            own = group
    return own


def stage_group(
    info: RendezvousInfo,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    share_device: bool = False,
    in_order: bool = False,
) -> TensorParallel:
    """Return the ranks of one stage, using torch's collectives. `dtype`: the model's. `in_order`: see
    `TensorParallel`."""
    topology = info.topology
    rank, size = topology.tensor_rank(info.rank), topology.tensor_parallel_size
    group = None
    if topology.pipeline_parallel_size > 1:
        group = subgroups(map(topology.stage_ranks, range(topology.pipeline_parallel_size)), info.rank)
    local = topology.local_rank(info.rank)
    record = partial(Flags(info.memory_fd, topology.ranks_per_node).__setitem__, local)
    tp = TensorParallel(rank, size, None, record, group, over_host=share_device, in_order=in_order)
    on_nccl = device.type == "cuda" and not share_device
    if on_nccl and not in_order and 1 < size <= topology.ranks_per_node:  # devices of one host
        tp.choose_all_reduce(device, dtype)
    return tp


_SYMMETRIC = {
    "one-shot": "one_shot_all_reduce",
    "two-shot": "two_shot_all_reduce_",
    "multimem": "multimem_all_reduce_",
}


def symmetric_all_reduces(
    most: int, dtype: torch.dtype, device: torch.device, group: dist.ProcessGroup | None
) -> dict[str, AllReduce | str]:
    """Return all-reduces of up to `most` values by symmetric memory, by name, or the reason why there is none. Every
    rank must call this.

    `group`: None: all ranks.
    """
    try:
        from torch.distributed import _symmetric_memory as symmetric  # only CUDA ranks need it

        group = group or dist.group.WORLD
        assert group is not None, "the group has been formed"
        inputs = symmetric.empty(most, dtype=dtype, device=device)
        handle = symmetric.rendezvous(inputs, group.group_name)
    except (RuntimeError, ImportError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return dict.fromkeys(_SYMMETRIC, reason)
    found: dict[str, AllReduce | str] = {
        name: partial(_symmetric_all_reduce, kernel, inputs, group.group_name) for name, kernel in _SYMMETRIC.items()
    }
    if not handle.multicast_ptr:
        found["multimem"] = "the devices have no multicast"
    return found


def _symmetric_all_reduce(kernel: str, inputs: Tensor, group: str, x: Tensor) -> Tensor:
    """Return the sum of `x` over ranks, outside the memory of `inputs`, which the next all-reduce overwrites."""
    own = inputs[: x.numel()]
    own.copy_(x.reshape(-1))
    total = getattr(torch.ops.symm_mem, kernel)(own, "sum", group)
    return x.copy_(own.view(x.shape)) if kernel.endswith("_") else total.view(x.shape)


def follows_from_peer(error: Exception) -> bool:
    """Return whether the likely cause is that another rank is lost."""
    return isinstance(error, dist.DistError | PeerLostError) or any(word in str(error) for word in _OF_PEER)


def nccl_version() -> str | None:
    """Return the version of torch's NCCL; None if torch has none."""
    return ".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else None
