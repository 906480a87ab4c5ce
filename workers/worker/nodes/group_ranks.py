"""The ranks of all nodes, as the head drives them: those of its own host, and through links those of the others.

A step is packed once, into the ring of this host, and the same bytes go to every other node before the local ranks are
woken. The first cause of a failure is told to all nodes, whichever of them has it.
"""

import contextlib
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from workers.config import WorkerConfig
from workers.distributed.nodes.link import Link
from workers.distributed.shm_ring import ChannelClosedError
from workers.distributed.topology import Topology
from workers.errors import EXIT_RANK_DIED, StartupError, WorkerError
from workers.protocol import StepMetadata, StepOutput, mask_span, pack_step, unpack_output
from workers.rank_processes import RankProcess
from workers.worker.nodes import messages
from workers.worker.nodes.ending import Ending
from workers.worker.nodes.first_cause import FirstCause
from workers.worker.nodes.host_ranks import HostRanks
from workers.worker.nodes.node_links import Arrival, NodeLinks
from workers.worker.nodes.ranks import GRACE_AFTER_FAILURE_S, GRACE_S, Place
from workers.worker.spawn_ranks import NodePlace

_LAST_WORDS_S = 1.0  # a node that is lost may be known later than the failures that follow from it
_PLACES_S = 1.0  # for a node to say how far its ranks are
_MORE_S = 1.0  # than its ranks get, for a node to end
_UNKNOWN = Place(-1, -1, -1)


class GroupRanks:
    """`Ranks` of several hosts. Starts those of this one in its constructor, and has the others started."""

    kv_reports = None

    def __init__(
        self,
        config: WorkerConfig,
        links: Iterable[Link],
        address: str,
        ahead: Iterable[RankProcess] = (),
        on_leave: Callable[[], None] = lambda: None,
    ) -> None:
        """Takes over `links`, to every other node. `address`: of this host. `on_leave`: see `NodeLinks`."""
        self._topology = Topology.of(config)
        self._links = NodeLinks(links, on_leave)
        self._answers: deque[bytes] = deque()  # from another node
        self._messages: list[tuple[int, dict[str, Any]]] = []  # of ranks
        self._pongs: dict[int, int] = dict.fromkeys(self._links.nodes, 0)
        self._num_pings = 0
        self._places: dict[int, list[Place]] = {}
        self._first_cause = FirstCause()
        self._lost: tuple[int, str] | None = None  # the first node whose link was lost
        self._closed = False
        try:
            self._host = HostRanks(config, list(ahead), NodePlace(0, address))
            with contextlib.suppress(ChannelClosedError):  # reading its messages shows it
                self._links.send(messages.START, messages.packed(**self._host.store._asdict()))
        except BaseException as error:
            self.close(error if isinstance(error, Exception) else None)
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        return self._host.pids

    @property
    def filenos(self) -> list[int]:
        return [*self._host.filenos, self._links.fileno()]

    @property
    def step_times_ns(self) -> Sequence[int]:
        return self._host.step_times_ns

    # -- start

    def tell_all(self, kind: str, **fields: Any) -> None:
        self._host.tell_all(kind, **fields)
        with contextlib.suppress(ChannelClosedError):
            self._links.send(messages.TELL, messages.packed(kind=kind, fields=fields))

    def messages(self, timeout_s: float) -> list[tuple[int, dict[str, Any]]]:
        """Raises `StartupError` when a node is lost. A failure that may follow from another comes after it."""
        if not self._host.has_message and not self._messages:
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
        with self._host.steps.send(rest_follows=masks_follow) as slot:
            size = pack_step(step, slot, without_masks=masks_follow)
            if masks_follow:
                begin, end = mask_span(slot)
                self._links.send(messages.FIRST_PART, slot[:begin], slot[end:size])
            else:
                self._links.send(messages.STEP, slot[:size])

    def send_masks(self, bits: np.ndarray) -> None:
        self._links.send(messages.MASKS, np.ascontiguousarray(bits).tobytes())
        self._host.send_masks(bits)

    def receive_answer(self, timeout_s: float) -> StepOutput | None:
        if self._host.answers is not None:
            return self._host.receive_answer(timeout_s, [self._links.fileno()])
        deadline = time.monotonic() + timeout_s
        while not self._answers:
            if not self._wait(deadline - time.monotonic()):
                return None
        return unpack_output(memoryview(self._answers.popleft()))

    def wait_until_finished(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        self._num_pings += 1
        self._links.send(messages.PING, messages.packed(number=self._num_pings))
        if not self._host.wait_until_finished(timeout_s):
            return False
        while min(self._pongs.values()) < self._num_pings:
            if not self._wait(deadline - time.monotonic()):
                return False
        return True

    def _wait(self, timeout_s: float) -> bool:
        """Wait for something from another node, and sort it; False when nothing comes in time."""
        ready = select.select(self.filenos, [], [], max(0.0, timeout_s))[0]
        self._hear()
        if set(ready) & set(self._host.filenos) or self._has_failed:
            raise ChannelClosedError("a rank or a node has something to say, or has ended")
        return bool(ready)

    # -- what other nodes say

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
        for arrival in self._links.take():
            self._sort(arrival)

    def _sort(self, arrival: Arrival) -> None:
        node, message = arrival.node, arrival.message
        if message is None:
            self._lost = self._lost or (node, arrival.lost)
        elif message.kind == messages.ANSWER:
            self._answers.append(message.payload)
        elif message.kind == messages.RANK:
            fields = messages.unpacked(message.payload)
            rank, said = int(fields["rank"]), fields["message"]
            if said.get("cause"):
                said = {**said, "cause": f"{said['cause']} (on {self._links.name_of(node)})"}
            self._first_cause.add(rank, said)
            self._messages.append((rank, said))
        elif message.kind == messages.PONG:
            self._pongs[node] = int(messages.unpacked(message.payload)["number"])
        elif message.kind == messages.PLACES:
            self._places[node] = [Place(*place) for place in messages.unpacked(message.payload)["places"]]

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
        """A node that does not answer has ranks that are behind all others."""
        self._places.clear()
        self._ask_for_places()
        deadline = time.monotonic() + _PLACES_S
        while len(self._places) < len(self._links.nodes) and (left := deadline - time.monotonic()) > 0:
            select.select([self._links.fileno()], [], [], left)
            self._hear()
        found = self._host.places()
        for node in self._links.nodes:
            found += self._places.get(node, [_UNKNOWN] * self._topology.ranks_per_node)
        return found

    def _ask_for_places(self) -> None:
        try:
            self._links.send(messages.PLACES)
        except ChannelClosedError:
            return  # then it is one that does not answer

    def log_stacks(self) -> None:
        """Those of other nodes were written when they were asked for their places."""
        self._host.log_stacks()

    def close(self, failure: Exception | None = None) -> None:
        if self._closed:
            return
        self._closed = True
        grace_s = GRACE_S if failure is None else GRACE_AFTER_FAILURE_S
        deadline = time.monotonic() + grace_s
        if hasattr(self, "_host"):
            self._host.begin_to_close()
        self._links.close(messages.END, Ending.of(failure).to_bytes(), grace_s + _MORE_S)
        if hasattr(self, "_host"):
            self._host.close(grace_s=max(0.0, deadline - time.monotonic()))
