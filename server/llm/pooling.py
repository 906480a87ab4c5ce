"""Vectors of prompts, in place of texts: a request's prompts at the engine, and what came back for each.

They run as the choices of a `Generation`: sent as the engine's queue has room, with one time limit and one end, and
counted as all others are. Knows token ids and vectors. Does not know HTTP, text, or what vectors are used for.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oarlock.engine.errors import UnavailableError
from oarlock.engine.types import FinishReason, Request, TokenEvent
from oarlock.server.errors import DeadlineError
from oarlock.server.llm.generation import Generation
from oarlock.server.llm.output_processor import TIMEOUT, Delta


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """Vectors that the model made of one prompt."""

    # float32 [1, hidden_size], of kind `token` [prompt tokens, hidden_size], of kind `logits` [ids], of kind
    # `labels` [labels]; not normalised. Behind Dense modules float64 [1, size].
    vectors: np.ndarray
    prompt_token_ids: Sequence[int]
    cached_tokens: int  # of these, taken from the prefix cache

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


class PooledChoice:
    """The vectors of one engine request, as they come."""

    def __init__(self, index: int, request: Request, hidden_size: int) -> None:
        assert request.pooling is not None
        self.index, self.request = index, request
        self.num_tokens = 0  # none is generated
        self.num_cached_tokens = 0
        self.started = False
        self.finish_reason: str | None = None
        self._width = None if request.pooling.kind in ("logits", "labels") else hidden_size
        self._values = array("f")

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def output(self) -> PooledOutput:
        """Vectors of a choice that the engine has completed."""
        assert self.finish_reason == FinishReason.STOP
        vectors = np.frombuffer(self._values, np.float32)
        if self._width is not None:
            vectors = vectors.reshape(-1, self._width)
        return PooledOutput(vectors, self.request.prompt_token_ids, self.num_cached_tokens)

    def push(self, event: TokenEvent) -> Delta | None:
        """Collect the values of one event; nothing is shown before the last one."""
        self.num_cached_tokens = event.num_cached_tokens
        self._values.extend(event.pooled)
        if event.finish_reason is None:
            return None
        self.started, self.finish_reason = True, event.finish_reason.value
        delta = Delta(self.index, is_first=True, finish_reason=self.finish_reason)
        if event.finish_reason is not FinishReason.STOP:
            delta.error, delta.error_param = event.error or "The engine gave this request up.", event.error_param
            delta.error_code = event.error_code
        return delta

    def cut(self, reason: str) -> Delta:
        """End the choice by the server: the values that have come so far are not a vector."""
        self.finish_reason = reason
        return Delta(self.index, is_first=True, finish_reason=reason)


class Pooling(Generation):
    """One request's prompts, running. Closing it aborts what still runs."""

    choices: Sequence[PooledChoice]

    async def outputs(self) -> list[PooledOutput]:
        """Vectors of each prompt, in their order; all or an error.

        Raises what ended it: `RequestError`, `QueueFullError`, `EngineError`, `DeadlineError`, or `UnavailableError`,
        which is also what an operator's abort is.
        """
        async for delta in self.deltas():
            if delta.finish_reason == TIMEOUT:
                raise DeadlineError(self._timeout_s or 0.0)
            if delta.finish_reason != FinishReason.STOP:
                message = "An operator ended this request before it was complete. It can be sent again."
                raise UnavailableError(message, "aborted")
        return [choice.output for choice in self.choices]
