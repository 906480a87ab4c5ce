"""One rank's part of a pipeline stage: it receives hidden states from the previous stage and sends them to the next.

Each rank of a stage has one peer with the same tensor-parallel rank in the previous and in the next stage. It sends its
1/TP share of the rows to that peer, and the ranks of the receiving stage all-gather them, so each row crosses between
stages once. Every step is one message from each rank to its peer, even if a stage refuses the step (`StepGuard`), so
that stages stay in step without asking each other.

A message has a header, which marks the step as running or refused, and the rows. Its length follows from the step, so
the receiver can ask for the whole message before it is sent. The rows of a refused step are meaningless. A `Channel`
carries the messages: a ring in shared memory on one host, `isend` and `irecv` between two hosts.
"""

from collections import deque
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from oarlock.workers.distributed.all_reduce import PeerLostError
from oarlock.workers.distributed.parallel_state import TensorParallel
from oarlock.workers.distributed.shm_ring import ChannelClosedError, RingReader, RingWriter
from oarlock.workers.distributed.topology import STATUS_BYTES


class StepRefusedError(Exception):
    """An earlier stage had no memory for this step."""


class Channel(Protocol):
    """Messages in order to or from one peer, one for each step. Both sides know the size of a step's rows in bytes."""

    def send(self, rows: Tensor) -> None:
        """Send a step's rows. Does not wait for the receiver. `rows` may be overwritten once this returns."""
        ...

    def refuse(self, num_bytes: int) -> None:
        """Send that a step whose rows have `num_bytes` does not run. Does not wait for the receiver."""
        ...

    def receive(self, rows: Tensor) -> bool:
        """Wait for the next message, and write its rows to `rows` (contiguous). Return False if the step was refused.

        Raises an error if the peer is lost.
        """
        ...

    def discard(self, num_bytes: int) -> None:
        """Wait for the next message, whose rows have `num_bytes`, and drop it. Raises an error if the peer is lost."""
        ...


class PipelineStage:
    """Stage `number` of `size`. In every step, each stage but the first calls `receive` or `drop` once, and each stage
    but the last calls `send` or `refuse` once."""

    def __init__(
        self,
        number: int = 0,
        size: int = 1,
        tp: TensorParallel | None = None,
        before: Channel | None = None,
        after: Channel | None = None,
        row_bytes: int = 0,
    ) -> None:
        """Connect the stage to its channels. `tp`: the ranks of this stage; None if it has one. `row_bytes`: size of a
        token's hidden state."""
        assert (before is None) == (number == 0) and (after is None) == (number == size - 1)
        self.number = number
        self.size = size
        self.is_first, self.is_last = number == 0, number == size - 1
        self._tp = tp or TensorParallel.solo()
        self._before = before
        self._after = after
        self._row_bytes = row_bytes

    @staticmethod
    def solo() -> "PipelineStage":
        """Return the only stage, which has all layers."""
        return PipelineStage()

    def send(self, hidden: Tensor) -> None:
        """Send `hidden` [T, hidden size], T > 0, the same on all ranks of this stage, to the next stage. Returns before
        it has arrived; `hidden` may then be overwritten."""
        assert self._after is not None, "the last stage sends nothing"
        share = self._share(len(hidden))
        self._after.send(hidden[share * self._tp.rank : share * (self._tp.rank + 1)])

    def receive(self, num_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Receive this step's hidden states from the previous stage: [num_tokens, hidden_size], the same on all ranks.

        The rows are contiguous, with the same bits on all ranks. Raises `StepRefusedError` on all ranks of the stage
        alike, before any of its collectives, if an earlier stage refused the step.
        """
        assert self._before is not None, "the first stage receives nothing"
        share = self._share(num_tokens)
        rows = torch.empty((share, hidden_size), dtype=dtype, device=device)
        if not self._before.receive(rows[: self._mine(num_tokens)]):
            raise StepRefusedError
        return self._tp.all_gather(rows).view(-1, hidden_size)[:num_tokens]

    def drop(self, num_tokens: int) -> None:
        """Take the message of a step that this stage does not run."""
        if self._before is not None:
            self._before.discard(self._num_bytes(num_tokens))

    def refuse(self, num_tokens: int) -> None:
        """Send to the later stages that this stage does not run the step."""
        if self._after is not None:
            self._after.refuse(self._num_bytes(num_tokens))

    def _num_bytes(self, num_tokens: int) -> int:
        """Return the bytes of rows in this rank's message of a step."""
        return self._mine(num_tokens) * self._row_bytes

    def _mine(self, num_tokens: int) -> int:
        """Return the rows of this rank. The last ranks may have fewer than the others, or none."""
        share = self._share(num_tokens)
        return max(0, min(share, num_tokens - share * self._tp.rank))

    def _share(self, num_tokens: int) -> int:
        """Return the rows of each rank, except that the last ranks may have fewer."""
        return -(-num_tokens // self._tp.size)


_RUN, _REFUSED = 1, 0
_MAX_UNSENT = 64  # messages; older ones were received long ago


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

    def _send(self, status: int, data: Tensor) -> None:
        assert self._writer is not None, "this end receives"
        try:
            # The engine has fewer steps in flight than there are slots. But nothing holds back a stage if all its steps
            # are known in advance, for example when existing texts are verified.
            self._writer.wait_for_room(self._timeout_s)
            with self._writer.send() as slot:
                slot[0] = status
                np.frombuffer(slot, np.uint8, data.numel(), STATUS_BYTES)[:] = data.numpy()
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
                    data = np.frombuffer(slot, np.uint8, rows.nbytes, STATUS_BYTES).copy()
                    _fill(rows, torch.from_numpy(data))
                return runs
        except ChannelClosedError as error:
            raise PeerLostError(f"rank {self._peer} has ended") from error
        except TimeoutError as error:
            raise PeerLostError(f"rank {self._peer} sent nothing within {self._timeout_s} s") from error


class GlooChannel:
    """Channel to or from a rank of another host, over the default process group. Rows on a device are copied through
    the host."""

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
        _fill(rows, message[STATUS_BYTES:])
        return True

    def discard(self, num_bytes: int) -> None:
        self._receive(num_bytes)

    def _send(self, status: int, data: Tensor) -> None:
        message = torch.empty(STATUS_BYTES + data.numel(), dtype=torch.uint8)
        message[0] = status
        message[STATUS_BYTES:] = data
        work = dist.isend(message, self._peer)
        assert work is not None, "this rank is of the group"
        self._sent.append((work, message))
        if len(self._sent) > _MAX_UNSENT:
            self._sent.popleft()[0].wait()

    def _receive(self, num_bytes: int) -> Tensor:
        message = torch.empty(STATUS_BYTES + num_bytes, dtype=torch.uint8)
        work = dist.irecv(message, self._peer)
        assert work is not None, "this rank is of the group"
        work.wait()
        return message


class DeviceChannel:
    """A channel that sends rows from device to device with NCCL, and the headers over the host."""

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
        """Receive hidden states into `rows`. Asynchronous: kernels launched afterwards see the received data."""
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
    """Return the bytes of `rows`, on the CPU."""
    return rows.cpu().contiguous().view(-1).view(torch.uint8)


def _fill(rows: Tensor, data: Tensor) -> None:
    """Write bytes to `rows` (contiguous, on any device)."""
    if rows.nbytes:  # the last rank of a stage may have no share of a short step
        rows.copy_(data.view(rows.dtype).view(rows.shape))
