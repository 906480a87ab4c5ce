"""The process of a node other than node 0. It runs the ranks of its host and forwards messages to and from them.

One thread receives from node 0 and writes steps into the ring, another receives from the ranks, and a third waits for
the group's ending in the store. If a rank fails, node 0 is informed, and decides how the whole group ends. Messages to
the engine:

    rank       a message of a rank
    places     progress of the ranks, on request
    leave      the operator wants this node to stop; node 0 then ends the whole group
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
from oarlock.workers.ranks.host_link import BEAT_S, HostLink, Kind, Message, NodeLostError
from oarlock.workers.ranks.host_ranks import GRACE_AFTER_FAILURE_S, GRACE_S, FirstCause, HostRanks
from oarlock.workers.ranks.membership import Membership
from oarlock.workers.ranks.nodes import Ending
from oarlock.workers.ranks.spawn_ranks import NodePlace

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
        place = NodePlace(membership.node, membership.own.name, membership.where)
        self._ranks = HostRanks(config, ahead, place)
        self._answers_fds = [] if self._ranks.answers is None else [self._ranks.answers.wake_fd]
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
        for work in (self._hear, self._say):  # each may wait for seconds for a lost node
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

    def _say(self) -> None:
        next_beat_s = 0.0
        while not self._is_over:
            if time.monotonic() > next_beat_s:
                next_beat_s = time.monotonic() + BEAT_S
                self._link.send(Kind.BEAT)
            self._turn(next_beat_s - time.monotonic())

    def _turn(self, wait_s: float) -> None:
        if self._ranks.has_message:
            wait_s = 0.0
        readable = [*self._stop_fds, *self._answers_fds, *self._ranks.filenos]
        ready = select.select(readable, [], [], max(0.0, wait_s))[0]
        messages = self._ranks.messages(0.0)
        if self._is_over:  # the ranks end because of this process, and `stop_fd` may be closed
            return
        if set(ready) & set(self._stop_fds):
            self._stop_fds = []
            logger.info("event=node_shutdown_requested")
            self._link.say("leave")
        if set(ready) & set(self._answers_fds):
            self._send_answer()
        for rank, message in messages:
            self._link.say("rank", rank=rank, message=message)
            self._note(rank, message)

    def _send_answer(self) -> None:
        assert self._ranks.answers is not None
        try:
            with self._ranks.answers.recv() as slot:
                self._link.send(Kind.ANSWER, slot[: output_bytes(unpack_output(slot))])
        except ChannelClosedError:
            self._answers_fds = []  # the answering rank has ended; its control socket has the reason

    def _note(self, rank: int, message: dict) -> None:
        if self._first_cause.add(rank, message):
            logger.error('event=rank_lost rank=%d cause="%s"', rank, message["cause"])
        elif message["kind"] == "progress":
            self._read[rank] = float(message["fraction"])
            self._on_phase("loading", min(self._read.get(number, 0.0) for number in self._ranks.numbers))
        elif message["kind"] == "ready" and rank == self._ranks.numbers[0]:
            self._on_phase("serving", 1.0)

    # -- from node 0, in a thread of its own

    def _hear(self) -> None:
        with contextlib.suppress(ChannelClosedError):  # a rank has ended; its control socket has the reason
            while True:
                self._take(self._link.receive_broadcast())

    def _take(self, message: Message) -> None:
        if message.kind in (Kind.STEP, Kind.FIRST_PART):
            while not self._ranks.steps.has_room:  # ranks of this node may be slower than the answering rank
                time.sleep(_POLL_S)
            self._pass_on(message)
        elif message.kind == Kind.MASKS:
            with self._ranks.steps.send_rest() as slot:
                bits = unpack_step(slot).mask_bits
                bits[:] = np.frombuffer(message.payload, bits.dtype, bits.size).reshape(bits.shape)
        elif message.kind == Kind.SAID:
            said = message.fields
            if said["kind"] == "tell":
                self._ranks.tell_all(said["message"]["kind"], **said["message"]["fields"])
            else:
                self._link.say("places", number=said["number"], places=self._ranks.places())

    def _pass_on(self, message: Message) -> None:
        """Write a step into the ring, with a gap for its masks if they follow."""
        payload = message.payload
        if message.kind == Kind.STEP:
            with self._ranks.steps.send() as slot:
                slot[: len(payload)] = payload
            return
        begin, end = mask_span(payload)
        with self._ranks.steps.send(rest_follows=True) as slot:
            slot[:begin] = payload[:begin]
            slot[end : end + len(payload) - begin] = payload[begin:]
