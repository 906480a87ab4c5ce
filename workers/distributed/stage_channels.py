"""The channels between neighbouring stages of a pipeline: a ring in shared memory on one host, `isend` and `irecv`
between two.

A message is one byte that says whether the step was refused, and the rows. Its length follows from the step, so the
receiver asks for the whole message before it is sent. A refused step's rows mean nothing.
"""

from collections import deque

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from oarlock.workers.distributed.pipeline_stage import Channel
from oarlock.workers.distributed.rendezvous import MARK_BYTES
from oarlock.workers.distributed.shm_all_reduce import PeerLostError
from oarlock.workers.distributed.shm_ring import ChannelClosedError, RingReader, RingWriter

_RUN, _REFUSED = 1, 0
_MAX_UNSENT = 64  # messages; older ones have been received long ago


class RingChannel:
    """Channel to rank `peer` of the same host by `writer`, or from it by `reader`."""

    def __init__(
        self, peer: int, timeout_s: float, *, writer: RingWriter | None = None, reader: RingReader | None = None
    ) -> None:
        self._peer = peer
        self._timeout_s = timeout_s
        self._writer = writer
        self._reader = reader

    def send(self, rows: Tensor) -> None:
        self._send(_RUN, _bytes_of(rows))

    def refuse(self, num_bytes: int) -> None:
        self._send(_REFUSED, torch.empty(0, dtype=torch.uint8))

    def receive(self, rows: Tensor) -> bool:
        return self._receive(rows)

    def discard(self, num_bytes: int) -> None:
        self._receive(None)

    def close(self) -> None:
        for end in (self._writer, self._reader):
            if end is not None:
                end.close()

    def _send(self, mark: int, data: Tensor) -> None:
        assert self._writer is not None, "this end receives"
        try:
            # The engine has fewer steps under way than there are slots; nothing holds back a stage whose steps are all
            # known before, as when known texts are verified.
            self._writer.wait_for_room(self._timeout_s)
            with self._writer.send() as slot:
                slot[0] = mark
                np.frombuffer(slot, np.uint8, data.numel(), MARK_BYTES)[:] = data.numpy()
        except ChannelClosedError as error:
            raise PeerLostError(f"rank {self._peer} has ended") from error
        except TimeoutError as error:
            raise PeerLostError(f"rank {self._peer} received nothing within {self._timeout_s} s") from error

    def _receive(self, rows: Tensor | None) -> bool:
        assert self._reader is not None, "this end sends"
        try:
            with self._reader.recv(self._timeout_s) as slot:
                runs = slot[0] == _RUN
                if runs and rows is not None:
                    data = np.frombuffer(slot, np.uint8, rows.nbytes, MARK_BYTES).copy()
                    _fill(rows, torch.from_numpy(data))
                return runs
        except ChannelClosedError as error:
            raise PeerLostError(f"rank {self._peer} has ended") from error
        except TimeoutError as error:
            raise PeerLostError(f"rank {self._peer} sent nothing within {self._timeout_s} s") from error


class GlooChannel:
    """Channel to or from a rank of another host, over the default process group. Rows of a device are copied over the
    host."""

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()  # a message must live until it is received

    def send(self, rows: Tensor) -> None:
        self._send(_RUN, _bytes_of(rows))

    def refuse(self, num_bytes: int) -> None:
        self._send(_REFUSED, torch.zeros(num_bytes, dtype=torch.uint8))

    def receive(self, rows: Tensor) -> bool:
        message = self._receive(rows.nbytes)
        if message[0] == _REFUSED:
            return False
        _fill(rows, message[MARK_BYTES:])
        return True

    def discard(self, num_bytes: int) -> None:
        self._receive(num_bytes)

    def _send(self, mark: int, data: Tensor) -> None:
        message = torch.empty(MARK_BYTES + data.numel(), dtype=torch.uint8)
        message[0] = mark
        message[MARK_BYTES:] = data
        work = dist.isend(message, self._peer)
        assert work is not None, "this rank is of the group"
        self._sent.append((work, message))
        if len(self._sent) > _MAX_UNSENT:
            self._sent.popleft()[0].wait()

    def _receive(self, num_bytes: int) -> Tensor:
        message = torch.empty(MARK_BYTES + num_bytes, dtype=torch.uint8)
        work = dist.irecv(message, self._peer)
        assert work is not None, "this rank is of the group"
        work.wait()
        return message


class DeviceChannel:
    """A channel of which rows go from device to device by NCCL, and the marks over the host."""

    def __init__(self, on_host: Channel, peer: int, device: torch.device) -> None:
        self._on_host = on_host
        self._peer = peer
        self._device = device
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def send(self, rows: Tensor) -> None:
        self._on_host.send(rows[:0])
        if rows.nbytes:
            self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
            kept = rows.contiguous().view(-1).view(torch.uint8).clone()
            work = dist.isend(kept, self._peer)
            assert work is not None, "this rank is of the group"
            self._sent.append((work, kept))

    def refuse(self, num_bytes: int) -> None:
        self._on_host.refuse(0)

    def receive(self, rows: Tensor) -> bool:
        """Receives rows, which what is launched after this finds in their place."""
        runs = self._on_host.receive(rows[:0])
        if runs and rows.nbytes:
            self._receive(rows.view(-1).view(torch.uint8))
        return runs

    def discard(self, num_bytes: int) -> None:
        if self._on_host.receive(torch.empty(0)) and num_bytes:
            self._receive(torch.empty(num_bytes, dtype=torch.uint8, device=self._device))

    def _receive(self, into: Tensor) -> None:
        work = dist.irecv(into, self._peer)
        assert work is not None, "this rank is of the group"
        work.wait()


def _bytes_of(rows: Tensor) -> Tensor:
    """The bytes of `rows`, on the CPU."""
    return rows.cpu().contiguous().view(-1).view(torch.uint8)


def _fill(rows: Tensor, data: Tensor) -> None:
    """Write bytes to `rows` (contiguous, on any device)."""
    if rows.nbytes:  # the last rank of a stage may have no share of a short step
        rows.copy_(data.view(rows.dtype).view(rows.shape))
