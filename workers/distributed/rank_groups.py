"""The groups that a rank is in: the ranks of its stage, and its neighbours in a pipeline of stages, on all nodes."""

from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.distributed.parallel_state import DeviceRows, TensorParallel, init_distributed, open_store
from workers.distributed.peers.meeting import Store, meet
from workers.distributed.peers.node_sums import NodeSums
from workers.distributed.peers.peer_socket import PeerSocket
from workers.distributed.peers.tcp_channel import TcpChannel
from workers.distributed.pipeline_stage import Channel, PipelineStage
from workers.distributed.rendezvous import RendezvousInfo
from workers.distributed.shm_all_reduce import SharedMemoryGroup
from workers.distributed.shm_layout import Neighbours
from workers.distributed.topology import Topology
from workers.distributed.votes import Votes


@dataclass(frozen=True, slots=True)
class RankGroups:
    """One rank's."""

    tp: TensorParallel
    stage: PipelineStage
    votes: Votes | None  # of the ranks of its stage; None: it is alone there
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
    *,
    share_device: bool = False,
    in_order: bool = False,
) -> RankGroups:
    """Blocks until all ranks of all nodes are there, at most `info.timeout_s`; one rank alone waits for nobody.

    `share_device`: several ranks have one CUDA device, which NCCL refuses; so their sums go over the host. `in_order`:
    see `TensorParallel`. Raises `PeerLostError`, and what torch raises.
    """
    if info.size == 1:
        return RankGroups.solo()
    topology, opened = info.topology, ExitStack()
    within = Neighbours.of(topology, info.rank)
    rank = info.rank - within.number  # among its neighbours
    nodes = topology.tensor_parallel_size // within.size  # of this stage
    by_shared_memory = device.type == "cpu" and SharedMemoryGroup.supported()
    store, sockets = None, {}
    if topology.nnodes > 1 or topology.pipeline_parallel_size > 1:
        store = open_store(info)
        sockets = meet(
            store, info.rank, peers_of(topology, info.rank), info.local_address, info.token, info.timeout_s,
            shares_cores=info.shares_cores,
        )  # fmt: skip
        for peer in sockets.values():
            opened.callback(peer.close)
    local = SharedMemoryGroup(
        info.memory_fd, rank, within.size, info.buffer_bytes, info.timeout_s,
        shares_cores=info.shares_cores, within=within,
    )  # fmt: skip
    over_nodes = None
    if nodes > 1:
        stage = topology.stage_ranks(topology.stage_of(info.rank))
        first_ranks = [sockets[peer] for peer in stage[:: within.size] if rank == 0 and peer != info.rank]
        over_nodes = NodeSums(local, (info.rank - stage.start) // within.size, nodes, first_ranks)
    shared = (over_nodes or local) if by_shared_memory and topology.tensor_parallel_size > 1 else None
    if by_shared_memory and store is not None:
        _wait_for_all(store, info)
        tp = TensorParallel(topology.tensor_rank(info.rank), topology.tensor_parallel_size, shared)
    else:
        tp = init_distributed(info, device, shared, store, share_device=share_device, in_order=in_order)
    votes = None
    if topology.tensor_parallel_size > 1:
        agree = over_nodes.all_agree if over_nodes is not None else None
        votes = Votes(info.memory_fd, rank, within.size, info.timeout_s, within=within, other_nodes_agree=agree)
    rows_device = device if device.type == "cuda" and not share_device else None
    return RankGroups(tp, _pipeline_stage(topology, info.rank, tp, sockets, rows_device), votes, opened)


class DeviceChannel:
    """A `pipeline_stage.Channel` of which rows go from device to device, and their size over the host."""

    def __init__(self, on_host: Channel, rows: DeviceRows, device: torch.device) -> None:
        self._on_host = on_host
        self._rows = rows
        self._device = device

    def send(self, rows: Tensor | None) -> None:
        self._on_host.send(None if rows is None else torch.tensor([rows.nbytes]))
        if rows is not None and rows.nbytes:
            self._rows.send(rows.contiguous().view(-1).view(torch.uint8))

    def receive(self, rows: Tensor) -> bool:
        size = self._size()
        if size:
            assert size == rows.nbytes, f"{size} bytes of a step came where {rows.nbytes} belong"
            self._rows.receive(rows.view(-1).view(torch.uint8))
        return size is not None

    def discard(self) -> None:
        if size := self._size():
            self._rows.receive(torch.empty(size, dtype=torch.uint8, device=self._device))

    def _size(self) -> int | None:
        """Bytes of the next rows; None: the step was refused."""
        size = torch.empty(1, dtype=torch.int64)
        return int(size) if self._on_host.receive(size) else None


def peers_of(topology: Topology, rank: int) -> set[int]:
    """The ranks to which `rank` has a connection of its own: as the first of its neighbours to the first ones on the
    other nodes of its stage, and to those of its tensor rank in the stages before and after."""
    stage, ranks = topology.stage_of(rank), topology.tensor_parallel_size
    peers = {other for other in (rank - ranks, rank + ranks) if 0 <= other < topology.world_size}
    here = topology.neighbours_on_node(rank)
    if rank == here.start:
        peers |= set(topology.stage_ranks(stage)[:: len(here)]) - {rank}
    return peers


def _wait_for_all(store: Store, info: RendezvousInfo) -> None:
    """Rank 0 keeps the store until nobody needs it. Then nothing listens any more."""
    store.set(f"oarlock/joined/{info.rank}", "")
    if info.rank == 0:
        for rank in range(info.size):
            store.get(f"oarlock/joined/{rank}")


def _pipeline_stage(
    topology: Topology, rank: int, tp: TensorParallel, sockets: dict[int, PeerSocket], device: torch.device | None
) -> PipelineStage:
    """`device`: on which rows go from rank to rank; None: they go over the host."""
    number, ranks = topology.stage_of(rank), topology.tensor_parallel_size

    def channel(peer: int) -> Channel | None:
        if not 0 <= peer < topology.world_size:
            return None
        over_host = TcpChannel(sockets[peer])
        return over_host if device is None else DeviceChannel(over_host, DeviceRows(peer), device)

    return PipelineStage(number, topology.pipeline_parallel_size, tp, channel(rank - ranks), channel(rank + ranks))
