"""Sums over the ranks of two hosts, and the ways for what must go between the hosts, by size.

    python -m benchmarks.node_sums [--kind loopback veth relay] [--ranks-per-host N] [--rounds N] [--delay-us N]

The ways take turns in each round. `exchange`: both first ranks send each other so many bytes over the TCP connection
that sums use (`workers/distributed/peers/peer_socket.py`). `gloo gather`, `gloo send/recv`, `gloo sum`: the same, or
the whole sum, by torch's gloo. `sum`: what a layer calls, over all ranks, shared memory within each host included.
`round trip`: of one byte there and one back. Figures are microseconds: the median over rounds of a round's mean.

Hosts are network namespaces (`tests/multihost/hosts.py`); `loopback` needs no permission for them. `--delay-us` is one
way, on a cable of kind `relay`.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.multihost.hosts import TwoHosts
from workers.distributed.peers.meeting import meet
from workers.distributed.peers.peer_socket import data_of, exchange
from workers.distributed.rank_groups import join_groups
from workers.distributed.rendezvous import RendezvousInfo
from workers.distributed.shm_layout import total_bytes
from workers.distributed.shm_ring import anonymous_memory

SIZES = tuple(size << 10 for size in (4, 16, 64, 256, 1024, 8192))  # bytes of float32
BUFFER_BYTES = 4 << 20
ROUND_S = 0.1  # of one way at one size
TIMEOUT_S = 60.0
_NOTHING = memoryview(b"")


def measure(kind: str, ranks_per_host: int, rounds: int, delay_us: float) -> dict[str, dict[str, float]]:
    """Microseconds by way and size."""
    size = 2 * ranks_per_host
    with ExitStack() as opened:
        hosts = opened.enter_context(TwoHosts(kind))  # ty: ignore[invalid-argument-type]
        if delay_us:
            hosts.emulate(delay_s=delay_us * 1e-6)
        with hosts.head.inside():
            ours, gloo = (opened.enter_context(socket.create_server((hosts.head.address, 0))) for _ in range(2))
        ranks = []
        for node, host in enumerate(hosts.hosts):
            memory = anonymous_memory(total_bytes(ranks_per_host, BUFFER_BYTES))
            opened.callback(os.close, memory)
            for rank in range(node * ranks_per_host, (node + 1) * ranks_per_host):
                info = {
                    "rank": rank,
                    "size": size,
                    "port": ours.getsockname()[1],
                    "listen_fd": ours.fileno() if rank == 0 else None,
                    "memory_fd": memory,
                    "buffer_bytes": BUFFER_BYTES,
                    "timeout_s": TIMEOUT_S,
                    "shares_cores": size > (os.cpu_count() or 1),
                    "nnodes": 2,
                    "address": hosts.head.address,
                    "local_address": host.address,
                    "token": "benchmark" * 4,
                }
                where = {"port": gloo.getsockname()[1], "listen_fd": gloo.fileno() if rank == 0 else None}
                command = [sys.executable, "-m", "benchmarks.node_sums", "--rank", json.dumps([info, where, rounds])]
                fds = [memory, *([ours.fileno(), gloo.fileno()] if rank == 0 else [])]
                environment = os.environ | {"GLOO_SOCKET_IFNAME": host.interface, "OMP_NUM_THREADS": "1"}
                with host.inside():
                    ranks.append(subprocess.Popen(command, pass_fds=fds, stdout=subprocess.PIPE, env=environment))
                opened.callback(ranks[-1].kill)
        found = ranks[0].communicate()[0]
        assert all(rank.wait(TIMEOUT_S) == 0 for rank in ranks)
    return json.loads(found)


def run_rank(info: RendezvousInfo, where: dict[str, int | None], rounds: int) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    groups = join_groups(info, torch.device("cpu"))
    ranks_per_host = info.size // 2
    node, is_first = info.rank // ranks_per_host, info.rank % ranks_per_host == 0
    ways: dict[str, Callable[[torch.Tensor, torch.Tensor], object]] = {}
    if is_first:
        ways = _ways_between_first_ranks(info, where, node)
    ways["sum"] = lambda x, y: groups.tp.all_reduce(x)
    found: dict[str, dict[str, float]] = {}
    names = ("round trip", "exchange", "gloo gather", "gloo send/recv", "gloo sum", "sum")
    for size in SIZES:
        x, y = torch.zeros(size // 4), torch.zeros(size // 4)
        means: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(rounds + 1):
            for name in names:
                way = ways.get(name)
                if way is not None:
                    means[name].append(_mean_s(way, x, y))
        for name, all_means in means.items():
            if all_means:
                found.setdefault(name, {})[str(size)] = statistics.median(all_means[1:]) * 1e6
    groups.tp.all_reduce(torch.zeros(1))  # nobody ends before all are done
    return found


def _mean_s(way: Callable, x: torch.Tensor, y: torch.Tensor) -> float:
    """Of so many calls that they take about `ROUND_S` at 1 GB/s; the same number on every rank."""
    count = max(5, int(ROUND_S / (200e-6 + x.nbytes / 1e9)))
    way(x, y)
    begun = time.perf_counter()
    for _ in range(count):
        way(x, y)
    return (time.perf_counter() - begun) / count


def _ways_between_first_ranks(info: RendezvousInfo, where: dict, node: int) -> dict[str, Callable]:
    """Each takes what to send, and where to put what comes."""
    store = dist.TCPStore(
        info.address, where["port"], 2, is_master=node == 0, wait_for_workers=False,
        timeout=timedelta(seconds=TIMEOUT_S), master_listen_fd=where["listen_fd"],
    )  # fmt: skip
    dist.init_process_group("gloo", store=store, rank=node, world_size=2, timeout=timedelta(seconds=TIMEOUT_S))
    peer = meet(store, node, [1 - node], info.local_address, info.token, TIMEOUT_S)[1 - node]
    byte = memoryview(bytearray(1))

    def round_trip(x: torch.Tensor, y: torch.Tensor) -> None:
        for sends in (node == 0, node == 1):
            exchange([peer], [byte if sends else _NOTHING], [_NOTHING if sends else byte])

    def send_and_receive(x: torch.Tensor, y: torch.Tensor) -> None:
        comes, goes = dist.irecv(y, 1 - node), dist.isend(x, 1 - node)
        assert comes is not None and goes is not None
        comes.wait()
        goes.wait()

    def gather(x: torch.Tensor, y: torch.Tensor) -> None:
        dist.all_gather([y, x] if node else [x, y], x)

    return {
        "round trip": round_trip,
        "exchange": lambda x, y: exchange([peer], [data_of(x)], [data_of(y)]),
        "gloo gather": gather,
        "gloo send/recv": send_and_receive,
        "gloo sum": lambda x, y: dist.all_reduce(x),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", nargs="+", default=["loopback", "veth"], choices=["loopback", "veth", "relay"])
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay-us", type=float, default=0.0)
    parser.add_argument("--rank", help=argparse.SUPPRESS)  # one rank of this benchmark
    arguments = parser.parse_args()
    if arguments.rank:
        info, where, rounds = json.loads(arguments.rank)
        found = run_rank(RendezvousInfo(**info), where, rounds)
        sys.stdout.write(json.dumps(found))
        sys.stdout.flush()
        os._exit(0)  # gloo's threads may wait for a rank that has ended
    for kind in arguments.kind:
        found = measure(kind, arguments.ranks_per_host, arguments.rounds, arguments.delay_us)
        print(f"\n{kind}, {arguments.ranks_per_host} ranks on each host, microseconds")
        print(f"{'':16}" + "".join(f"{int(size) >> 10:>9} K" for size in found["sum"]))
        for way, by_size in found.items():
            print(f"{way:16}" + "".join(f"{us:>11.0f}" for us in by_size.values()))


if __name__ == "__main__":
    main()
