"""The groups of a rank: the ranks of its stage, and its peers in the neighbouring pipeline stages, on all nodes."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from oarlock.workers.distributed.all_reduce import NodeAllReduce, SharedMemoryGroup
from oarlock.workers.distributed.parallel_state import TensorParallel, init_distributed, stage_group, subgroups
from oarlock.workers.distributed.pipeline_stage import Channel, DeviceChannel, GlooChannel, PipelineStage, RingChannel
from oarlock.workers.distributed.shm_layout import Neighbours, Votes
from oarlock.workers.distributed.shm_ring import RingLayout, RingReader, RingWriter
from oarlock.workers.distributed.topology import RendezvousInfo, StageRing


@dataclass(frozen=True, slots=True)
class RankGroups:
    """Groups and pipeline stage of one rank."""

    tp: TensorParallel
    stage: PipelineStage
    votes: Votes | None  # votes of the ranks of this stage; None if it has one rank
    _opened: ExitStack

    @staticmethod
    def solo() -> "RankGroups":
        return RankGroups(TensorParallel.solo(), PipelineStage.solo(), None, ExitStack())

    def destroy(self) -> None:
        """Close all connections. The groups cannot be used afterwards."""
        self.tp.destroy()
        self._opened.close()


def join_groups(
    info: RendezvousInfo,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    *,
    share_device: bool = False,
    in_order: bool = False,
) -> RankGroups:
    """Return the groups of this rank. Blocks until all ranks of all nodes have joined, at most `info.timeout_s`. CPU
    ranks of one x86 host neither wait nor have a process group.

    `dtype`: the model's. `share_device`: several ranks share one CUDA device. NCCL refuses that, so their all-reduces
    go over the host. `in_order`: see `TensorParallel`. Raises torch's errors.
    """
    if info.size == 1:
        return RankGroups.solo()
    topology = info.topology
    within = Neighbours.of(topology, info.rank)
    rank = info.rank - within.number  # index among its neighbours
    nodes = topology.tensor_parallel_size // within.size  # number of nodes of this stage
    by_shared_memory = device.type == "cpu" and SharedMemoryGroup.supported()
    if topology.nnodes > 1 or not by_shared_memory:
        init_distributed(info, device, share_device=share_device)
    local = SharedMemoryGroup(
        info.memory_fd, rank, within.size, info.buffer_bytes, info.timeout_s,
        shares_cores=info.shares_cores, within=within,
    )  # fmt: skip
    over_nodes = None
    if nodes > 1:
        stages = map(topology.stage_ranks, range(topology.pipeline_parallel_size))
        over_nodes = NodeAllReduce(local, nodes, subgroups((stage[:: within.size] for stage in stages), info.rank))
    if by_shared_memory:
        shared = (over_nodes or local) if topology.tensor_parallel_size > 1 else None
        tp = TensorParallel(topology.tensor_rank(info.rank), topology.tensor_parallel_size, shared)
    else:
        tp = stage_group(info, device, dtype, share_device=share_device, in_order=in_order)
    votes = None
    if topology.tensor_parallel_size > 1:
        agree = over_nodes.all_agree if over_nodes is not None else None
        votes = Votes(info.memory_fd, rank, within.size, info.timeout_s, within=within, other_nodes_agree=agree)
    rows_device = device if device.type == "cuda" and not share_device else None
    opened = ExitStack()
    return RankGroups(tp, _pipeline_stage(info, tp, rows_device, opened), votes, opened)


def _pipeline_stage(
    info: RendezvousInfo, tp: TensorParallel, device: torch.device | None, opened: ExitStack
) -> PipelineStage:
    """Return the pipeline stage of this rank. `device`: holds the hidden states, which go from device to device; None:
    they go over the host. Resources to close are added to `opened`."""
    topology, ranks = info.topology, info.topology.tensor_parallel_size

    def channel(peer: int, ring: dict[str, Any] | None, *, sends: bool) -> Channel | None:
        if not 0 <= peer < topology.world_size:
            return None
        if ring is None:
            over_host: Channel = GlooChannel(peer)
        else:
            over_host = _ring_channel(peer, StageRing(**ring), info.timeout_s, sends=sends)
            opened.callback(over_host.close)
        return over_host if device is None else DeviceChannel(over_host, peer, device)

    before = channel(info.rank - ranks, info.from_stage, sends=False)
    after = channel(info.rank + ranks, info.to_stage, sends=True)
    number, size = topology.stage_of(info.rank), topology.pipeline_parallel_size
    return PipelineStage(number, size, tp, before, after, info.row_bytes)


def _ring_channel(peer: int, ring: StageRing, timeout_s: float, *, sends: bool) -> RingChannel:
    layout = RingLayout(**ring.layout)
    if sends:
        return RingChannel(peer, timeout_s, writer=RingWriter(ring.memory_fd, [ring.wake_fd], layout))
    return RingChannel(peer, timeout_s, reader=RingReader(ring.memory_fd, ring.wake_fd, 0, layout))
