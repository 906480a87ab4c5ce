"""Ranks of several nodes by torch's gloo, as on processors whose stores are not kept in order, and rows from device to
device: two real processes, one for each node."""

import json
import os
import socket
import subprocess
import sys

from workers.distributed.shm_layout import total_bytes
from workers.distributed.shm_ring import anonymous_memory

BUFFER_BYTES = 4096

CHILD = """
import json, sys, psutil, torch
from workers.distributed.parallel_state import DeviceRows
from workers.distributed.rank_groups import DeviceChannel, join_groups
from workers.distributed.rendezvous import RendezvousInfo
from workers.distributed.shm_all_reduce import SharedMemoryGroup
from workers.distributed.tree_sum import tree_sum
torch.set_num_threads(1)
SharedMemoryGroup.supported = staticmethod(lambda: False)
CPU = torch.device("cpu")
found = {}

def part(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()

def listening():
    found = psutil.Process().net_connections("inet")
    return sorted({there.laddr.ip for there in found if there.status == psutil.CONN_LISTEN})

of_tensors, of_stages = (RendezvousInfo(**fields) for fields in json.loads(sys.argv[1]))
groups = join_groups(of_tensors, CPU)
parts = [part(rank, 3, 700) for rank in range(2)]
assert groups.tp.sums_by == "gloo" and groups.tp.group_for_kernels is None
assert torch.equal(groups.tp.all_reduce(parts[groups.tp.rank]), tree_sum([x.float() for x in parts]).bfloat16())
assert groups.votes.all_agree(True) and not groups.votes.all_agree(groups.tp.rank == 0)
found["tensors"] = listening()
groups.destroy()

groups = join_groups(of_stages, CPU)
stage, peer = groups.stage, 1 - of_stages.rank
channel = DeviceChannel(stage._after or stage._before, DeviceRows(peer), CPU)
for step, tokens in enumerate((1, 5, 300, 2)):
    rows = part(step, tokens, 512)
    if stage.is_first:
        channel.send(rows)
        rows.zero_()
        channel.send(None)  # a refused step
        channel.send(part(step, 4, 8))  # of a step that the receiver refuses
    else:
        into = torch.empty_like(rows)
        assert channel.receive(into) and torch.equal(into, rows)
        assert not channel.receive(into)
        channel.discard()
found["stages"] = listening()
print(json.dumps(found), flush=True)
sys.stdin.read()  # what was sent is read before a rank ends
"""


def test_gloo_sums_votes_and_rows_between_nodes() -> None:
    memories = [anonymous_memory(total_bytes(1, BUFFER_BYTES)) for _ in range(2)]
    listeners = [socket.create_server(("127.0.1.1", 0)) for _ in range(2)]
    ranks = []
    for rank in range(2):
        fields = [
            {
                "rank": rank,
                "size": 2,
                "port": listener.getsockname()[1],
                "listen_fd": listener.fileno() if rank == 0 else None,
                "memory_fd": memories[rank],
                "buffer_bytes": BUFFER_BYTES,
                "timeout_s": 60,
                "shares_cores": True,
                "pipeline_parallel_size": stages,
                "nnodes": 2,
                "address": "127.0.1.1",
                "local_address": f"127.0.1.{rank + 1}",
                "token": "0123456789abcdef" * 4,
            }
            for stages, listener in zip((1, 2), listeners, strict=True)
        ]
        fds = [memories[rank], *([listener.fileno() for listener in listeners] if rank == 0 else [])]
        command = [sys.executable, "-c", CHILD, json.dumps(fields)]
        ranks.append(subprocess.Popen(command, pass_fds=fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    try:
        for listener in listeners:
            listener.close()
        for rank in ranks:
            assert rank.stdout is not None
            found = json.loads(rank.stdout.readline())
            # gloo takes the first address of the interface that has the named one.
            assert set(found) == {"tensors", "stages"}
            assert all(set(there) <= {"127.0.0.1", "127.0.1.1"} for there in found.values())
    finally:
        for rank in ranks:
            rank.communicate(timeout=60)
        for memory in memories:
            os.close(memory)
    assert [rank.returncode for rank in ranks] == [0, 0]
