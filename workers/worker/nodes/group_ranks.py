"""The ranks of all nodes, as node 0 drives them: those of its own host, and through a relay those of the others.

A step is packed once, into the ring of this host, of which the relay is one more reader. The first cause of a failure
is told to all nodes, whichever of them has it. Torch-free.
"""

import contextlib
import logging
import os
import select
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from oarlock.workers.config import NodesConfig, OnProgress, WorkerConfig
from oarlock.workers.distributed.rendezvous import StoreAddress
from oarlock.workers.distributed.shm_ring import ChannelClosedError
from oarlock.workers.distributed.topology import Topology
from oarlock.workers.errors import EXIT_RANK_DIED, StartupError, WorkerError
from oarlock.workers.protocol import StepMetadata, StepOutput
from oarlock.workers.rank_processes import RankProcess, end_ranks, start_ranks
from oarlock.workers.worker.nodes.ending import Ending
from oarlock.workers.worker.nodes.facts import Facts
from oarlock.workers.worker.nodes.first_cause import FirstCause
from oarlock.workers.worker.nodes.host_ranks import HostRanks
from oarlock.workers.worker.nodes.ranks import GRACE_AFTER_FAILURE_S, GRACE_S, Place
from oarlock.workers.worker.spawn_ranks import NodePlace, describe_exit

_RELAY = "oarlock.workers.worker.nodes.relay"
_LAST_WORDS_S = 1.0  # a node that is lost may be known later than the failures that follow from it
_PLACES_S = 1.0  # for the relay to say how far the ranks of other nodes are
_LEAVE_S = 4.0  # for the other nodes to end
_UNKNOWN = Place(-1, -1, -1)

logger = logging.getLogger("oarlock.nodes")


class GroupRanks:
    """`Ranks` of several hosts."""

    kv_reports = None

    def __init__(
        self,
        config: WorkerConfig,
        nodes: NodesConfig,
        facts: Facts,
        on_progress: OnProgress,
        ahead: Sequence[RankProcess] = (),
        leave_pid: int = 0,
    ) -> None:
        """Waits until the other nodes have joined, then starts the ranks of this one. Takes over `ahead`, rank
        processes that run already. `facts`: of `oarlock.workers.fingerprint.node_facts`. `leave_pid`: of the process
        that gets SIGTERM when a node's operator wants it to stop. Raises `StartupError`."""
        self._topology = Topology.of(config)
        self._messages: list[tuple[int, dict[str, Any]]] = []  # of ranks
        self._places: list[list | None] | None = None
        self._first_cause = FirstCause()
        self._lost: tuple[int, str] | None = None  # the first node that was lost
        self._has_pong = self._closed = False
        self._names: list[str] = []  # of the nodes
        self._ahead = ahead
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the relay's torch warns of hosts without a name
        (self._relay,) = start_ranks(1, _RELAY)
        try:
            place = self._join(nodes, facts, on_progress, leave_pid)
            self._host = HostRanks(config, ahead, place, self._relay.control)
        except ChannelClosedError:
            self.close(failure := self._relay_ended())
            raise failure from None
        except BaseException as error:
            self.close(error if isinstance(error, Exception) else None)
            raise

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
            raise self._relay_ended() from None
        if said["kind"] == "failed":
            raise StartupError(said["cause"], said["fix"], said["exit_code"])
        self._names = said["names"]
        for name in self._names[1:]:
            logger.info("event=node_joined node=%r", name)
        return NodePlace(0, said["interface"], StoreAddress(*said["store"]))

    def _relay_ended(self) -> StartupError:
        how = "it closed its channel"
        with contextlib.suppress(subprocess.TimeoutExpired):
            how = describe_exit(self._relay.process.wait(1.0))
        return StartupError(f"The relay to the other nodes has ended: {how}.", "The log says more.", EXIT_RANK_DIED)

    @property
    def pids(self) -> tuple[int, ...]:
        return self._host.pids

    @property
    def filenos(self) -> list[int]:
        return [*self._host.filenos, self._relay.control.fileno()]

    @property
    def step_times_ns(self) -> Sequence[int]:
        return self._host.step_times_ns

    # -- start

    def tell_all(self, kind: str, **fields: Any) -> None:
        self._host.tell_all(kind, **fields)
        self._tell_relay("tell", message={"kind": kind, "fields": fields})

    def messages(self, timeout_s: float) -> list[tuple[int, dict[str, Any]]]:
        """Raises `StartupError` when a node is lost. A failure that may follow from another comes after it."""
        if not self._host.has_message and not self._messages and not self._relay.control.has_pending:
            select.select(self.filenos, [], [], timeout_s)
        self._hear_all()
        if self._has_failed:
            self._wait_for_first_cause()
        if self._lost is not None and not self._first_cause.is_sure:
            raise StartupError(f"While loading, {self._lost[1]}.", "See the log of that node.", EXIT_RANK_DIED)
        found = sorted(self._messages, key=lambda said: bool(said[1].get("of_peer")))
        self._messages.clear()
        return found

    # -- steps

    def send_step(self, step: StepMetadata, *, masks_follow: bool) -> None:
        self._host.send_step(step, masks_follow=masks_follow)

    def send_masks(self, bits: np.ndarray) -> None:
        self._host.send_masks(bits)

    def receive_answer(self, timeout_s: float) -> StepOutput | None:
        return self._host.receive_answer(timeout_s, [self._relay.control.fileno()])

    def wait_until_finished(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        self._has_pong = False
        self._tell_relay("ping")
        if not self._host.wait_until_finished(timeout_s):
            return False
        while not self._has_pong:
            ready = select.select(self.filenos, [], [], max(0.0, deadline - time.monotonic()))[0]
            self._hear()
            if set(ready) & set(self._host.filenos) or self._has_failed:
                raise ChannelClosedError("a rank or a node has something to say, or has ended")
            if not ready:
                return False
        return True

    # -- what other nodes say

    def _tell_relay(self, kind: str, **fields: Any) -> None:
        with contextlib.suppress(ChannelClosedError):  # hearing it shows it
            self._relay.control.send(kind, **fields)

    @property
    def _has_failed(self) -> bool:
        return self._lost is not None or self._first_cause.error(0) is not None

    def _hear_all(self) -> None:
        """What ranks of this host have to say as well."""
        for rank, message in self._host.messages(0.0):
            self._first_cause.add(rank, message)
            self._messages.append((rank, message))
        self._hear()

    def _hear(self) -> None:
        control = self._relay.control
        try:
            while control.has_pending or select.select([control], [], [], 0.0)[0]:
                self._sort(control.recv())
        except ChannelClosedError:
            self._lost = self._lost or (0, self._relay_ended().cause)

    def _sort(self, said: dict[str, Any]) -> None:
        if said["kind"] == "rank":
            rank, message = said["rank"], said["message"]
            if message.get("cause"):
                message = {**message, "cause": f"{message['cause']} (on {self._names[said['node']]})"}
            self._first_cause.add(rank, message)
            self._messages.append((rank, message))
        elif said["kind"] == "lost":
            self._lost = self._lost or (said["node"], said["why"])
        elif said["kind"] == "pong":
            self._has_pong = True
        elif said["kind"] == "places":
            self._places = said["places"]

    # -- failures and the end

    def failure(self, step_id: int) -> WorkerError:
        self._wait_for_first_cause()
        if self._lost is not None and not self._first_cause.is_sure:
            node, why = self._lost
            return WorkerError(self._topology.ranks_of(node).start, step_id, why)
        return self._first_cause.error(step_id) or WorkerError(0, step_id, "its channel closed")

    def _wait_for_first_cause(self) -> None:
        deadline = time.monotonic() + _LAST_WORDS_S
        self._hear_all()
        while not self._first_cause.is_sure and self._lost is None and (left := deadline - time.monotonic()) > 0:
            select.select(self.filenos, [], [], left)
            self._hear_all()

    def places(self) -> list[Place]:
        """A node that has said nothing has ranks that are behind all others."""
        self._places = None
        self._tell_relay("places")
        deadline = time.monotonic() + _PLACES_S
        while self._places is None and self._lost is None and (left := deadline - time.monotonic()) > 0:
            select.select([self._relay.control], [], [], left)
            self._hear()
        found = self._host.places()
        for places in self._places or [None] * (self._topology.nnodes - 1):
            of_node = [_UNKNOWN] * self._topology.ranks_per_node if places is None else [Place(*p) for p in places]
            found += of_node
        return found

    def log_stacks(self) -> None:
        """Other nodes write those of their ranks when they read that one hangs."""
        self._host.log_stacks()

    def close(self, failure: Exception | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        if hasattr(self, "_host"):
            deadline = time.monotonic() + _LEAVE_S
            self._tell_relay("end", ending=asdict(Ending.of(failure)))
            self._host.close(grace_s=GRACE_S if failure is None else GRACE_AFTER_FAILURE_S)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._relay.process.wait(max(0.0, deadline - time.monotonic()))
        else:
            end_ranks(self._ahead)
        end_ranks([self._relay])
