"""Collectives between real processes: shared memory (in Python and in the kernels) and gloo against exact sums, bitwise
equal on all ranks."""

import json
import subprocess
import sys

import pytest
import torch

from oarlock.workers.distributed.all_reduce import PeerLostError, SharedMemoryGroup
from oarlock.workers.distributed.shm_layout import total_bytes
from oarlock.workers.distributed.shm_ring import anonymous_memory
from tests.unit.workers.kernel_levels import NO_KERNELS

BUFFER_BYTES = 4096  # small, so that long tensors go through in pieces

# Imports torch once: the ranks are its forks, which have done nothing with it yet.
PARENT = """
import hashlib, json, os, sys, torch
from oarlock.workers.distributed.parallel_state import TensorParallel, init_distributed
from oarlock.workers.distributed.rank_groups import join_groups
from oarlock.workers.distributed.topology import RendezvousInfo
from oarlock.workers.distributed.all_reduce import tree_sum
torch.set_num_threads(1)
ranks = []
for arguments in json.loads(sys.argv[1]):
    ranks.append(os.fork())
    if ranks[-1] == 0:
        break
else:
    sys.exit(any([os.waitpid(rank, 0)[1] for rank in ranks]))
forms = arguments.pop("forms")
info = RendezvousInfo(**arguments, buffer_bytes=4096, timeout_s=60, shares_cores=arguments["size"] > 2)
groups = join_groups(info, torch.device("cpu"))
assert not torch.distributed.is_initialized(), "nothing listens where shared memory carries all"
init_distributed(info, torch.device("cpu"))
shared = groups.tp
tp_of = {"python": shared, "kernels": shared, "gloo": TensorParallel(info.rank, info.size)}
def all_reduce(form, x):
    if form != "kernels" or x.dtype != torch.float32:
        return tp_of[form].all_reduce(x)
    from oarlock.workers.kernels.cpu.fused_layer import ALL_ARRIVED, all_reduce_of
    from oarlock.workers.kernels.cpu.library import library
    group = shared.group_for_kernels
    assert all_reduce_of(library())(group.address, x.data_ptr(), x.numel()) == ALL_ARRIVED
    return x
digests = []
for form in forms:
    digests.append([])
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for shape in ((1,), (2, 896), (3, 7, 5), (64, 896)):
            generator = torch.Generator().manual_seed(100 * info.rank + len(shape))
            x = torch.randn(shape, generator=generator).to(dtype)
            total = all_reduce(form, x.clone())
            peers = [
                torch.randn(shape, generator=torch.Generator().manual_seed(100 * r + len(shape))).to(dtype)
                for r in range(info.size)
            ]
            gathered = tp_of[form].all_gather(x)
            assert torch.equal(gathered, torch.stack(peers)), "gather"
            parts = tp_of[form].all_to_all(torch.stack([x + place for place in range(info.size)]))
            assert torch.equal(parts, torch.stack([peer + info.rank for peer in peers])), "all to all"
            exact = torch.stack(peers).double().sum(0)
            error = (total.double() - exact).abs().max().item()
            scale = sum(p.double().abs() for p in peers).max().item()
            assert error <= info.size * torch.finfo(dtype).eps * scale, (dtype, shape, error)
            if dtype == torch.float32:
                assert torch.equal(total, tree_sum(peers)), "tree"
            digest = hashlib.blake2b(total.float().numpy().tobytes(), digest_size=16).hexdigest()
            digests[-1].append(digest)
    for _ in range(50):  # ranks drift apart and wait for each other
        x = torch.full((300,), float(info.rank))
        assert torch.equal(all_reduce(form, x), torch.full((300,), float(sum(range(info.size)))))
os.write(1, (json.dumps(digests) + "\\n").encode())  # whole, as it is shorter than what a pipe takes at once
groups.destroy()
"""


def run_ranks(forms: list[list[str]]) -> list[list[list[str]]]:
    """Each rank computes sums in one of its forms after the other -> digests of every sum, for each rank and form."""
    size = len(forms)
    memory, store = anonymous_memory(total_bytes(size, BUFFER_BYTES)), anonymous_memory(0)
    fields = {"size": size, "memory_fd": memory, "store_fd": store}
    ranks = [{"rank": rank, "forms": forms[rank], **fields} for rank in range(size)]
    command = [sys.executable, "-c", PARENT, json.dumps(ranks)]
    result = subprocess.run(command, pass_fds=[memory, store], stdout=subprocess.PIPE, timeout=120, check=True)
    digests = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(digests) == size
    return digests


needs_kernels = pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")
FORMS = ["python", pytest.param("kernels", marks=needs_kernels)]


def test_ranks_agree_to_the_last_bit_in_every_form_and_in_a_mixture() -> None:
    """Each compares its sums with those of the tree, which for five ranks has two branches and a leaf."""
    forms = ["python", "python" if NO_KERNELS else "kernels"]
    digests = run_ranks([[forms[rank % 3 > 0], *forms, "gloo"] for rank in range(5)])
    assert all(rank == digests[0] for rank in digests[1:])
    assert digests[0][0] == digests[0][1] == digests[0][2]


@pytest.mark.parametrize("form", FORMS)
def test_a_missing_peer_is_named(form: str) -> None:
    memory = anonymous_memory(total_bytes(2, BUFFER_BYTES))
    group = SharedMemoryGroup(memory, 0, 2, BUFFER_BYTES, timeout_s=0.05)
    x = torch.ones(4)
    if form == "kernels":
        from oarlock.workers.kernels.cpu.fused_layer import all_reduce_of
        from oarlock.workers.kernels.cpu.library import library

        missing = all_reduce_of(library())(group.address, x.data_ptr(), x.numel())
        assert missing == 1
        assert str(group.lost(missing)) == "rank 1 did not reach collective 1 within 0.05 s"
        return
    with pytest.raises(PeerLostError, match="rank 1 did not reach collective 1"):
        group.all_reduce(x)
