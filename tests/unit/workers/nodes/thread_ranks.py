"""Ranks that are threads of the test, behind the real rings and control channels, and two ends of a real link.

A rank notes the bytes of every step, and the answering rank answers it with as many rows as the step has sequences.
"""

import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from workers.config import WorkerConfig
from workers.distributed.control_channel import Control
from workers.distributed.nodes.handshake import Opening, answer
from workers.distributed.nodes.link import Link, Peer
from workers.distributed.shm_layout import Flags, total_bytes
from workers.distributed.shm_ring import ChannelClosedError, RingLayout, RingReader, RingWriter, anonymous_memory
from workers.distributed.topology import Topology
from workers.protocol import StepOutput, pack_output, step_bytes, unpack_step
from workers.rank_processes import RankProcess
from workers.worker.spawn_ranks import NodePlace, SpawnedRanks, Store

STORE = Store("127.0.0.1", 4711, "token")


def config(tp: int = 2, pp: int = 1, nnodes: int = 2) -> WorkerConfig:
    return WorkerConfig(
        "model",
        device="cpu",
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        nnodes=nnodes,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        num_threads=1,
        step_timeout_s=5.0,
    )


def linked(max_bytes: int = 64 << 20, *, node: int = 1) -> tuple[Link, Link]:
    """The head's end and the other node's, of one connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        theirs = socket.create_connection(listener.getsockname())
        ours, _ = listener.accept()
    opening = Opening("secret")
    said, keys = answer("secret", opening.message)
    head = Link(ours, keys, Peer(node, "other-host", "127.0.0.1"), max_bytes)
    return head, Link(theirs, opening.finish(said), Peer(0, "head-host", "127.0.0.1"), max_bytes)


@dataclass
class ThreadRank:
    """One rank, and its process as far as `HostRanks` knows it."""

    rank: int
    pid: int
    control: Control
    steps: RingReader
    answers: RingWriter | None
    seen: list[bytes] = field(default_factory=list)  # of steps, without what follows
    masks: list[np.ndarray] = field(default_factory=list)
    signals: list[int] = field(default_factory=list)
    may_finish: threading.Event = field(default_factory=threading.Event)  # a step, and answer it
    returncode: int | None = None

    def start(self) -> None:
        self.may_finish.set()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while True:
                with self.steps.recv() as slot:
                    self._execute(slot)
        except ChannelClosedError:
            self.returncode = 0 if self.returncode is None else self.returncode
        self.control.close()
        self.steps.close()
        if self.answers is not None:
            self.answers.close()

    def _execute(self, slot: memoryview) -> None:
        step = unpack_step(slot)
        self.seen.append(bytes(slot[: step_bytes(step)]))
        self.may_finish.wait()
        self.steps.wait_for_rest()
        self.masks.append(step.mask_bits.copy())
        if self.answers is not None:
            rows = len(step.logits_indices)
            output = StepOutput(step.step_id, np.arange(rows, dtype=np.int32), np.ones(rows, np.uint8))
            with self.answers.send() as buffer:
                pack_output(output, buffer)

    def join(self) -> None:
        """Until its thread has closed all that it had."""
        self._thread.join(60)

    def die(self) -> None:
        """As if it were killed."""
        self.returncode = -9
        self.control.close()

    # -- as a process

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float) -> int:
        self._thread.join(timeout if self.returncode is None else 0.0)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("rank", timeout)
        return self.returncode

    def kill(self) -> None:
        self.may_finish.set()
        self.returncode = -9 if self.returncode is None else self.returncode

    def send_signal(self, number: int) -> None:
        self.signals.append(number)


class ThreadRanks:
    """In place of `spawn_ranks`: what it has started, in the order of the ranks."""

    def __init__(self) -> None:
        self.ranks: dict[int, ThreadRank] = {}
        self.places: dict[int, NodePlace] = {}

    def spawn(
        self,
        module: str,
        config: WorkerConfig,
        extras: Sequence[dict[str, Any]],
        ahead: Sequence[RankProcess],
        place: NodePlace,
    ) -> SpawnedRanks:
        topology = Topology(config.tensor_parallel_size, config.pipeline_parallel_size, config.nnodes)
        self.places[place.node] = place
        memory_fd = anonymous_memory(total_bytes(len(extras), 4096))
        controls, ranks = [], []
        for rank, extra in zip(topology.ranks_of(place.node), extras, strict=True):
            ours, theirs = Control.pair()
            layout = RingLayout(**extra["step_layout"])
            wake_fd = os.dup(extra["step_wake_fd"])
            steps = RingReader(extra["step_memory_fd"], wake_fd, topology.local_rank(rank), layout)
            answers = None
            if extra["output_wake_fd"] is not None:
                fd = os.dup(extra["output_wake_fd"])
                answers = RingWriter(extra["output_memory_fd"], [fd], RingLayout(**extra["output_layout"]))
            controls.append(ours)
            ranks.append(ThreadRank(rank, 1_000_000 + rank, theirs, steps, answers))
            self.ranks[rank] = ranks[-1]
            ranks[-1].start()
        flags = Flags(memory_fd, len(extras))
        os.close(memory_fd)
        return SpawnedRanks(ranks, controls, flags, place.store or STORE)  # ty: ignore[invalid-argument-type]
