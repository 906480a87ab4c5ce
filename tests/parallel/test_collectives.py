"""Collectives between real processes: shared memory and gloo against exact sums, bitwise equal on all ranks."""

import json
import socket
import subprocess
import sys

import pytest
import torch

from workers.distributed.shm_layout import total_bytes
from workers.distributed.shm_ring import anonymous_memory

BUFFER_BYTES = 4096  # small, so that long tensors go through in pieces

CHILD = """
import hashlib, json, sys, torch
from workers.distributed.parallel_state import init_distributed
from workers.distributed.rendezvous import RendezvousInfo
torch.set_num_threads(1)
arguments = json.loads(sys.argv[1])
shared = arguments.pop("shared")
info = RendezvousInfo(**arguments, buffer_bytes=4096, timeout_s=60)
tp = init_distributed(info, torch.device("cpu"), shared_memory=shared)
digests = []
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for shape in ((1,), (2, 896), (3, 7, 5), (64, 896)):
        generator = torch.Generator().manual_seed(100 * info.rank + len(shape))
        x = torch.randn(shape, generator=generator).to(dtype)
        total = tp.all_reduce(x.clone())
        peers = [
            torch.randn(shape, generator=torch.Generator().manual_seed(100 * r + len(shape))).to(dtype)
            for r in range(info.size)
        ]
        gathered = tp.all_gather(x)
        assert torch.equal(gathered, torch.stack(peers)), "gather"
        exact = torch.stack(peers).double().sum(0)
        error = (total.double() - exact).abs().max().item()
        scale = sum(p.double().abs() for p in peers).max().item()
        assert error <= info.size * torch.finfo(dtype).eps * scale, (dtype, shape, error)
        digests.append(hashlib.blake2b(total.float().numpy().tobytes()).hexdigest())
for _ in range(200):  # ranks drift apart and wait for each other
    x = torch.full((300,), float(info.rank))
    assert torch.equal(tp.all_reduce(x), torch.full((300,), float(sum(range(info.size)))))
print(json.dumps(digests))
tp.destroy()
"""


def run_ranks(size: int, shared: bool) -> list[list[str]]:
    memory = anonymous_memory(total_bytes(size, BUFFER_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        processes = []
        for rank in range(size):
            arguments = {
                "rank": rank,
                "size": size,
                "port": listener.getsockname()[1],
                "listen_fd": listener.fileno() if rank == 0 else None,
                "memory_fd": memory,
                "shared": shared,
            }
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", CHILD, json.dumps(arguments)],
                    pass_fds=[memory, listener.fileno()] if rank == 0 else [memory],
                    stdout=subprocess.PIPE,
                )
            )
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * size
    return [json.loads(output) for output in outputs]


@pytest.mark.parametrize("shared", [True, False], ids=["shared_memory", "gloo"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_agree_to_the_last_bit(size: int, shared: bool) -> None:
    digests = run_ranks(size, shared)
    assert all(other == digests[0] for other in digests[1:])


def test_a_missing_peer_is_named() -> None:
    from workers.distributed.shm_all_reduce import PeerLostError, SharedMemoryGroup

    memory = anonymous_memory(total_bytes(2, BUFFER_BYTES))
    group = SharedMemoryGroup(memory, 0, 2, BUFFER_BYTES, timeout_s=0.05)
    with pytest.raises(PeerLostError, match="rank 1 did not reach collective 1"):
        group.all_reduce(torch.ones(4))
