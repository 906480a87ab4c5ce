"""Sums, gathers, votes and stages of ranks that are dealt to nodes: all results have the bits of all ranks on one host.

Nodes share no memory here. Ranks are threads, but where torch knows one process group alone: there, two processes."""

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from oarlock.workers.distributed.all_reduce import NodeAllReduce, PeerLostError, SharedMemoryGroup, tree_sum
from oarlock.workers.distributed.parallel_state import TensorParallel, follows_from_peer
from oarlock.workers.distributed.pipeline_stage import PipelineStage, RingChannel
from oarlock.workers.distributed.shm_layout import Neighbours, Votes, total_bytes
from oarlock.workers.distributed.shm_ring import RingLayout, RingReader, RingWriter, anonymous_memory
from oarlock.workers.distributed.topology import STATUS_BYTES, RendezvousInfo, StoreAddress
from tests.unit.workers.gloo_groups import gloo_groups

CPU = torch.device("cpu")
BUFFER_BYTES = 4096  # small, so that long tensors go through in pieces
WIDTH = 1536


def part(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(100 * rank + count)).to(dtype)


def on_nodes(nodes: int, each: int, work: Callable[[TensorParallel, Votes], None]) -> None:
    """`work` on every rank of `nodes` nodes of `each` ranks."""
    first_ranks = gloo_groups(nodes)
    memories = [anonymous_memory(total_bytes(each, BUFFER_BYTES)) for _ in range(nodes)]

    def run(rank: int) -> None:
        node, local = divmod(rank, each)
        within = Neighbours(node * each, each, 0, each)
        group = SharedMemoryGroup(memories[node], local, each, BUFFER_BYTES, 60.0, shares_cores=True, within=within)
        sums = NodeAllReduce(group, nodes, None if local else first_ranks[node])
        votes = Votes(memories[node], local, each, 60.0, within=within, other_nodes_agree=sums.all_agree)
        work(TensorParallel(rank, nodes * each, sums), votes)

    with ThreadPoolExecutor(nodes * each) as threads:
        list(threads.map(run, range(nodes * each)))
    for memory in memories:
        os.close(memory)


@pytest.mark.skipif(not SharedMemoryGroup.supported(), reason="ranks of this processor sum by gloo")
@pytest.mark.parametrize(("nodes", "each"), [(2, 1), (2, 2), (2, 3), (4, 1), (3, 1)])
def test_sums_and_votes_match_one_host(nodes: int, each: int) -> None:
    def work(tp: TensorParallel, votes: Votes) -> None:
        assert tp.all_reduce_method == "shared memory, and gloo between nodes" and tp.group_for_kernels is None
        for dtype in (torch.float32, torch.bfloat16):
            for count in (1, 300, 5000):  # below a buffer, and several of them
                parts = [part(rank, count, dtype) for rank in range(tp.size)]
                total = tree_sum([x.float() for x in parts]).to(dtype)
                assert torch.equal(tp.all_reduce(parts[tp.rank].clone()), total), f"sum of {count} {dtype}"
                assert torch.equal(tp.all_gather(parts[tp.rank]), torch.stack(parts)), f"gather of {count} {dtype}"
        for no in range(tp.size):
            assert votes.all_agree(True) and not votes.all_agree(tp.rank != no)

    on_nodes(nodes, each, work)


def rings(in_flight: int) -> tuple[RingChannel, RingChannel]:
    """Make both ends of a channel from rank 0 to rank 1 of a host."""
    layout = RingLayout.holding(STATUS_BYTES + 700 * WIDTH * 2, 1, in_flight)
    memory, (wake_read, wake_write) = anonymous_memory(layout.total_bytes), os.pipe()
    writer, reader = RingWriter(memory, [wake_write], layout), RingReader(memory, wake_read, 0, layout)
    os.close(memory)
    return RingChannel(1, 60.0, writer=writer), RingChannel(0, 0.1, reader=reader)


def test_stages_of_one_host_send_rows_through_a_ring_without_waiting() -> None:
    after, before = rings(in_flight=2)
    row_bytes = WIDTH * 2
    first = PipelineStage(0, 2, None, None, after, row_bytes)
    last = PipelineStage(1, 2, None, before, None, row_bytes)
    hidden = part(3, 700 * WIDTH, torch.bfloat16).view(700, WIDTH)
    sent = hidden.clone()
    first.send(sent)
    sent.zero_()
    first.refuse(700)
    first.send(hidden[:1])
    first.send(hidden[:5])
    assert torch.equal(last.receive(700, WIDTH, torch.bfloat16, CPU), hidden)
    last.drop(700)
    last.drop(1)
    assert torch.equal(last.receive(5, WIDTH, torch.bfloat16, CPU), hidden[:5])
    after.send(hidden[:0])  # of a rank without a share of a short step
    assert before.receive(hidden[:0])
    with pytest.raises(PeerLostError, match="rank 0 sent nothing within"):
        last.drop(1)
    after.close()
    with pytest.raises(PeerLostError, match="rank 0 has ended") as caught:
        last.drop(1)
    assert follows_from_peer(caught.value)
    before.close()


def test_a_stage_that_nothing_holds_back_waits_for_the_next_one() -> None:
    after, before = rings(in_flight=2)
    numbers = torch.arange(50, dtype=torch.int64)
    sender = threading.Thread(target=lambda: [after.send(number) for number in numbers])
    sender.start()
    received = torch.empty(50, dtype=torch.int64)
    for number in range(50):
        assert before.receive(received[number])
    sender.join()
    assert torch.equal(received, numbers)
    after.close()
    before.close()


# Ranks of two nodes by gloo alone, as on processors whose stores are not kept in order, and rows between their stages.
CHILD = """
import json, sys, psutil, torch
from oarlock.workers.distributed.parallel_state import init_distributed, stage_group
from oarlock.workers.distributed.rank_groups import join_groups
from oarlock.workers.distributed.topology import RendezvousInfo
from oarlock.workers.distributed.pipeline_stage import DeviceChannel, GlooChannel
from oarlock.workers.distributed.all_reduce import tree_sum
torch.set_num_threads(1)
CPU = torch.device("cpu")
info = RendezvousInfo.from_fields(json.loads(sys.argv[1]))

def part(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()

init_distributed(info, CPU)
tp = stage_group(info, CPU)
parts = [part(rank, 3, 700) for rank in range(2)]
assert tp.all_reduce_method == "gloo" and tp.group_for_kernels is None
assert torch.equal(tp.all_reduce(parts[tp.rank]), tree_sum([x.float() for x in parts]).bfloat16())
peer = 1 - info.rank
channels = GlooChannel(peer), DeviceChannel(GlooChannel(peer), peer, CPU)  # they keep what is not received yet
for channel in channels:
    for step, tokens in enumerate((1, 5, 300, 2)):
        rows = part(step, tokens, 512)
        if info.rank == 0:
            channel.send(rows)
            rows.zero_()
            channel.refuse(rows.nbytes)
            channel.send(part(step, 4, 512))  # of a step that the receiver refuses
        else:
            into = torch.empty_like(rows)
            assert channel.receive(into) and torch.equal(into, rows)
            assert not channel.receive(into)
            channel.discard(4 * 512 * 2)
found = psutil.Process().net_connections("inet")
print(json.dumps(sorted({there.laddr.ip for there in found if there.status == psutil.CONN_LISTEN})), flush=True)
sys.stdin.read()  # what was sent is read before a rank ends
if info.rank == 1:
    try:
        channel.discard(512)
    except RuntimeError as error:
        from oarlock.workers.distributed.parallel_state import follows_from_peer
        assert follows_from_peer(error), error
tp.destroy()
"""


def test_gloo_carries_sums_and_rows_between_nodes_on_the_named_interface_alone() -> None:
    from datetime import timedelta

    import torch.distributed as dist

    listener = socket.create_server(("127.0.0.1", 0))
    port, memory = listener.getsockname()[1], anonymous_memory(total_bytes(1, BUFFER_BYTES))
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
        timeout=timedelta(seconds=60),
    )  # fmt: skip
    ranks = []
    for rank in range(2):
        info = RendezvousInfo(
            rank, 2, memory, BUFFER_BYTES, 60.0, True, nnodes=2, interface="lo",
            store=StoreAddress("127.0.0.1", port, "test"),
        )  # fmt: skip
        command = [sys.executable, "-c", CHILD, json.dumps(asdict(info))]
        ranks.append(subprocess.Popen(command, pass_fds=[memory], stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert json.loads(rank.stdout.readline()) == ["127.0.0.1"]
    finally:
        for rank in ranks:
            rank.communicate(timeout=60)
        os.close(memory)
    assert [rank.returncode for rank in ranks] == [0, 0]
    del store
