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
from oarlock.workers.ranks.host_ranks import HostRanks, Place, how_it_ended, how_late
from oarlock.workers.ranks.nodes import Ending, Facts
from oarlock.workers.ranks.spawn_ranks import NodePlace

_RELAY = "oarlock.workers.ranks.relay"
_PLACES_S = 1.0  # time for the other nodes to report the progress of their ranks
_LEAVE_S = 4.0  # time for the other nodes to end
_UNKNOWN = Place(-1, -1, -1)

logger = logging.getLogger("oarlock.nodes")


class GroupRanks(HostRanks):
    """Ranks of several hosts."""

    last_words_s = 1.0  # the loss of a node may be known later than the failures that follow from it

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
        self._asked = 0  # number of requests for places
        self._other_places: dict[int, tuple[int, list]] = {}  # node -> number of the request, and the reply
        self._names: list[str] = []  # names of the nodes
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the relay's torch warns of hosts without a name
        (self._relay,) = start_ranks(1, _RELAY)
        try:
            place = self._join(nodes, facts, on_progress, leave_pid)
        except BaseException:
            end_ranks([*ahead, self._relay])
            raise
        super().__init__(config, ahead, place, self._relay.control)
        self._open.append(self._relay.control)

    def _join(self, nodes: NodesConfig, facts: Facts, on_progress: OnProgress, leave_pid: int) -> NodePlace:
        """Have the relay find the other nodes."""
        deadline = time.monotonic() + nodes.timeout_s
        control = self._relay.control
        try:
            control.send("join", nodes=asdict(nodes), facts=facts, leave_pid=leave_pid)
            while (said := control.recv())["kind"] == "waiting":
                left = max(0.0, deadline - time.monotonic())
                on_progress("waiting for nodes", 0.0, f"{said['text']}, {left:.0f} s left")
        except ChannelClosedError:
            raise StartupError(self._relay_ended(), "See the log.", EXIT_RANK_DIED) from None
        if said["kind"] == "failed":
            raise StartupError(said["cause"], said["fix"], said["exit_code"])
        self._names = said["names"]
        for name in self._names[1:]:
            logger.info("event=node_joined node=%r", name)
        return NodePlace(0, said["interface"], StoreAddress(*said["store"]))

    def _relay_ended(self) -> str:
        return f"The relay to the other nodes has ended: {how_it_ended(self._relay.process)}."

    def _tell_nodes(self, kind: str, **fields: Any) -> None:
        with contextlib.suppress(ChannelClosedError):  # reading its messages shows that it has ended
            self._relay.control.send(kind, **fields)

    def tell_all(self, kind: str, **fields: Any) -> None:
        super().tell_all(kind, **fields)
        self._tell_nodes("tell", message={"kind": kind, "fields": fields})

    # -- messages of other nodes

    def messages(self, timeout_s: float) -> list[tuple[int, dict[str, Any]]]:
        """Return messages as the base class does. A failure that may follow from another one is sorted after it."""
        found = self._hear(timeout_s)
        deadline = time.monotonic() + self.last_words_s
        while self._has_failed and not self._first_cause.is_sure and (left := deadline - time.monotonic()) > 0:
            found += self._hear(left)
        return sorted(found, key=lambda said: how_late(said[1]))

    @property
    def _has_failed(self) -> bool:
        return self._first_cause.error(0) is not None

    def _read(self, control: Control) -> tuple[int, dict[str, Any]] | None:
        if control is not self._relay.control:
            return super()._read(control)
        try:
            said = control.recv()
        except ChannelClosedError:
            self._open.remove(control)
            return self._lost(0, self._relay_ended())
        if said["kind"] == "lost":
            return self._lost(said["node"], said["why"])
        if said["kind"] == "places":
            self._other_places[said["node"]] = said["number"], said["places"]
            return None
        message = said["message"]  # a rank's message
        if message.get("cause"):
            message |= {"cause": f"{message['cause']} (on {self._names[said['node']]})"}
        return said["rank"], message

    def _lost(self, node: int, why: str) -> tuple[int, dict[str, Any]]:
        message = {"kind": "failed", "cause": why, "fix": "See the log of that node.", "exit_code": EXIT_RANK_DIED}
        return self._topology.ranks_of(node).start, message | {"of_node": True}

    def places(self) -> list[Place]:
        """Return the progress of all ranks. The ranks of a node that does not reply count as behind all others."""
        self._asked += 1
        self._tell_nodes("places", number=self._asked)
        deadline = time.monotonic() + _PLACES_S
        others = range(1, self._topology.nnodes)
        found = super().places()
        while not self._has_failed and (left := deadline - time.monotonic()) > 0:
            if all(self._places_of(node) for node in others):
                break
            self._hear(left)
        for node in others:
            found += self._places_of(node) or [_UNKNOWN] * self._topology.ranks_per_node
        return found

    def _places_of(self, node: int) -> list[Place]:
        """Return the places in the reply of `node` to the latest request; empty if it has not replied."""
        number, places = self._other_places.get(node, (0, []))
        return [Place(*place) for place in places] if number == self._asked else []

    # -- the end

    def close(self, failure: Exception | None = None, *, grace_s: float | None = None) -> None:
        if self._closed:
            return
        deadline = time.monotonic() + _LEAVE_S
        self._tell_nodes("end", ending=asdict(Ending.of(failure)))
        super().close(failure, grace_s=grace_s)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._relay.process.wait(max(0.0, deadline - time.monotonic()))
        end_ranks([self._relay])
