"""The relay of node 0. It reads node 0's ring of steps, broadcasts the steps, and receives from the other nodes.

`python -m oarlock.workers.ranks.relay PARENT_PID CONTROL_FD`, a child of the engine, which has no torch. It also keeps
the store of the group, and ends with its parent. Its messages to the engine:

    waiting        the nodes that are still missing, once a second until all have joined
    joined         names of the nodes, address of the ranks' store, and the interface; then the relay waits for `rings`
    failed         why the group does not start
    lost           which node was lost, and how
    rank           from a node: a message of one of its ranks
    rank_progress  from a node: the progress of its ranks

The engine sends it `join`, `rings` and `end`. All other messages go to all nodes unchanged (`node_process.py`).
"""

import contextlib
import json
import os
import select
import signal
import sys
import threading
import time
from collections import deque

from oarlock.base.errors import StartupError
from oarlock.workers.config import NodesConfig
from oarlock.workers.distributed.control_channel import Control
from oarlock.workers.distributed.shm_ring import ChannelClosedError, RingLayout, RingReader, RingWriter
from oarlock.workers.protocol import mask_span, step_bytes, unpack_step
from oarlock.workers.ranks.host_link import HEARTBEAT_S, HostLink, Message, MessageKind, NodeLostError
from oarlock.workers.ranks.membership import Membership, join
from oarlock.workers.ranks.nodes import Ending
from oarlock.workers.ranks.spawn_ranks import RankRings, begin

_LEAVE_S = 3.0  # time for the other nodes to read the ending in the store and to end


class Relay:
    """Relay between the engine and the other nodes, until the engine sends how the group ends."""

    def __init__(self, control: Control, membership: Membership, leave_pid: int) -> None:
        """Prepare the queue of messages. `leave_pid`: process that shuts everything down in order when it gets
        SIGTERM."""
        self._control = control
        self._sending = threading.Lock()  # several threads send to the engine
        self._membership = membership
        self._leave_pid = leave_pid
        self._others = range(1, membership.nnodes)
        self._queue: deque[bytes] = deque()  # messages from the engine to the nodes
        self._queued_fd, self._queue_fd = os.pipe()

    def run(self) -> None:
        """Connect the nodes and serve. Raises `StartupError` if the nodes cannot reach each other."""
        self._link = HostLink(self._membership)
        where = self._membership.where
        self._send_to_engine(
            "joined",
            names=self._membership.names,
            interface=self._membership.own.name,
            store=[where.address, where.port, where.prefix],
        )
        given = self._control.recv()
        rings = RankRings(**given["rings"])
        self._steps = RingReader(
            rings.step_memory_fd, rings.step_wake_fd, given["reader"], RingLayout(**rings.step_layout)
        )
        if rings.output_wake_fd is not None:
            layout = RingLayout(**rings.output_layout)
            self._outputs = RingWriter(rings.output_memory_fd, [rings.output_wake_fd], layout)
        receivers = [threading.Thread(target=self._receive_from, args=(node,), daemon=True) for node in self._others]
        for thread in (*receivers, threading.Thread(target=self._broadcast_all, daemon=True)):
            thread.start()
        ending = self._queue_messages()
        with contextlib.suppress(RuntimeError):  # a launcher's store may have ended
            self._membership.end(ending)
        deadline = time.monotonic() + _LEAVE_S
        for thread in receivers:  # each thread ends with its node's connection
            thread.join(max(0.0, deadline - time.monotonic()))

    def _queue_messages(self) -> Ending:
        while (message := self._control.recv())["kind"] != "end":
            self._queue.append(json.dumps(message).encode())
            os.write(self._queue_fd, b"\0")
        return Ending(**message["ending"])

    def _send_to_engine(self, kind: str, **fields: object) -> None:
        with self._sending, contextlib.suppress(ChannelClosedError):  # the engine has ended, so this process ends too
            self._control.send(kind, **fields)

    # -- down

    def _broadcast_all(self) -> None:
        """Broadcast until the engine closes the ring, or a node is lost."""
        try:
            while True:
                ready = select.select([self._steps.wake_fd, self._queued_fd], [], [], HEARTBEAT_S)[0]
                if self._steps.wake_fd in ready:
                    self._broadcast_step()
                elif self._queued_fd in ready:
                    os.read(self._queued_fd, 1)
                    self._link.broadcast(MessageKind.CONTROL, self._queue.popleft())
                else:
                    self._link.broadcast(MessageKind.HEARTBEAT)
        except (ChannelClosedError, NodeLostError):  # the thread that receives from a lost node reports it
            return

    def _broadcast_step(self) -> None:
        with self._steps.recv() as slot:
            size = step_bytes(unpack_step(slot))
            if not self._steps.lacks_rest:
                self._link.broadcast(MessageKind.STEP, slot[:size])
                return
            begin, end = mask_span(slot)
            self._link.broadcast(MessageKind.FIRST_PART, slot[:begin], slot[end:size])
            self._steps.wait_for_rest()
            self._link.broadcast(MessageKind.MASKS, slot[begin:end])

    # -- up

    def _receive_from(self, node: int) -> None:
        """Handle messages of `node` until it is lost."""
        try:
            while True:
                self._handle(node, self._link.receive_from(node))
        except NodeLostError as error:
            self._send_to_engine("lost", node=node, why=f"{self._membership.names[node]} {error}")

    def _handle(self, node: int, message: Message) -> None:
        if message.kind == MessageKind.OUTPUT:
            with self._outputs.send() as slot:
                slot[: len(message.payload)] = message.payload
        elif message.kind == MessageKind.CONTROL:
            request = message.fields
            if request["kind"] == "leave":
                os.kill(self._leave_pid, signal.SIGTERM)
            else:
                self._send_to_engine(**request, node=node)


def main(argv: list[str]) -> int:
    control = begin(argv)
    sent_s = 0.0

    def on_waiting(text: str) -> None:
        nonlocal sent_s
        if time.monotonic() > sent_s + 0.5:
            sent_s = time.monotonic()
            control.send("waiting", text=text)

    try:
        asked = control.recv()
        membership = join(NodesConfig(**asked["nodes"]), asked["facts"], on_waiting)
        Relay(control, membership, asked["leave_pid"]).run()
    except StartupError as error:
        with contextlib.suppress(ChannelClosedError):
            control.send("failed", cause=error.cause, fix=error.fix, exit_code=error.exit_code)
        return error.exit_code
    except ChannelClosedError:  # the engine has ended
        return 1
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # gloo's threads may wait for a node that is lost
