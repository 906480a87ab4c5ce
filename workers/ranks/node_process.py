"""The process of a node other than node 0. It runs the ranks of its host and forwards messages to and from them.

One thread receives from node 0 and writes steps into the ring, another receives from the ranks, and a third waits for
the group's ending in the store. If a rank fails, node 0 is informed, and decides how the whole group ends. Messages to
the engine:

    rank           a message of a rank
    rank_progress  progress of the ranks, on request
    leave          the operator wants this node to stop; node 0 then ends the whole group
"""

import contextlib
import logging
import queue
import select
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from oarlock.base.errors import EXIT_RANK_DIED, EXIT_RANK_HUNG
from oarlock.workers.config import OnProgress, WorkerConfig
from oarlock.workers.distributed.shm_ring import ChannelClosedError
from oarlock.workers.protocol import mask_span, output_bytes, unpack_output, unpack_step
from oarlock.workers.rank_processes import RankProcess
from oarlock.workers.ranks.host_link import HEARTBEAT_S, HostLink, Message, MessageKind, NodeLostError
from oarlock.workers.ranks.host_ranks import GRACE_AFTER_FAILURE_S, GRACE_S, FirstCause, HostRanks
from oarlock.workers.ranks.membership import Membership
from oarlock.workers.ranks.nodes import Ending
from oarlock.workers.ranks.spawn_ranks import NodePosition

logger = logging.getLogger("oarlock.nodes")

_CAUSE_S = 1.5  # time for the store to get the ending after node 0 was lost
_POLL_S = 0.001  # interval of checks while the ring has no free slot


class NodeProcess:
    """Runner of one node's ranks. `run` returns how the group ended."""

    def __init__(
        self,
        config: WorkerConfig,
        membership: Membership,
        ahead: Sequence[RankProcess],
        on_phase: OnProgress,
        stop_fd: int,
    ) -> None:
        """Start the ranks. Takes over `ahead`, rank processes that are already running. `stop_fd` becomes readable when
        the operator wants this node to stop."""
        self._membership = membership
        self._on_phase = on_phase
        self._stop_fds = [stop_fd]
        position = NodePosition(membership.node, membership.own.name, membership.where)
        self._ranks = HostRanks(config, ahead, position)
        self._output_fds = [] if self._ranks.outputs is None else [self._ranks.outputs.wake_fd]
        self._read: dict[int, float] = {}  # rank -> fraction of its weights that it has read
        self._first_cause = FirstCause()
        self._endings: queue.SimpleQueue[Ending | str] = queue.SimpleQueue()  # a string describes how node 0 was lost
        self._is_over = False

    def run(self) -> Ending:
        failed = True
        try:
            ending = self._run()
            failed = bool(ending.exit_code)
        finally:
            self._ranks.close(grace_s=GRACE_AFTER_FAILURE_S if failed else GRACE_S)
        if failed:
            logger.error('event=group_failed exit_code=%d cause="%s"', ending.exit_code, ending.cause)
        else:
            logger.info("event=group_ended")
        return ending

    def _run(self) -> Ending:
        self._link = HostLink(self._membership)
        self._membership.watch(self._endings.put)
        for work in (self._receive_all, self._send_all):  # each may wait for seconds for a lost node
            threading.Thread(target=self._watched, args=(work,), name=work.__name__, daemon=True).start()
        ending = first = self._endings.get()
        if isinstance(first, str):  # the store may still contain the cause, unless it is lost too
            with contextlib.suppress(queue.Empty):
                ending = self._endings.get(timeout=_CAUSE_S)
        self._is_over = True
        if isinstance(ending, str):
            why, error = f"{self._membership.names[0]} {first}", self._first_cause.error(0)
            ending = Ending(EXIT_RANK_DIED, why if error is None else f"{error}; {why}")
        elif ending.exit_code == EXIT_RANK_HUNG:
            self._ranks.log_stacks()
        return ending

    def _watched(self, work: Callable[[], None]) -> None:
        """Run `work` until node 0 is lost. Any other error ends this node."""
        try:
            work()
        except NodeLostError as error:
            self._endings.put(str(error))
        except Exception as error:
            if not self._is_over:  # otherwise the ranks were closed meanwhile
                logger.exception("event=node_failed")
                self._endings.put(Ending.of(error))

    # -- from the ranks to node 0

    def _send_all(self) -> None:
        next_beat_s = 0.0
        while not self._is_over:
            if time.monotonic() > next_beat_s:
                next_beat_s = time.monotonic() + HEARTBEAT_S
                self._link.send(MessageKind.HEARTBEAT)
            self._send_pending(next_beat_s - time.monotonic())

    def _send_pending(self, wait_s: float) -> None:
        if self._ranks.has_message:
            wait_s = 0.0
        readable = [*self._stop_fds, *self._output_fds, *self._ranks.filenos]
        ready = select.select(readable, [], [], max(0.0, wait_s))[0]
        messages = self._ranks.messages(0.0)
        if self._is_over:  # the ranks end because of this process, and `stop_fd` may be closed
            return
        if set(ready) & set(self._stop_fds):
            self._stop_fds = []
            logger.info("event=node_shutdown_requested")
            self._link.send_control("leave")
        if set(ready) & set(self._output_fds):
            self._send_output()
        for rank, message in messages:
            self._link.send_control("rank", rank=rank, message=message)
            self._record(rank, message)

    def _send_output(self) -> None:
        assert self._ranks.outputs is not None
        try:
            with self._ranks.outputs.recv() as slot:
                self._link.send(MessageKind.OUTPUT, slot[: output_bytes(unpack_output(slot))])
        except ChannelClosedError:
            self._output_fds = []  # the answering rank has ended; its control socket has the reason

    def _record(self, rank: int, message: dict) -> None:
        if self._first_cause.add(rank, message):
            logger.error('event=rank_lost rank=%d cause="%s"', rank, message["cause"])
        elif message["kind"] == "progress":
            self._read[rank] = float(message["fraction"])
            self._on_phase("loading", min(self._read.get(number, 0.0) for number in self._ranks.numbers))
        elif message["kind"] == "ready" and rank == self._ranks.numbers[0]:
            self._on_phase("serving", 1.0)

    # -- from node 0, in a thread of its own

    def _receive_all(self) -> None:
        with contextlib.suppress(ChannelClosedError):  # a rank has ended; its control socket has the reason
            while True:
                self._handle(self._link.receive_broadcast())

    def _handle(self, message: Message) -> None:
        if message.kind in (MessageKind.STEP, MessageKind.FIRST_PART):
            while not self._ranks.steps.has_room:  # ranks of this node may be slower than the answering rank
                time.sleep(_POLL_S)
            self._write_step(message)
        elif message.kind == MessageKind.MASKS:
            with self._ranks.steps.send_rest() as slot:
                bits = unpack_step(slot).mask_bits
                bits[:] = np.frombuffer(message.payload, bits.dtype, bits.size).reshape(bits.shape)
        elif message.kind == MessageKind.CONTROL:
            request = message.fields
            if request["kind"] == "to_ranks":
                self._ranks.send_to_all(request["message"]["kind"], **request["message"]["fields"])
            else:
                self._link.send_control("rank_progress", number=request["number"], progress=self._ranks.progress())

    def _write_step(self, message: Message) -> None:
        """Write a step into the ring, with a gap for its masks if they follow."""
        payload = message.payload
        if message.kind == MessageKind.STEP:
            with self._ranks.steps.send() as slot:
                slot[: len(payload)] = payload
            return
        begin, end = mask_span(payload)
        with self._ranks.steps.send(rest_follows=True) as slot:
            slot[:begin] = payload[:begin]
            slot[end : end + len(payload) - begin] = payload[begin:]
