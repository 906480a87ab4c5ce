"""Execution of one request's choices: one queue for their pieces, one close, one deadline.

`Pooling` runs prompts that return vectors instead of texts. They are sent when the engine's queue has room, with one
time limit and one end, and are counted as all other requests are. Knows the engine's client and its events, token ids
and vectors. Knows nothing of HTTP, JSON, prompts, parameters, or the use of the vectors.
"""

import asyncio
import time
from array import array
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from oarlock.engine.client import SingleReaderQueue
from oarlock.engine.errors import EngineError, RequestError, UnavailableError
from oarlock.engine.panics import ENDS_TASK
from oarlock.engine.stats import EngineState, EngineStats, RequestHistory
from oarlock.engine.types import AdapterInfo, EngineInfo, FinishReason, Request, TokenEvent
from oarlock.server.errors import DeadlineError
from oarlock.server.llm.admission_queue import AdmissionQueue
from oarlock.server.llm.loop_turns import turn
from oarlock.server.llm.output_processor import ABORT, TIMEOUT, ChoiceOutput, Delta, PromptProgress, parts_of

PROGRESS_INTERVAL_S = 0.25  # between two progress reports on a prompt
QUEUED_INTERVAL_S = 1.0  # the same while the prompt waits
FIRST_EVENT_TIMEOUT_S = 5.0  # time that a stream waits for the engine's first event before it sends status 200


class Replica(Protocol):
    """One running engine, for the server's statistics."""

    @property
    def number(self) -> int: ...

    @property
    def is_alive(self) -> bool: ...

    async def stats(self) -> EngineStats: ...

    async def state(self) -> EngineState | None: ...

    async def histories(self, request_ids: Sequence[int], /) -> list[RequestHistory]: ...


class ReplicaHandle(Protocol):
    """Replica that generates the requests of one prompt."""

    @property
    def number(self) -> int: ...

    def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]: ...


class Engine(Protocol):
    """Interface of the engine that this package needs: an `oarlock.engine.client.EngineClient`, or several engines as
    `oarlock.engine.replicas.Replicas`.
    """

    @property
    def info(self) -> EngineInfo: ...

    @property
    def replicas(self) -> Sequence[Replica]: ...

    def new_request_id(self) -> int: ...

    def choose(self, request: Request, rank: int | None = None) -> ReplicaHandle: ...

    async def reset_prefix_cache(self) -> int: ...

    async def add_adapter(self, name: str, directory: str) -> None: ...

    async def remove_adapter(self, name: str) -> int: ...

    async def list_adapters(self) -> list[AdapterInfo]: ...


class Choice(Protocol):
    """Output of one engine request, built from its token events."""

    index: int
    request: Request
    started: bool  # its prompt is done
    num_tokens: int  # number of generated tokens
    num_cached_tokens: int
    finish_reason: str | None

    @property
    def finished(self) -> bool: ...

    def push(self, event: TokenEvent, /) -> Delta | None: ...

    def cut(self, reason: str, /) -> Delta: ...


class Generation:
    """Running generation of all choices of one HTTP request. Closing it aborts unfinished choices."""

    def __init__(
        self,
        engine: Engine,
        choices: Sequence[Choice],
        num_prompts: int,
        on_close: Callable[..., None],
        admission_queue: AdmissionQueue,
        timeout_s: float | None = None,
        spent_s: float = 0.0,
        key_label: str | None = None,
        *,
        is_background: bool = False,
        data_parallel_rank: int | None = None,
    ) -> None:
        self.choices = choices
        self.arrival = time.monotonic()
        self.first_token_at: float | None = None
        self.closed = False
        self.request_id = ""
        self.response_id = ""  # the `id` of the response
        self.client = ""  # for the log: a key's label and a hash of the user's name
        self.key_label = key_label  # for the counters and the engine's shares
        self._engine = engine
        self._data_parallel_rank = data_parallel_rank  # replica that the caller has chosen
        self._is_background = is_background  # a full queue must accept its first choice too; it yields
        self.per_prompt = len(choices) // num_prompts
        self._on_close = on_close
        self._timeout_s = timeout_s
        self._queue: SingleReaderQueue[Delta | BaseException] = SingleReaderQueue()
        self._first: Delta | BaseException | None = None
        self._tasks: dict[int, asyncio.Task[None]] = {}  # choice index -> task, for choices at the engine
        self._reporter: asyncio.Task[None] | None = None  # reports the prompt's progress
        self._handles: dict[int, ReplicaHandle] = {}  # prompt index -> its replica
        lens = [len(choice.request.prompt_token_ids) for choice in choices]
        self._submission = admission_queue.open(lens, self._send, is_low_priority=is_background, client=key_label or "")
        loop = asyncio.get_running_loop()
        self._alarm = None if timeout_s is None else loop.call_later(max(0.0, timeout_s - spent_s), self._expire)

    @property
    def adapter(self) -> str | None:
        """Name of the LoRA adapter of all choices; None: the model alone."""
        return self.choices[0].request.adapter

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens; a prompt with several choices counts once."""
        return sum(len(choice.request.prompt_token_ids) for choice in self.choices[:: self.per_prompt])

    @property
    def completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self.choices)

    def replica_of(self, choice: Choice) -> int:
        """Return the number of the replica that generates the choice; 0 before the choice is sent."""
        handle = self._handles.get(choice.index // self.per_prompt)
        return 0 if handle is None else handle.number

    def tokens_by_replica(self) -> dict[int, tuple[int, int]]:
        """Return replica -> (tokens of the prompts sent to it, tokens of their completions)."""
        found: dict[int, tuple[int, int]] = {}
        for position, choice in enumerate(self.choices):
            number, is_first = self.replica_of(choice), position % self.per_prompt == 0
            prompt, answer = found.get(number, (0, 0))
            prompt += len(choice.request.prompt_token_ids) if is_first else 0
            found[number] = prompt, answer + choice.num_tokens
        return found

    @property
    def cached_tokens(self) -> int:
        return sum(choice.num_cached_tokens for choice in self.choices[:: self.per_prompt])

    async def wait_first_event(self) -> None:
        """Wait for the first event. Raises the error of a refusal, while it can still be a plain HTTP response."""
        try:
            async with asyncio.timeout(FIRST_EVENT_TIMEOUT_S):
                first = await self._queue.get()
        except TimeoutError:
            return  # long prompts and full queues take time; from here on errors are sent in the stream
        if isinstance(first, BaseException):
            raise first
        self._first = first

    async def deltas(self) -> AsyncIterator[Delta]:
        """Yield every piece of every choice, as they arrive. Raises the error that ended the generation, if any."""
        open_choices = len(self.choices)
        try:
            while open_choices:
                item = self._first if self._first is not None else await self._queue.get()
                self._first = None
                if isinstance(item, BaseException):
                    raise item
                if self.first_token_at is None and item.num_tokens:
                    self.first_token_at = time.monotonic()
                open_choices -= item.finish_reason is not None
                yield item
        finally:
            self.close()

    def fail(self, error: BaseException) -> None:
        """End this generation with an error that is reported to its client."""
        self._submission.close()
        self._queue.put(error)

    def abort(self) -> bool:
        """End unfinished choices with the text they have. Return False if nothing was running."""
        return self._cut(ABORT)

    def close(self) -> None:
        """Abort unfinished choices. Never waits: a task that is being cancelled must be able to call it."""
        if not self.closed:
            self.closed = True
            if self._alarm is not None:
                self._alarm.cancel()
            self._submission.close()
            for task in (*self._tasks.values(), *filter(None, (self._reporter,))):
                task.cancel()
            self._on_close(self)

    def report_progress(self) -> None:
        """From now on send pieces with the first prompt's `progress`, until it is done."""
        self._reporter = asyncio.create_task(self._report_progress(self.choices[0]), name="prompt-progress")

    async def _report_progress(self, choice: Choice) -> None:
        wait = PROGRESS_INTERVAL_S
        while True:
            await asyncio.sleep(wait)
            history = await self._history_of(choice)
            if choice.started:
                return
            if history is not None:
                cached, position = history["cached_tokens"], history["queue_position"]
                # After a preemption, recomputed tokens count again.
                done = min(cached + history["computed_tokens"], history["prompt_tokens"])
                self._queue.put(self._progress(choice, cached, 0 if position is not None else done, position))
                wait = PROGRESS_INTERVAL_S if position is None else QUEUED_INTERVAL_S

    async def _history_of(self, choice: Choice) -> RequestHistory | None:
        """Return a choice's history at its engine; None before it is there, or while its grammar is compiled."""
        handle = self._handles.get(choice.index // self.per_prompt)
        if handle is None:
            return None
        replica = next(replica for replica in self._engine.replicas if replica.number == handle.number)
        return next(iter(await replica.histories([choice.request.request_id])), None)

    def _progress(self, choice: Choice, cached: int, done: int, queue_position: int | None) -> Delta:
        total, age = len(choice.request.prompt_token_ids), time.monotonic() - self.arrival
        return Delta(choice.index, progress=PromptProgress(total, cached, done, round(1000 * age), queue_position))

    def _expire(self) -> None:
        """Handle the deadline: end unfinished choices with the text they have, or fail if none has started."""
        if not any(choice.started for choice in self.choices):
            self.fail(DeadlineError(self._timeout_s or 0.0))
            return
        self._cut(TIMEOUT)

    def _cut(self, reason: str) -> bool:
        self._submission.close()
        running = [choice for choice in self.choices if not choice.finished]
        for choice in running:
            if choice.index in self._tasks:
                self._tasks[choice.index].cancel()
            self._queue.put(choice.cut(reason))
        return bool(running)

    def _send(self, index: int, is_admitted: bool) -> None:
        def ended(_: asyncio.Task[None]) -> None:
            del self._tasks[index]
            self._submission.ended(index)

        task = self._tasks[index] = asyncio.create_task(
            self._pump(self.choices[index], is_admitted or self._is_background)
        )
        task.add_done_callback(ended)  # also called if the task is cancelled before it has started

    def _handle_of(self, choice: Choice) -> ReplicaHandle:
        """Return the replica of the choice's prompt, which generates all choices of the prompt."""
        prompt = choice.index // self.per_prompt
        if prompt not in self._handles:
            self._handles[prompt] = self._engine.choose(choice.request, self._data_parallel_rank)
        return self._handles[prompt]

    async def _pump(self, choice: Choice, is_admitted: bool) -> None:
        try:
            if isinstance(choice, ChoiceOutput) and choice.only_echoes:
                self._queue.put(choice.echo_only())
                return
            request = choice.request
            if is_admitted or self.key_label is not None:
                client = self.key_label or ""
                request = replace(request, is_admitted=is_admitted, is_low_priority=self._is_background, client=client)
            is_awaited = self._reporter is not None and choice.index == 0
            async with aclosing(self._handle_of(choice).generate(request)) as events:
                async for event in events:
                    if not choice.started:
                        self._submission.begun(choice.index)
                    for part in parts_of(event) if event.prompt_logprobs else (event,):
                        delta = choice.push(part)
                        if delta is not None and delta.error is not None:
                            raise _failure(delta.error, delta.error_param, delta.error_code)
                        if is_awaited and choice.started:  # the prompt is done, but no progress report has covered it
                            total = len(request.prompt_token_ids)
                            self._queue.put(self._progress(choice, choice.num_cached_tokens, total, None))
                            is_awaited = False
                        if delta is not None:
                            self._queue.put(delta)
                        if choice.finish_reason is not None:
                            return
                        if part is not event:  # scores of a long prompt: let other tasks run in between
                            await turn()
            raise EngineError("The engine ended this request without a finish reason.")
        except ENDS_TASK:
            raise
        except BaseException as error:  # any error is reported to this request's client
            self.fail(error)


async def collect(generation: Generation) -> list[list[Delta]]:
    """Return the pieces of every choice, after all choices have finished."""
    pieces: list[list[Delta]] = [[] for _ in generation.choices]
    async for delta in generation.deltas():
        pieces[delta.index].append(delta)
    return pieces


def _failure(message: str, param: str | None, code: str | None) -> Exception:
    """Return the error for a failed choice: a `RequestError` if one of the request's fields is at fault."""
    if param is not None:
        return RequestError(message, param, code or "no_token_left")
    return EngineError(message) if code is None else UnavailableError(message, code)


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """Vectors that the model computed from one prompt."""

    # float32 [1, hidden_size]; kind `token`: [prompt tokens, hidden_size]; kind `logits`: [ids]; kind `labels`:
    # [labels]. Not normalised. After Dense modules: float64 [1, size].
    vectors: np.ndarray
    prompt_token_ids: Sequence[int]
    cached_tokens: int  # prompt tokens taken from the prefix cache

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


class PooledChoice:
    """Incremental collector of the vectors of one engine request."""

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
        """Collect the values of one event; return None before the last event."""
        self.num_cached_tokens = event.num_cached_tokens
        self._values.extend(event.pooled)
        if event.finish_reason is None:
            return None
        self.started, self.finish_reason = True, event.finish_reason.value
        delta = Delta(self.index, is_first=True, finish_reason=self.finish_reason)
        if event.finish_reason is not FinishReason.STOP:
            delta.error, delta.error_param = event.error or "The engine aborted this request.", event.error_param
            delta.error_code = event.error_code
        return delta

    def cut(self, reason: str) -> Delta:
        """End the choice by the server: the values received so far are not a complete vector."""
        self.finish_reason = reason
        return Delta(self.index, is_first=True, finish_reason=reason)


class Pooling(Generation):
    """Running prompts of one pooling request. Closing it aborts unfinished prompts."""

    choices: Sequence[PooledChoice]

    async def outputs(self) -> list[PooledOutput]:
        """Return the output of each prompt, in order.

        Raises the error that ended the request: `RequestError`, `QueueFullError`, `EngineError`, `DeadlineError`, or
        `UnavailableError`, also if an operator aborted it.
        """
        async for delta in self.deltas():
            if delta.finish_reason == TIMEOUT:
                raise DeadlineError(self._timeout_s or 0.0)
            if delta.finish_reason != FinishReason.STOP:
                message = "An operator aborted this request before it was complete. It can be sent again."
                raise UnavailableError(message, "aborted")
        return [choice.output for choice in self.choices]
