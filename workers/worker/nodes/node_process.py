"""What a node that is not the head does: it starts its ranks when the head says so, and passes on what they need.

One thread, which blocks in one `select`: link -> ring of steps; answers and messages of ranks -> link. It ends with the
link, and its ranks with it. When a rank fails the head is told, and says how the whole group ends.
"""

import logging
import select
import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from workers.config import OnProgress, WorkerConfig
from workers.distributed.nodes.link import Link, LinkLostError, Message
from workers.distributed.shm_ring import ChannelClosedError
from workers.errors import EXIT_RANK_DIED
from workers.protocol import mask_span, output_bytes, unpack_output, unpack_step
from workers.rank_processes import RankProcess, end_ranks
from workers.worker.nodes import messages
from workers.worker.nodes.ending import Ending
from workers.worker.nodes.first_cause import FirstCause
from workers.worker.nodes.host_ranks import HostRanks
from workers.worker.nodes.ranks import GRACE_AFTER_FAILURE_S, GRACE_S
from workers.worker.spawn_ranks import NodePlace, Store

logger = logging.getLogger("oarlock.nodes")

_END_S = 3.0  # for the head to say how the group ends, after a rank has failed
_POLL_S = 0.001  # while something waits for the ranks, which say nothing when they have finished a step


class NodeProcess:
    """`run` returns how the group ended."""

    def __init__(
        self,
        config: WorkerConfig,
        node: int,
        link: Link,
        ahead: Sequence[RankProcess],
        on_phase: OnProgress,
        stop_fd: int,
    ) -> None:
        """Takes over `link` to the head and `ahead`, rank processes that run already. `stop_fd` becomes readable when
        the operator wants this node to stop."""
        self._config = config
        self._node = node
        self._link = link
        self._pulse = messages.Pulse(link)
        self._ahead = ahead
        self._on_phase = on_phase
        self._stop_fds = [stop_fd]
        self._ranks: HostRanks | None = None
        self._read: dict[int, float] = {}  # the share of its weights that a rank has read
        self._answers_fds: list[int] = []  # of the answering rank's ring, if it is here
        self._steps: deque[Message] = deque()  # and their masks, for which the ring had no room
        self._pings: list[int] = []  # numbers that wait for the ranks
        self._first_cause = FirstCause()
        self._end_by_s: float | None = None  # when a failure has been told
        self._ending: Ending | None = None

    def run(self) -> Ending:
        try:
            ending = self._run()
        finally:
            self._close()
        if ending.exit_code:
            logger.error('event=group_failed exit_code=%d cause="%s"', ending.exit_code, ending.cause)
        else:
            logger.info("event=group_ended")
        return ending

    def _run(self) -> Ending:
        try:
            while self._ending is None:
                self._turn()
                if self._end_by_s is not None and time.monotonic() > self._end_by_s:
                    return self._own_ending("and the head did not say how the group ends")
        except LinkLostError as error:
            return self._own_ending(str(error))
        return self._ending

    def _own_ending(self, why: str) -> Ending:
        """Without the head's word."""
        error = self._first_cause.error(0)
        return Ending(EXIT_RANK_DIED, why if error is None else f"{error}; {why}")

    def _close(self) -> None:
        failed = self._ending is None or self._ending.exit_code
        if self._ranks is None:
            end_ranks(self._ahead)
        else:
            self._ranks.close(grace_s=GRACE_AFTER_FAILURE_S if failed else GRACE_S)
        self._link.close()  # the head waits for it

    # -- one turn

    def _turn(self) -> None:
        readable: list = [self._link, *self._stop_fds]
        wait_s = 0.0 if self._link.has_message else self._pulse.seconds_left
        if self._ranks is not None:
            readable += self._ranks.filenos
            readable += self._answers_fds
            if self._pings or self._steps:
                wait_s = min(wait_s, _POLL_S)
            if self._ranks.has_message:
                wait_s = 0.0
        ready, _, _ = select.select(readable, [self._link] if self._link.unsent_bytes else [], [], wait_s)
        while self._ending is None and (message := self._link.receive()) is not None:
            self._pulse.heard()
            self._handle(message)
        if self._link.unsent_bytes:
            self._link.flush()
        self._pulse.beat()
        if set(ready) & set(self._stop_fds):
            self._stop_fds = []
            logger.info("event=leaving")
            self._link.send(messages.LEAVE)
        if self._ranks is not None:
            if set(ready) & set(self._answers_fds):
                self._forward_answer(self._ranks)
            self._forward(self._ranks)
            self._pass_steps_on(self._ranks)

    def _forward_answer(self, ranks: HostRanks) -> None:
        assert ranks.answers is not None
        try:
            with ranks.answers.recv() as slot:
                self._link.send(messages.ANSWER, slot[: output_bytes(unpack_output(slot))])
        except LinkLostError:
            raise
        except ChannelClosedError:
            self._answers_fds = []  # the answering rank has ended: its own channel says how

    def _forward(self, ranks: HostRanks) -> None:
        """What the ranks have sent, to the head."""
        for rank, message in ranks.messages(0.0):
            self._link.send(messages.RANK, messages.packed(rank=rank, message=message))
            if self._first_cause.add(rank, message):
                logger.error('event=rank_lost rank=%d cause="%s"', rank, message["cause"])
                self._end_by_s = self._end_by_s or time.monotonic() + _END_S
            elif message["kind"] == "progress":
                self._read[rank] = float(message["fraction"])
                self._on_phase("loading", min(self._read.get(number, 0.0) for number in ranks.numbers))
            elif message["kind"] == "ready" and rank == ranks.numbers[0]:
                self._on_phase("serving", 1.0)
        if self._pings and not self._steps and ranks.have_finished:
            for number in self._pings:
                self._link.send(messages.PONG, messages.packed(number=number))
            self._pings.clear()

    # -- messages of the head

    def _handle(self, message: Message) -> None:
        if message.kind == messages.END:
            self._ending = Ending.from_bytes(message.payload)
        elif message.kind == messages.START:
            place = NodePlace(self._node, self._link.local_address, Store(**messages.unpacked(message.payload)))
            self._ranks = HostRanks(self._config, self._ahead, place)
            if self._ranks.answers is not None:
                self._answers_fds = [self._ranks.answers.wake_fd]
        elif self._ranks is not None:
            self._pass_on(self._ranks, message)

    def _pass_steps_on(self, ranks: HostRanks) -> None:
        """As many as the ring has room for: ranks of this node may be slower than the one that answers."""
        try:
            while self._steps and (self._steps[0].kind == messages.MASKS or ranks.steps.has_room):
                _pass_step_on(ranks, self._steps.popleft())
        except ChannelClosedError:
            self._steps.clear()  # a rank has ended: its own channel says how

    def _pass_on(self, ranks: HostRanks, message: Message) -> None:
        if message.kind in (messages.STEP, messages.FIRST_PART, messages.MASKS):
            self._steps.append(message)
            self._pass_steps_on(ranks)
        elif message.kind == messages.PING:
            self._pings.append(int(messages.unpacked(message.payload)["number"]))
        elif message.kind == messages.TELL:
            said = messages.unpacked(message.payload)
            ranks.tell_all(said["kind"], **said["fields"])
        elif message.kind == messages.PLACES:
            ranks.ask_for_stacks()
            self._link.send(messages.PLACES, messages.packed(places=ranks.places()))


def _pass_step_on(ranks: HostRanks, message: Message) -> None:
    """Write a step, or masks, into the ring."""
    payload = memoryview(message.payload)
    if message.kind == messages.STEP:
        with ranks.steps.send() as slot:
            slot[: len(payload)] = payload
    elif message.kind == messages.FIRST_PART:
        begin, end = mask_span(payload)
        with ranks.steps.send(rest_follows=True) as slot:
            slot[:begin] = payload[:begin]
            slot[end : end + len(payload) - begin] = payload[begin:]
    else:
        with ranks.steps.send_rest() as slot:
            bits = unpack_step(slot).mask_bits
            bits[:] = np.frombuffer(payload, bits.dtype).reshape(bits.shape)
