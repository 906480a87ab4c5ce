"""Sums, gathers, votes and stages of ranks that are dealt to nodes: all results have the bits of all ranks on one host.

Nodes share no memory here, and each has a loopback address of its own. Ranks are threads."""

import os
import socket
import threading
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from workers.distributed.rank_groups import RankGroups, join_groups
from workers.distributed.rendezvous import RendezvousInfo
from workers.distributed.shm_all_reduce import PeerLostError, SharedMemoryGroup
from workers.distributed.shm_layout import total_bytes
from workers.distributed.shm_ring import anonymous_memory
from workers.distributed.topology import Topology
from workers.distributed.tree_sum import tree_sum

CPU = torch.device("cpu")
BUFFER_BYTES = 4096  # small, so that long tensors go through in pieces
TOKEN = "0123456789abcdef" * 4
WIDTH = 1536
TOKENS = (1, 5, 700, 2, 3)  # of the steps of a pipeline; 700 are more than a socket takes at once

pytestmark = pytest.mark.skipif(not SharedMemoryGroup.supported(), reason="ranks of this processor sum by gloo")


def address_of(node: int) -> str:
    return f"127.0.1.{node + 1}"


def on_ranks(
    topology: Topology, work: Callable[[int, RankGroups], None], timeout_s: float = 30.0, **changes: Any
) -> list[BaseException]:
    """`work` on every rank at once -> what it raised. `changes`: of the `RendezvousInfo` of the last rank."""
    size, last = topology.ranks_per_node, topology.world_size - 1
    memories = [anonymous_memory(total_bytes(size, BUFFER_BYTES)) for _ in range(topology.nnodes)]
    errors: list[BaseException] = []

    def run(info: RendezvousInfo) -> None:
        try:
            groups = join_groups(info, CPU)
            try:
                work(info.rank, groups)
            finally:
                groups.destroy()
        except BaseException as error:
            errors.append(error)

    with socket.create_server((address_of(0), 0)) as listener:
        threads = []
        for rank in range(topology.world_size):
            node = topology.node_of(rank)
            fields = {
                "rank": rank,
                "size": topology.world_size,
                "port": listener.getsockname()[1],
                "listen_fd": os.dup(listener.fileno()) if rank == 0 else None,
                "memory_fd": memories[node],
                "buffer_bytes": BUFFER_BYTES,
                "timeout_s": timeout_s,
                "shares_cores": True,
                "pipeline_parallel_size": topology.pipeline_parallel_size,
                "nnodes": topology.nnodes,
                "address": address_of(0),
                "local_address": address_of(node),
                "token": TOKEN,
            }
            info = RendezvousInfo(**(fields | changes if rank == last else fields))
            threads.append(threading.Thread(target=run, args=(info,)))
            threads[-1].start()
    for thread in threads:
        thread.join(60)
    for memory in memories:
        os.close(memory)
    return errors


def part(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * rank + count)).to(dtype)


@pytest.mark.parametrize(
    ("tp", "nnodes"), [(2, 2), (4, 2), (6, 2), (4, 4), (3, 3)], ids=["1 + 1", "2 + 2", "3 + 3", "1 x 4", "1 x 3"]
)
@pytest.mark.parametrize("pp", [1, 2])
def test_sums_and_votes_are_those_of_one_host(tp: int, nnodes: int, pp: int) -> None:
    """With two stages, each has nodes of its own."""

    def work(rank: int, groups: RankGroups) -> None:
        tp, votes = groups.tp, groups.votes
        assert tp.sums_by == "shared memory, and TCP between nodes" and tp.group_for_kernels is None
        for dtype in (torch.float32, torch.bfloat16):
            for count in (1, 300, 5000):  # below a buffer, and several of them
                parts = [part(rank, count, dtype) for rank in range(tp.size)]
                total = tree_sum([x.float() for x in parts]).to(dtype)
                assert torch.equal(tp.all_reduce(parts[tp.rank].clone()), total), f"sum of {count} {dtype}"
                assert torch.equal(tp.all_gather(parts[tp.rank]), torch.stack(parts)), f"gather of {count} {dtype}"
        assert votes is not None
        for no in range(tp.size):
            assert votes.all_agree(True) and not votes.all_agree(tp.rank != no)

    assert on_ranks(Topology(tp, pp, nnodes * pp), work) == []


@pytest.mark.parametrize(
    ("tp", "pp", "nnodes"),
    [(1, 2, 2), (2, 2, 1), (2, 3, 3), (4, 2, 4)],
    ids=["1 x 2", "one node", "2 x 3", "2 nodes each"],
)
def test_stages_send_rows_without_waiting(tp: int, pp: int, nnodes: int) -> None:
    """No stage receives before the first has sent all it has."""
    has_sent = threading.Barrier(tp * pp, timeout=30)

    def work(rank: int, groups: RankGroups) -> None:
        stage = groups.stage
        if not stage.is_first:
            has_sent.wait()
        for step, tokens in enumerate(TOKENS):
            expected = part(step, tokens * WIDTH, torch.bfloat16).view(tokens, WIDTH)
            hidden = expected.clone() if stage.is_first else stage.receive(tokens, WIDTH, torch.bfloat16, CPU)
            assert torch.equal(hidden, expected)
            if not stage.is_last:
                stage.send(hidden)
                hidden.zero_()
        if stage.is_first:
            has_sent.wait()
        has_arrived.wait()  # what this rank has sent is read before it closes its sockets

    has_arrived = threading.Barrier(tp * pp, timeout=30)
    assert on_ranks(Topology(tp, pp, nnodes), work) == []


def test_once_all_have_come_nothing_listens_and_all_goes_over_the_named_addresses() -> None:
    everyone = threading.Barrier(5, timeout=30)

    def look() -> None:
        everyone.wait()
        mine = [there for there in psutil.Process().net_connections("inet") if there.laddr.ip.startswith("127.0.1.")]
        found.extend(mine)
        everyone.wait()

    def work(rank: int, groups: RankGroups) -> None:
        everyone.wait()
        everyone.wait()

    found: list[Any] = []
    looking = threading.Thread(target=look)
    looking.start()
    assert on_ranks(Topology(2, 2, 4), work) == []
    looking.join()
    open_ones = [there for there in found if there.status == psutil.CONN_ESTABLISHED]
    assert [there for there in found if there.status == psutil.CONN_LISTEN] == []
    assert len(open_ones) == 8  # two for sums, two between stages; both ends are here
    assert {there.raddr.ip for there in open_ones} == {address_of(node) for node in range(4)}


def test_a_rank_with_another_token_is_no_peer() -> None:
    errors = on_ranks(Topology(2, 1, 2), lambda rank, groups: None, timeout_s=1.0, token="another" * 8)
    causes = sorted(str(error) for error in errors)
    assert all(isinstance(error, PeerLostError) for error in errors) and len(errors) == 2
    assert causes[0].startswith("rank 1 did not connect within") and "is not rank 0 of this group" in causes[1]


def test_a_rank_that_ends_is_named() -> None:
    def work(rank: int, groups: RankGroups) -> None:
        if rank != 1:
            groups.tp.all_reduce(torch.ones(3))

    (error,) = on_ranks(Topology(2, 1, 2), work)
    assert isinstance(error, PeerLostError) and "rank 1" in str(error)
