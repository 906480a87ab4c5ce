"""The control socket between the executor and one rank: JSON lines, used only at start and for failures.

A field whose name ends in `_fd`, at any depth, is a file descriptor. The receiver gets its own descriptor of the same
file. End-of-file on the socket means that the other side has ended.
"""

import json
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from oarlock.workers.distributed.shm_ring import ChannelClosedError

_MAX_LINE = 1 << 20
_MAX_FDS = 32  # descriptors that one call may receive


class Control:
    """One end of the socket pair. `fileno()` lets `select` wait for a message or for end-of-file."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._pending = b""
        self._received: deque[int] = deque()  # descriptors, in the order of their messages

    @staticmethod
    def pair() -> tuple["Control", "Control"]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        return Control(ours), Control(theirs)

    @staticmethod
    def from_fd(fd: int) -> "Control":
        return Control(socket.socket(fileno=fd))

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a message. Descriptors among `fields` stay open here. Raises `ChannelClosedError` if the other side is
        gone."""
        fds: list[int] = []

        def added(fd: int) -> int:
            fds.append(fd)
            return fd

        line = json.dumps({"kind": kind, **_with_descriptors(fields, added)}).encode() + b"\n"
        try:
            sent = socket.send_fds(self._socket, [line], fds) if fds else 0
            self._socket.sendall(line[sent:])
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def recv(self) -> dict[str, Any]:
        """Return the next message; blocks. Raises `ChannelClosedError` at end-of-file."""
        while b"\n" not in self._pending:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, 65536, _MAX_FDS)
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if not data or len(self._pending) > _MAX_LINE:
                raise ChannelClosedError("the other side is gone")
            self._pending += data
            self._received += fds
        line, self._pending = self._pending.split(b"\n", 1)
        return _with_descriptors(json.loads(line), lambda _: self._received.popleft())

    @property
    def has_pending(self) -> bool:
        """Whether a whole message has already been read into the buffer, which `select` cannot see."""
        return b"\n" in self._pending

    def close(self) -> None:
        self._socket.close()


def _with_descriptors(fields: dict[str, Any], change: Callable[[int], int]) -> dict[str, Any]:
    """Return `fields` with `change` applied to every descriptor in them, in their order."""
    return {
        name: _with_descriptors(value, change)
        if isinstance(value, dict)
        else change(value)
        if name.endswith("_fd") and value is not None
        else value
        for name, value in fields.items()
    }
