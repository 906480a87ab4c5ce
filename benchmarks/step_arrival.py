"""How long a step takes from the executor to a rank that holds it: on the executor's host, and on another node.

    python -m benchmarks.step_arrival [--steps N] [--pause-ms N]

Two nodes on one machine, joined over 127.0.0.1, each with one rank that runs no model and notes when it holds a step.
`ring`: the rank beside the executor; `link`: the rank of the other node, behind an encrypted link, the node's process
and its ring. `gloo`: a broadcast of the same bytes between two processes, by torch's gloo. Steps come apart by a pause,
so that every reader sleeps when one comes. Figures are microseconds. Those of `ring` and `link` include packing the
step, `pack`, which gloo's bytes need as well.
"""

from __future__ import annotations

import argparse
import mmap
import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np

from workers.config import NodesConfig, WorkerConfig
from workers.distributed.nodes import admission, interface, joining
from workers.distributed.shm_ring import ChannelClosedError, RingLayout, RingReader, RingWriter
from workers.protocol import StepMetadata, StepOutput, pack_output, pack_step, step_bytes, unpack_step
from workers.worker import worker_process
from workers.worker.greedy_step import SequenceChunk, greedy_step
from workers.worker.nodes import host_ranks
from workers.worker.nodes.gather import max_message_bytes
from workers.worker.nodes.group_ranks import GroupRanks
from workers.worker.nodes.node_process import NodeProcess
from workers.worker.spawn_ranks import RankArguments

BLOCK = 16
MOST_STEPS = 100_000
RANK = "benchmarks.step_arrival"  # the program of the ranks
TIMES = "OARLOCK_BENCHMARK_TIMES"  # path of the file of times of arrival, ns: [rank, step]


def times(path: str) -> np.ndarray:
    """Of two ranks, shared between processes."""
    with Path(path).open("r+b") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 2 * MOST_STEPS * 8), np.int64).reshape(2, MOST_STEPS)


def run_rank(argv: list[str]) -> None:
    control = worker_process.begin(argv)
    arguments = RankArguments.receive(control)
    rings = worker_process.RankRings(**arguments.extra)
    steps = RingReader(rings.step_memory_fd, rings.step_wake_fd, arguments.local_rank, RingLayout(**rings.step_layout))
    answers = None
    if rings.output_wake_fd is not None:
        answers = RingWriter(rings.output_memory_fd, [rings.output_wake_fd], RingLayout(**rings.output_layout))
    arrived = times(os.environ[TIMES])[arguments.rank]
    try:
        while True:
            with steps.recv() as slot:
                now, step = time.monotonic_ns(), unpack_step(slot)
                arrived[step.step_id] = now
                if answers is not None:
                    with answers.send() as buffer:
                        pack_output(StepOutput(step.step_id, np.empty(0, np.int32), np.empty(0, np.uint8)), buffer)
    except ChannelClosedError:
        return


def run_node(config: WorkerConfig, nodes: NodesConfig) -> None:
    link = joining.join(nodes, {}, lambda _: None, max_message_bytes(config))
    stop_fd, _ = os.pipe()
    NodeProcess(config, 1, link, [], lambda *_: None, stop_fd).run()


def settings(port: int, secret: str) -> tuple[WorkerConfig, NodesConfig]:
    config = WorkerConfig("none", "cpu", tensor_parallel_size=2, nnodes=2, max_model_len=4096, num_threads=1)
    return config, NodesConfig(0, 2, "127.0.0.1", port, None, secret)


def example(tokens: int, seqs: int) -> StepMetadata:
    """A step of `seqs` sequences of so many tokens each."""
    chunks = [SequenceChunk([5] * tokens, 0, range(1, 1 + -(-tokens // BLOCK))) for _ in range(seqs)]
    return greedy_step(chunks, BLOCK, [tokens - 1 + tokens * seq for seq in range(seqs)], step_id=1)


def arrivals(
    send: Callable[[StepMetadata], None], step: StepMetadata, first: int, steps: int, pause_s: float
) -> np.ndarray:
    """When each was sent, ns."""
    sent = np.zeros(steps, np.int64)
    for index in range(steps):
        one = replace(step, step_id=first + index)
        sent[index] = time.monotonic_ns()
        send(one)
        time.sleep(pause_s)
    return sent


def packing(step: StepMetadata, steps: int, pause_s: float) -> np.ndarray:
    """How long it takes to make the bytes of a step, microseconds."""
    buffer, took = memoryview(bytearray(step_bytes(step))), []
    for _ in range(steps):
        time.sleep(pause_s)
        began = time.monotonic_ns()
        pack_step(step, buffer)
        took.append((time.monotonic_ns() - began) / 1000)
    return np.array(took)


def run_gloo(rank: int, port: int, sizes: list[int], steps: int, pause_s: float, path: str) -> None:
    """Broadcasts of `sizes` bytes: rank 0 notes when it began, rank 1 when the bytes were there."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=timedelta(seconds=60))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    noted, index = times(path)[rank], 0
    for size in sizes:
        data = torch.zeros(size, dtype=torch.uint8)
        for _ in range(steps):
            if rank == 0:
                time.sleep(pause_s)
                noted[index] = time.monotonic_ns()
                dist.broadcast(data, 0)
            else:
                dist.broadcast(data, 0)
                noted[index] = time.monotonic_ns()
            index += 1
    dist.barrier()


def summary(microseconds: np.ndarray) -> str:
    values = sorted(microseconds.tolist())
    return f"{statistics.median(values):8.0f} {values[len(values) * 9 // 10]:8.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--pause-ms", type=float, default=2.0)
    arguments = parser.parse_args()
    pause_s = arguments.pause_ms / 1000
    shapes = [(1, 1), (1, 64), (2048, 1)]
    examples = [example(*shape) for shape in shapes]
    with tempfile.NamedTemporaryFile() as file:
        os.truncate(file.name, 2 * MOST_STEPS * 8)
        os.environ[TIMES] = file.name
        found = over_link(examples, arguments.steps, pause_s, times(file.name))
        gloo = over_gloo(list(map(step_bytes, examples)), arguments.steps, pause_s, file.name)
    print("                              pack              ring              link              gloo")
    print("tokens x seqs   bytes    median     90%    median     90%    median     90%    median     90%")
    for (tokens, seqs), one, (ring, link), other in zip(shapes, examples, found, gloo, strict=True):
        columns = " ".join(map(summary, (packing(one, arguments.steps, pause_s), ring, link, other)))
        print(f"{tokens:6} x {seqs:3}  {step_bytes(one):7}  {columns}")


def over_link(
    examples: list[StepMetadata], steps: int, pause_s: float, arrived: np.ndarray
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each example, microseconds until the rank beside the executor had a step, and until the other rank had it."""
    secret = secrets.token_hex(32)
    config, nodes = settings(0, secret)
    listener = interface.listen(nodes)
    port = listener.getsockname()[1]
    command = [sys.executable, "-m", "benchmarks.step_arrival", "node", str(port), secret]
    node = subprocess.Popen(command)
    links = admission.admit(listener, replace(nodes, port=port), {}, lambda _: None, max_message_bytes(config))
    setattr(host_ranks, "SERVES", RANK)  # noqa: B010
    ranks = GroupRanks(config, links.values(), "127.0.0.1")
    found, first = [], 1

    def send(step: StepMetadata) -> None:
        ranks.send_step(step, masks_follow=False)
        assert ranks.receive_answer(10) is not None

    try:
        arrivals(send, examples[0], first, 50, pause_s)  # processes have started
        for step in examples:
            first += steps
            sent = arrivals(send, step, first, steps, pause_s)
            assert ranks.wait_until_finished(10)
            took = (arrived[:, first : first + steps] - sent) / 1000
            found.append((took[0], took[1]))
    finally:
        ranks.close()
        node.wait(20)
    return found


def over_gloo(sizes: list[int], steps: int, pause_s: float, path: str) -> list[np.ndarray]:
    with interface.listen(settings(0, "none")[1]) as probe:
        port = probe.getsockname()[1]
    words = [str(port), ",".join(map(str, sizes)), str(steps), str(pause_s), path]
    command = [sys.executable, "-m", "benchmarks.step_arrival", "gloo"]
    processes = [subprocess.Popen([*command, str(rank), *words]) for rank in (0, 1)]
    for process in processes:
        assert process.wait(120) == 0
    noted = times(path)[:, : len(sizes) * steps]
    took = ((noted[1] - noted[0]) / 1000).reshape(len(sizes), steps)
    return list(took)


if __name__ == "__main__":
    if sys.argv[1:2] == ["node"]:
        setattr(host_ranks, "SERVES", RANK)  # noqa: B010
        own, others = settings(int(sys.argv[2]), sys.argv[3])
        run_node(own, replace(others, node_rank=1))
    elif sys.argv[1:2] == ["gloo"]:
        number, store, lengths, count, pause, where = sys.argv[2:]
        run_gloo(int(number), int(store), list(map(int, lengths.split(","))), int(count), float(pause), where)
    elif len(sys.argv) == 3 and sys.argv[1].isdigit():
        run_rank(sys.argv[1:])
    else:
        main()
