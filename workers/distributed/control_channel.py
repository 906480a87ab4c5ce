"""The control socket between the executor and one rank: JSON lines, used at start and for failures only.

End-of-file on it means that the other side has ended.
"""

import json
import socket
from typing import Any

from workers.distributed.shm_ring import ChannelClosedError

_MAX_LINE = 1 << 20


class Control:
    """One end of the socket pair. `fileno()` lets `select` wait for a message or for end-of-file."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._pending = b""

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
        """Raises `ChannelClosedError` when the other side is gone."""
        try:
            self._socket.sendall(json.dumps({"kind": kind, **fields}).encode() + b"\n")
        except OSError as error:
            raise ChannelClosedError(str(error)) from error

    def recv(self) -> dict[str, Any]:
        """The next message; blocks. Raises `ChannelClosedError` at end-of-file."""
        while b"\n" not in self._pending:
            try:
                data = self._socket.recv(65536)
            except OSError as error:
                raise ChannelClosedError(str(error)) from error
            if not data or len(self._pending) > _MAX_LINE:
                raise ChannelClosedError("the other side is gone")
            self._pending += data
        line, self._pending = self._pending.split(b"\n", 1)
        return json.loads(line)

    @property
    def has_pending(self) -> bool:
        """Whether a whole message is already read into the buffer, which `select` cannot see."""
        return b"\n" in self._pending

    def close(self) -> None:
        self._socket.close()
