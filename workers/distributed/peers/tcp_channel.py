"""Rows from a stage of a pipeline to the next over TCP, or none for a step that was refused.

u64     bytes that follow; all ones: the step was refused
rows    as they are in memory
"""

import struct

import torch
from torch import Tensor

from workers.distributed.peers.peer_socket import PeerSocket, SendingThread, data_of, exchange

_LENGTH = struct.Struct("<Q")
_REFUSED = (1 << 64) - 1


class TcpChannel:
    """To or from one peer. Rows of a device are copied over the host."""

    def __init__(self, peer: PeerSocket) -> None:
        self._peer = peer
        self._sending = SendingThread(peer)

    def send(self, rows: Tensor | None) -> None:
        """Does not wait for the receiver. Raises `PeerLostError`, also for what was to be sent before."""
        if rows is None:
            self._sending.send(memoryview(_LENGTH.pack(_REFUSED)))
        else:
            rows = rows.cpu().contiguous()
            self._sending.send(memoryview(_LENGTH.pack(rows.nbytes)), data_of(rows))

    def receive(self, rows: Tensor) -> bool:
        """Wait for rows, and write them to `rows`. False: the step was refused. Raises `PeerLostError`."""
        length = self._length()
        if length == _REFUSED:
            return False
        assert length == rows.nbytes, f"{length} bytes of a step came where {rows.nbytes} belong"
        if rows.device.type == "cpu" and rows.is_contiguous():
            self._fill(data_of(rows))
        else:
            host = torch.empty(rows.shape, dtype=rows.dtype)
            self._fill(data_of(host))
            rows.copy_(host)
        return True

    def discard(self) -> None:
        """Wait for rows, and forget them."""
        length = self._length()
        if length != _REFUSED:
            self._fill(memoryview(bytearray(length)))

    def _length(self) -> int:
        """Of the next message, or `_REFUSED`."""
        header = bytearray(_LENGTH.size)
        self._fill(memoryview(header))
        return _LENGTH.unpack(header)[0]

    def _fill(self, data: memoryview) -> None:
        exchange([self._peer], [memoryview(b"")], [data])
