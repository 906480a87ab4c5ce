"""Messages between the hosts of a group over gloo. Node 0 broadcasts to all others, and they send to node 0.

down   STEP         the bytes of a step, as in the ring
       FIRST_PART   the bytes of a step without its masks, which follow
       MASKS        the masks of the previous step
up     ANSWER       the bytes of an output, from the node of the answering rank both   SAID         JSON: messages from
and to the engine
       BEAT         heartbeat, after a second without another message

A message is a first piece of fixed size, which is enough for most steps, and the rest, if there is any. A wait ends
after `SILENCE_S`, and at once if the peer closes its connection.
"""

import json
import os
import struct
import threading
from collections.abc import Callable
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from oarlock.base.errors import EXIT_RANK_DIED, StartupError
from oarlock.workers.ranks.membership import Membership


class MessageKind(IntEnum):
    """Kind of a message between hosts."""

    STEP = 1
    FIRST_PART = 2
    MASKS = 3
    OUTPUT = 4
    CONTROL = 5
    HEARTBEAT = 6


HEARTBEAT_S = 1.0
SILENCE_S = 5.0  # after this time without a message, the other side is considered lost
_CONNECT_S = 60.0  # limit for all nodes to connect to each other
_PIECE = 4096  # bytes of the first piece
_HEADER = struct.Struct("<QQ")  # kind, bytes of the message

Buffer = bytes | memoryview


class Message(NamedTuple):
    kind: int
    payload: memoryview

    @property
    def fields(self) -> dict[str, Any]:
        """Content of a message of kind `CONTROL`, which is JSON."""
        return json.loads(bytes(self.payload))


class NodeLostError(Exception):
    """A host cannot be reached any more. The message describes how it was lost."""


class HostLink:
    """One node's end. One thread may broadcast or receive broadcasts, one per peer may receive, and any may send."""

    def __init__(self, membership: Membership) -> None:
        """Block until all nodes are connected. Raises `StartupError`."""
        os.environ["GLOO_SOCKET_IFNAME"] = membership.own.name
        self._sending = threading.Lock()
        node, nnodes = membership.node, membership.nnodes
        store = dist.PrefixStore("link", membership.store)
        try:
            dist.init_process_group(
                "gloo", store=store, rank=node, world_size=nnodes, timeout=timedelta(seconds=_CONNECT_S)
            )
        except (RuntimeError, dist.DistError) as error:
            raise StartupError(
                f"The hosts could not connect to each other within {_CONNECT_S:g} s: {str(error).splitlines()[0]}",
                "Let all hosts reach each other by TCP on the network of --node-interface; see their logs.",
                EXIT_RANK_DIED,
            ) from None

    def broadcast(self, kind: int, *buffers: Buffer) -> None:
        """Send from node 0 to all others. Raises `NodeLostError`."""
        self._put(lambda piece: dist.broadcast(piece, 0, async_op=True), kind, buffers)

    def receive_broadcast(self) -> Message:
        """Return the next message of node 0. Raises `NodeLostError`."""
        return self._get(lambda piece: dist.broadcast(piece, 0, async_op=True))

    def send(self, kind: int, *buffers: Buffer) -> None:
        """Send to node 0. Raises `NodeLostError`."""
        with self._sending:
            self._put(lambda piece: dist.isend(piece, 0), kind, buffers)

    def send_control(self, kind: str, **fields: Any) -> None:
        """Send a message of kind `CONTROL` to node 0. Raises `NodeLostError`."""
        self.send(MessageKind.CONTROL, json.dumps({"kind": kind, **fields}).encode())

    def receive_from(self, node: int) -> Message:
        """Return the next message of `node` to node 0. Raises `NodeLostError`."""
        return self._get(lambda piece: dist.irecv(piece, node))

    @staticmethod
    def _put(carry: Callable[[Tensor], dist.Work | None], kind: int, buffers: tuple[Buffer, ...]) -> None:
        message = bytearray(_HEADER.size)
        for buffer in buffers:
            message += buffer
        _HEADER.pack_into(message, 0, kind, len(message))
        length = len(message)
        message += bytes(max(0, _PIECE - length))
        data = torch.frombuffer(message, dtype=torch.uint8)
        _carry(carry, data[:_PIECE])
        if length > _PIECE:
            _carry(carry, data[_PIECE:])

    @staticmethod
    def _get(carry: Callable[[Tensor], dist.Work | None]) -> Message:
        first = torch.empty(_PIECE, dtype=torch.uint8)
        _carry(carry, first)
        view = memoryview(first.numpy())
        kind, length = _HEADER.unpack_from(view)
        if length > _PIECE:
            whole = torch.empty(length, dtype=torch.uint8)
            whole[:_PIECE] = first
            _carry(carry, whole[_PIECE:])
            view = memoryview(whole.numpy())
        return Message(kind, view[_HEADER.size : length])


def _carry(carry: Callable[[Tensor], dist.Work | None], piece: Tensor) -> None:
    try:
        work = carry(piece)
        assert work is not None, "this process is of the group"
        work.wait(timedelta(seconds=SILENCE_S))
    except RuntimeError as error:  # gloo raises no error types of its own
        timed_out = "imed out" in str(error) or "imeout" in str(error)
        why = f"has sent nothing for {SILENCE_S:g} s" if timed_out else "has closed the connection"
        raise NodeLostError(why) from error
