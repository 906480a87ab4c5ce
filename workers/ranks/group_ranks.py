"""The ranks of all nodes, as node 0 drives them: directly on its own host, and through a relay on the others.

A step is packed once, into the ring of this host, which the relay reads too. The first cause of a failure is sent to
all nodes, whichever node it comes from. Torch-free.
"""

import contextlib
import logging
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from oarlock.base.errors import EXIT_RANK_DIED, StartupError
from oarlock.workers.config import NodesConfig, OnProgress, WorkerConfig
from oarlock.workers.distributed.control_channel import Control
from oarlock.workers.distributed.shm_ring import ChannelClosedError
from oarlock.workers.distributed.topology import StoreAddress, Topology
from oarlock.workers.rank_processes import RankProcess, end_ranks, start_ranks
from oarlock.workers.ranks.host_ranks import HostRanks, RankProgress, how_it_ended, how_late
from oarlock.workers.ranks.nodes import Ending, Facts
from oarlock.workers.ranks.spawn_ranks import NodePosition

_RELAY = "oarlock.workers.ranks.relay"
_PROGRESS_S = 1.0  # time for the other nodes to report the progress of their ranks
_LEAVE_S = 4.0  # time for the other nodes to end
_UNKNOWN = RankProgress(-1, -1, -1)

logger = logging.getLogger("oarlock.nodes")


class GroupRanks(HostRanks):
    """Ranks of several hosts."""

    # On loaded hosts, the loss of a node may be known seconds after the failures that follow from it. The other nodes
    # get no message in this time, so it is shorter than `host_link.SILENCE_S`, after which they consider node 0 lost.
    failure_report_s = 4.0

    def __init__(
        self,
        config: WorkerConfig,
        nodes: NodesConfig,
        facts: Facts,
        on_progress: OnProgress,
        ahead: Sequence[RankProcess] = (),
        leave_pid: int = 0,
    ) -> None:
        """Wait until the other nodes have joined, then start the ranks of this one. Takes over `ahead`, rank processes
        that already run. `facts`: from `oarlock.workers.fingerprint.node_facts`. `leave_pid`: the process that gets
        SIGTERM when the operator of a node wants it to stop. Raises `StartupError`."""
        self._topology = Topology.of(config)
        self._num_requests = 0  # number of requests for progress
        self._other_progress: dict[int, tuple[int, list]] = {}  # node -> number of the request, and the reply
        self._names: list[str] = []  # names of the nodes
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the relay's torch warns of hosts without a name
        (self._relay,) = start_ranks(1, _RELAY)
        try:
            position = self._join(nodes, facts, on_progress, leave_pid)
        except BaseException:
            end_ranks([*ahead, self._relay])
            raise
        super().__init__(config, ahead, position, self._relay.control)
        self._open.append(self._relay.control)

    def _join(self, nodes: NodesConfig, facts: Facts, on_progress: OnProgress, leave_pid: int) -> NodePosition:
        """Have the relay find the other nodes."""
        deadline = time.monotonic() + nodes.timeout_s
        control = self._relay.control
        try:
            control.send("join", nodes=asdict(nodes), facts=facts, leave_pid=leave_pid)
            while (message := control.recv())["kind"] == "waiting":
                left = max(0.0, deadline - time.monotonic())
                on_progress("waiting for nodes", 0.0, f"{message['text']}, {left:.0f} s left")
        except ChannelClosedError:
            raise StartupError(self._relay_ended(), "See the log.", EXIT_RANK_DIED) from None
        if message["kind"] == "failed":
            raise StartupError(message["cause"], message["fix"], message["exit_code"])
        self._names = message["names"]
        for name in self._names[1:]:
            logger.info("event=node_joined node=%r", name)
        return NodePosition(0, message["interface"], StoreAddress(*message["store"]))

    def _relay_ended(self) -> str:
        return f"The relay to the other nodes has ended: {how_it_ended(self._relay.process)}."

    def _send_to_nodes(self, kind: str, **fields: Any) -> None:
        with contextlib.suppress(ChannelClosedError):  # reading its messages shows that it has ended
            self._relay.control.send(kind, **fields)

    def send_to_all(self, kind: str, **fields: Any) -> None:
        super().send_to_all(kind, **fields)
        self._send_to_nodes("to_ranks", message={"kind": kind, "fields": fields})

    # -- messages of other nodes

    def messages(self, timeout_s: float) -> list[tuple[int, dict[str, Any]]]:
        """Return messages as the base class does. A failure that may follow from another one is sorted after it."""
        found = self._receive(timeout_s)
        deadline = time.monotonic() + self.failure_report_s
        while self._has_failed and not self._first_cause.is_sure and (left := deadline - time.monotonic()) > 0:
            found += self._receive(left)
        return sorted(found, key=lambda message: how_late(message[1]))

    @property
    def _has_failed(self) -> bool:
        return self._first_cause.error(0) is not None

    def _read(self, control: Control) -> tuple[int, dict[str, Any]] | None:
        if control is not self._relay.control:
            return super()._read(control)
        try:
            reply = control.recv()
        except ChannelClosedError:
            self._open.remove(control)
            return self._lost(0, self._relay_ended())
        if reply["kind"] == "lost":
            return self._lost(reply["node"], reply["why"])
        if reply["kind"] == "rank_progress":
            self._other_progress[reply["node"]] = reply["number"], reply["progress"]
            return None
        message = reply["message"]  # a rank's message
        if message.get("cause"):
            message |= {"cause": f"{message['cause']} (on {self._names[reply['node']]})"}
        return reply["rank"], message

    def _lost(self, node: int, why: str) -> tuple[int, dict[str, Any]]:
        message = {"kind": "failed", "cause": why, "fix": "See the log of that node.", "exit_code": EXIT_RANK_DIED}
        return self._topology.ranks_of(node).start, message | {"of_node": True}

    def progress(self) -> list[RankProgress]:
        """Return the progress of all ranks. The ranks of a node that does not reply count as behind all others."""
        self._num_requests += 1
        self._send_to_nodes("rank_progress", number=self._num_requests)
        deadline = time.monotonic() + _PROGRESS_S
        others = range(1, self._topology.nnodes)
        found = super().progress()
        while not self._has_failed and (left := deadline - time.monotonic()) > 0:
            if all(self._progress_of(node) for node in others):
                break
            self._receive(left)
        for node in others:
            found += self._progress_of(node) or [_UNKNOWN] * self._topology.ranks_per_node
        return found

    def _progress_of(self, node: int) -> list[RankProgress]:
        """Return the progress in the reply of `node` to the latest request; empty if it has not replied."""
        number, progress = self._other_progress.get(node, (0, []))
        return [RankProgress(*counters) for counters in progress] if number == self._num_requests else []

    # -- the end

    def close(self, failure: Exception | None = None, *, grace_s: float | None = None) -> None:
        if self._closed:
            return
        deadline = time.monotonic() + _LEAVE_S
        self._send_to_nodes("end", ending=asdict(Ending.of(failure)))
        super().close(failure, grace_s=grace_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._relay.process.wait(max(0.0, deadline - time.monotonic()))
        end_ranks([self._relay])
