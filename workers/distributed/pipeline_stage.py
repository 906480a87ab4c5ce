"""One rank's place in a pipeline: hidden states come from the stage before and go to the stage after.

Each rank of a stage has one peer in the stage before and one in the stage after, those of its own tensor rank. It sends
them its share of the rows, 1/TP, and the ranks of the receiving stage gather: each row crosses between stages once.
Every step is one message from each rank to its peer, also a step that a stage refuses (`StepGuard`), so that stages
stay in step without asking each other.

Does not know what carries the messages (`Channel`, of which `stage_channels.py` has several).
"""

from typing import Protocol

import torch
from torch import Tensor

from oarlock.workers.distributed.parallel_state import TensorParallel


class StepRefusedError(Exception):
    """A stage ahead had no memory for this step."""


class Channel(Protocol):
    """Messages in order to or from one peer, one for each step. Both sides know how many bytes of rows a step has."""

    def send(self, rows: Tensor) -> None:
        """Send a step's rows. Does not wait for the receiver. `rows` may be overwritten once this returns."""
        ...

    def refuse(self, num_bytes: int) -> None:
        """Say that a step of so many bytes does not run. Does not wait for the receiver."""
        ...

    def receive(self, rows: Tensor) -> bool:
        """Wait for the next message, and write it to `rows` (contiguous). False: the step was refused.

        Raises an error where the peer is lost."""
        ...

    def discard(self, num_bytes: int) -> None:
        """Wait for the next message, of so many bytes, and forget it. Raises an error where the peer is lost."""
        ...


class PipelineStage:
    """Stage `number` of `size`. Every step calls `receive`, or `drop`, once unless it is the first; and `send`, or
    `refuse`, once unless it is the last."""

    def __init__(
        self,
        number: int = 0,
        size: int = 1,
        tp: TensorParallel | None = None,
        before: Channel | None = None,
        after: Channel | None = None,
        row_bytes: int = 0,
    ) -> None:
        """`tp`: the ranks of this stage; None: one alone. `row_bytes`: of a token's hidden state."""
        assert (before is None) == (number == 0) and (after is None) == (number == size - 1)
        self.number = number
        self.size = size
        self._tp = tp or TensorParallel.solo()
        self._before = before
        self._after = after
        self._row_bytes = row_bytes

    @staticmethod
    def solo() -> "PipelineStage":
        """The only stage: it has all layers."""
        return PipelineStage()

    @property
    def is_first(self) -> bool:
        return self.number == 0

    @property
    def is_last(self) -> bool:
        return self.number == self.size - 1

    def send(self, hidden: Tensor) -> None:
        """Send `hidden` [T, hidden size], T > 0, the same on all ranks of this stage, to the next stage. Returns before
        it has arrived; `hidden` may then be overwritten."""
        assert self._after is not None, "the last stage sends nothing"
        share = self._share(len(hidden))
        self._after.send(hidden[share * self._tp.rank : share * (self._tp.rank + 1)])

    def receive(self, num_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Receive this step's hidden states from the stage before: [num_tokens, hidden_size], the same on all ranks.

        The rows are contiguous, with the same bits everywhere. Raises `StepRefusedError`, on all ranks of the stage
        alike, and before any of its collectives."""
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
        """Tell the stages after this one that it does not run the step."""
        if self._after is not None:
            self._after.refuse(self._num_bytes(num_tokens))

    def _num_bytes(self, num_tokens: int) -> int:
        """Bytes of this rank's message of a step."""
        return self._mine(num_tokens) * self._row_bytes

    def _mine(self, num_tokens: int) -> int:
        """Rows of this rank; the last ranks may have fewer than the others, or none."""
        share = self._share(num_tokens)
        return max(0, min(share, num_tokens - share * self._tp.rank))

    def _share(self, num_tokens: int) -> int:
        """Rows of each rank; the last ones have fewer."""
        return -(-num_tokens // self._tp.size)
