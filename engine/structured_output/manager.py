"""Compiles the grammars of requests in threads. Requests are pending here until their grammar is ready.

    loop       `submit`s a request: returns a matcher at once if the grammar is known, else the request is pending
    threads    take grammars from a bounded queue, in which clients take turns; let the sandbox check that a grammar is
               safe, then compile it for the engine
    loop       is woken through `fileno`, and `poll`s the requests that are ready or refused

Requests with the same grammar share one compilation. Compiled grammars and the reasons of refusals are kept, so that a
slow grammar costs a thread its time once instead of with each request. A grammar that no request needs any more is not
compiled, unless a thread has already begun. Does not know the scheduler, steps or frames.
"""

import contextlib
import hashlib
import logging
import math
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import NamedTuple

from oarlock.engine.errors import INTERNAL, EngineError, QueueFullError, RequestError, UnavailableError
from oarlock.engine.panics import LibraryPanicError, panics_as_errors
from oarlock.engine.structured_output.compiler import Compiled, Compiler, GrammarError
from oarlock.engine.structured_output.grammar_memory import GrammarMemory
from oarlock.engine.structured_output.matcher import GrammarMatcher, MaskBatch, Rows
from oarlock.engine.structured_output.sandbox import TOO_LONG, CompileSandbox, SandboxLostError
from oarlock.engine.types import Grammar, Request

MAX_JOBS = 128
MAX_CHARACTERS = 8 << 20
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_WEIGHT = 0.2  # weight of the newest compilation in the average time
_SLOW_S = 0.25  # average above which no client has more than one thread

Key = tuple[str, str]  # kind, text


def key_of(grammar: Grammar) -> Key:
    """Return the key of a grammar; grammars with equal keys share one compilation."""
    return grammar.kind, grammar.text


class CompileJobs:
    """Queue in which clients take turns; the grammars of one client keep their order.

    While compilations are slow, a client has one thread at a time, so that other clients need not wait for seconds.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._changed = threading.Condition()
        self._jobs: dict[Key, Grammar] = {}
        # Jobs by client, the client whose turn is next first. A grammar requested by several clients is a job of each
        # of them, and is taken with the first turn.
        self._turns: OrderedDict[str, dict[Key, None]] = OrderedDict()
        self._running: dict[str, int] = {}  # number of threads used by each client
        self._num_characters = 0
        self._mean_s = 0.0  # seconds of one compilation, moving average
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._jobs)

    def check(self, grammar: Grammar, client: str) -> None:
        """Raise `QueueFullError` unless `grammar` may wait. An empty queue accepts any grammar.

        A client that has less than its share of the queue is not refused, since other clients may have filled it
        before.
        """
        with self._changed:
            own, clients = list(self._turns.get(client, ())), len(self._turns.keys() | {client})
            waiting, characters = len(self._jobs), self._num_characters + len(grammar.text)
        is_small = clients > 1 and len(own) < MAX_JOBS // clients
        own_characters = sum(len(text) for _, text in own) + len(grammar.text)
        is_short = is_small and own_characters <= MAX_CHARACTERS // clients
        if (waiting >= MAX_JOBS and not is_small) or (waiting and characters > MAX_CHARACTERS and not is_short):
            raise QueueFullError(
                f"{waiting} grammars are already waiting for compilation (at most {MAX_JOBS} grammars and "
                f"{MAX_CHARACTERS} characters may wait). Retry later.",
                min(_MAX_RETRY_S, max(_MIN_RETRY_S, waiting / 2 * self._mean_s / self._num_threads)),
            )

    def put(self, grammar: Grammar, client: str) -> None:
        """Queue `grammar` for a turn of `client`."""
        key = key_of(grammar)
        with self._changed:
            if key not in self._jobs:
                self._jobs[key] = grammar
                self._num_characters += len(grammar.text)
                self._changed.notify()
            self._turns.setdefault(client, {})[key] = None

    def share(self, key: Key, client: str) -> None:
        """Add a queued grammar to the turns of another client, so that it may run sooner, unless a thread has it."""
        with self._changed:
            if key in self._jobs:
                self._turns.setdefault(client, {})[key] = None
                self._changed.notify()  # an idle thread may take this client's turn

    def withdraw(self, key: Key) -> bool:
        """Remove a grammar that no request needs any more. Return False if a thread has already taken it."""
        with self._changed:
            return self._remove(key) is not None

    @property
    def next_client(self) -> str | None:
        """Client whose grammar `get` returns at once; None: it would wait."""
        is_slow = self._mean_s > _SLOW_S
        return next((client for client in self._turns if not is_slow or client not in self._running), None)

    def get(self) -> tuple[str, Grammar] | None:
        """Wait for the next grammar. Return it with the client whose turn it uses, or None after `close`.

        For compiler threads, which must call `done` afterwards.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or self.next_client is not None)
            client = self.next_client
            if self._is_closed or client is None:
                return None
            self._running[client] = self._running.get(client, 0) + 1
            self._turns.move_to_end(client)
            grammar = self._remove(next(iter(self._turns[client])))
            assert grammar is not None
            return client, grammar

    def _remove(self, key: Key) -> Grammar | None:
        """Remove a job from the turns of all clients that requested it."""
        grammar = self._jobs.pop(key, None)
        if grammar is not None:
            self._num_characters -= len(grammar.text)
            for client, jobs in list(self._turns.items()):
                jobs.pop(key, None)
                if not jobs:
                    del self._turns[client]
        return grammar

    def done(self, client: str, seconds: float) -> None:
        """Record that a compilation in a turn of `client` has ended after `seconds`."""
        with self._changed:
            self._mean_s += _WEIGHT * (seconds - self._mean_s)
            num_left = self._running.pop(client) - 1
            if num_left:
                self._running[client] = num_left
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


logger = logging.getLogger("oarlock.engine")

NUM_THREADS = 2  # each with a separate connection to the sandbox
MAX_CACHED = 64
MAX_CACHED_CHARACTERS = 4 << 20
MAX_CACHED_BYTES = 64 << 20
MAX_REFUSED = 1024  # refused grammars that are remembered, by digest instead of text: under 1 MiB in total
TOO_LONG_CACHED_S = 300.0  # afterwards the grammar is tried again: the machine may have been slow
NO_MEMORY = (
    "The grammars of open requests use all memory that the server reserves for grammars. Retry when some of these "
    "requests have ended, or use a smaller grammar."
)
SANDBOX_LOST = "The process that checks grammars keeps failing; the server's log has the cause. Retry later."
_STACK_BYTES = 16 << 20


class _Failure(Enum):
    """Reason why a grammar could not be compiled although no fault of the grammar is known."""

    SANDBOX_LOST = auto()
    NO_MEMORY = auto()
    EXCEPTION = auto()

    def error(self) -> EngineError | QueueFullError:
        if self is _Failure.NO_MEMORY:
            return QueueFullError(NO_MEMORY, _MIN_RETRY_S)
        if self is _Failure.SANDBOX_LOST:
            return UnavailableError(SANDBOX_LOST, "grammar_process_lost")
        return EngineError(INTERNAL)


_Result = Compiled | str | _Failure  # compiled grammar, fault of the grammar, or our failure


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a request that was pending: a matcher or an error."""

    request: Request
    arrival_s: float
    matcher: GrammarMatcher | None
    error: RequestError | QueueFullError | EngineError | None


@dataclass(frozen=True, slots=True)
class _Pending:
    request: Request
    arrival_s: float


class _Refused(NamedTuple):
    """Refusal of a grammar, and the time until which it is not tried again."""

    reason: str
    until_s: float


class StructuredOutputManager:
    """Provides the matchers for requests with grammars. All methods belong to the engine's loop; only `fill_masks`
    blocks.
    """

    def __init__(self, tokenizer_file: Path, compiler: Compiler | None, unavailable_reason: str = "") -> None:
        """`unavailable_reason`: the reason why there is no compiler."""
        self._compiler = compiler
        self._unavailable_reason = unavailable_reason
        self._sandbox = CompileSandbox(tokenizer_file, NUM_THREADS)
        self._cache: OrderedDict[Key, Compiled] = OrderedDict()
        self._cached_characters = 0
        self._cached_bytes = 0
        self._memory = GrammarMemory()
        self._refused: OrderedDict[bytes, _Refused] = OrderedDict()  # key: digest of the grammar
        self._pending: dict[int, _Pending] = {}
        self._pending_by_client: dict[str, tuple[int, int]] = {}
        self.waiting: dict[Key, dict[int, None]] = {}  # grammar, queued or being compiled -> ids of its requests
        self._jobs = CompileJobs(NUM_THREADS)
        self._done: queue.SimpleQueue[tuple[Grammar, _Result]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._mask_batch = MaskBatch()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    @staticmethod
    def open(tokenizer_path: str) -> "StructuredOutputManager":
        """Open the manager for the tokenizer in this directory. Without a usable tokenizer.json it refuses grammars."""
        file = Path(tokenizer_path) / "tokenizer.json"
        begun = time.monotonic()
        try:
            compiler = Compiler(file)
        except ValueError as error:
            logger.warning('event=grammars_unavailable cause="%s"', error)
            reason = "this server cannot constrain responses, because it cannot read the model's tokenizer.json"
            return StructuredOutputManager(file, None, reason)
        logger.info("event=grammar_tokenizer_ready seconds=%.3f", time.monotonic() - begun)
        return StructuredOutputManager(file, compiler)

    def fileno(self) -> int:
        """Return the file descriptor that is readable when `poll` has results."""
        return self._wake_read

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    @property
    def pending_by_client(self) -> Mapping[str, tuple[int, int]]:
        """Client -> number of its pending requests, and their prompt tokens."""
        return self._pending_by_client

    def submit(self, request: Request, now: float) -> GrammarMatcher | None:
        """Return a matcher if the request's grammar is known, else None: it is pending, and `poll` returns its outcome.

        Raises `RequestError`, and `QueueFullError` if too many grammars wait already.
        """
        grammar = _grammar(request)
        if self._compiler is None:
            raise _refusal(grammar, self._unavailable_reason)
        if request.request_id in self._pending:
            raise RequestError(f"Request id {request.request_id} is in use.", "request_id")
        key = key_of(grammar)
        compiled = self._cache.get(key)
        if compiled is not None:
            self._cache.move_to_end(key)
            return self._matcher(request, compiled)
        if key not in self.waiting:
            if (reason := self._cached_refusal(key, now)) is not None:
                raise _refusal(grammar, reason)
            if not request.is_admitted:
                self._jobs.check(grammar, request.client)
        self._add_pending(request, key, now)
        return None

    def poll(self, now: float) -> list[Outcome]:
        """Return the outcomes of pending requests, in the order in which their grammars were done."""
        if not self._threads:
            return []
        with contextlib.suppress(BlockingIOError):  # nothing new, or the byte was read with an earlier one
            os.read(self._wake_read, 4096)
        outcomes: list[Outcome] = []
        while not self._done.empty():
            grammar, result = self._done.get()
            key = key_of(grammar)
            if isinstance(result, Compiled):
                result = self._admit(key, result)
            elif isinstance(result, str):
                self._store_refusal(key, _Refused(result, now + TOO_LONG_CACHED_S if result == TOO_LONG else math.inf))
            for request_id in self.waiting.pop(key):
                outcomes.append(self._outcome(self._remove_pending(request_id), result))
        return outcomes

    def abort(self, request_id: int) -> bool:
        """Remove a pending request. Return False if it is not pending."""
        if request_id not in self._pending:
            return False
        key = key_of(_grammar(self._remove_pending(request_id).request))
        waiting = self.waiting[key]
        del waiting[request_id]
        if not waiting and self._jobs.withdraw(key):
            del self.waiting[key]
        return True

    def abort_all(self) -> list[int]:
        """Remove all pending requests and return their ids."""
        return self._abort_each(list(self._pending))

    def abort_adapter(self, name: str) -> list[int]:
        """Remove the pending requests for the LoRA adapter `name` and return their ids."""
        pending = [one.request for one in self._pending.values()]
        return self._abort_each([request.request_id for request in pending if request.adapter == name])

    def _abort_each(self, request_ids: list[int]) -> list[int]:
        for request_id in request_ids:
            self.abort(request_id)
        return request_ids

    def fill_masks(self, batch: list[Rows]) -> list[int | Exception | None]:
        """Compute the masks of all matchers of one step, like `MaskBatch.fill_masks`. Blocks."""
        return self._mask_batch.fill_masks(batch)

    def close(self) -> None:
        self._jobs.close()
        self._sandbox.close()

    # -- in the loop

    def _add_pending(self, request: Request, key: Key, now: float) -> None:
        self._pending[request.request_id] = _Pending(request, now)
        self._count_pending(request, 1)
        if key in self.waiting:
            self.waiting[key][request.request_id] = None
            self._jobs.share(key, request.client)
            return
        self.waiting[key] = {request.request_id: None}
        self._start_threads()
        self._jobs.put(_grammar(request), request.client)

    def _remove_pending(self, request_id: int) -> _Pending:
        pending = self._pending.pop(request_id)
        self._count_pending(pending.request, -1)
        return pending

    def _count_pending(self, request: Request, sign: int) -> None:
        num_requests, num_tokens = self._pending_by_client.pop(request.client, (0, 0))
        if num_requests + sign:
            counts = num_requests + sign, num_tokens + sign * len(request.prompt_token_ids)
            self._pending_by_client[request.client] = counts

    def _outcome(self, pending: _Pending, result: _Result) -> Outcome:
        request = pending.request
        if isinstance(result, _Failure):
            return Outcome(request, pending.arrival_s, None, result.error())
        if isinstance(result, str):
            return Outcome(request, pending.arrival_s, None, _refusal(_grammar(request), result))
        try:
            return Outcome(request, pending.arrival_s, self._matcher(request, result), None)
        except RequestError as error:
            return Outcome(request, pending.arrival_s, None, error)

    def _matcher(self, request: Request, compiled: Compiled) -> GrammarMatcher:
        assert self._compiler is not None
        params = request.params
        end_ids = (*params.eos_token_ids, *params.stop_token_ids)
        try:
            with panics_as_errors():
                return GrammarMatcher(self._compiler, compiled, end_ids, request.client)
        except LibraryPanicError as error:
            raise _refusal(_grammar(request), str(error)) from error

    def _store(self, key: Key, compiled: Compiled) -> None:
        self._cache[key] = compiled
        self._cached_characters += len(key[1])
        self._cached_bytes += compiled.num_bytes
        while (
            len(self._cache) > MAX_CACHED
            or self._cached_characters > MAX_CACHED_CHARACTERS
            or self._cached_bytes > MAX_CACHED_BYTES
        ):
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        (_, text), compiled = self._cache.popitem(last=False)
        self._cached_characters -= len(text)
        self._cached_bytes -= compiled.num_bytes

    def _admit(self, key: Key, compiled: Compiled) -> "Compiled | _Failure":
        """Keep a new grammar if it fits into memory, after dropping kept grammars that no request uses."""
        while self._cache and not self._memory.has_room(compiled):
            self._drop_oldest()
        if not self._memory.has_room(compiled):
            return _Failure.NO_MEMORY
        self._memory.add(compiled)
        self._store(key, compiled)
        return compiled

    def _store_refusal(self, key: Key, refused: _Refused) -> None:
        self._refused[_digest(key)] = refused
        while len(self._refused) > MAX_REFUSED:
            self._refused.popitem(last=False)

    def _cached_refusal(self, key: Key, now: float) -> str | None:
        """Return the reason of an earlier refusal, or None if there is none, or it is so old that the grammar is tried
        again.
        """
        digest = _digest(key)
        refused = self._refused.get(digest)
        if refused is None or now >= refused.until_s:
            return None
        self._refused.move_to_end(digest)
        return refused.reason

    # -- in the threads

    def _start_threads(self) -> None:
        """Start the compiler threads with the first grammar: a server without grammars needs neither threads nor a
        sandbox.
        """
        if self._threads:
            return
        size = threading.stack_size(_STACK_BYTES)
        try:
            for number in range(NUM_THREADS):
                name = f"grammar-{number}"
                thread = threading.Thread(target=self._run_thread, args=(number,), name=name, daemon=True)
                thread.start()
                self._threads.append(thread)
        finally:
            threading.stack_size(size)

    def _run_thread(self, number: int) -> None:
        while (job := self._jobs.get()) is not None:
            client, grammar = job
            begun = time.monotonic()
            result = self._compile(number, grammar, client)
            seconds = time.monotonic() - begun
            self._jobs.done(client, seconds)
            is_ok = "true" if isinstance(result, Compiled) else "false"  # no reason: it may quote the text
            fields = grammar.kind, len(grammar.text), seconds * 1e3, is_ok
            logger.info("event=grammar_compilation kind=%s characters=%d ms=%.1f ok=%s", *fields)
            self._done.put((grammar, result))
            del result  # otherwise this thread would keep a grammar that is not used
            with contextlib.suppress(BlockingIOError):  # the pipe is full of wake-up bytes, so the loop wakes anyway
                os.write(self._wake_write, b"g")

    def _compile(self, number: int, grammar: Grammar, client: str) -> _Result:
        assert self._compiler is not None
        try:
            trial = self._sandbox.check(number, grammar)
            if trial.problem is not None:
                return trial.problem
            with panics_as_errors():
                compiled = self._compiler.compile(grammar)
            compiled.num_bytes, compiled.client = trial.num_bytes, client
            return compiled
        except GrammarError as error:
            return str(error)
        except SandboxLostError:
            return _Failure.SANDBOX_LOST
        except Exception:
            logger.exception("event=grammar_compilation_failed kind=%s", grammar.kind)
            return _Failure.EXCEPTION


def _grammar(request: Request) -> Grammar:
    grammar = request.params.grammar
    assert grammar is not None, "the request has no grammar"
    return grammar


def _digest(key: Key) -> bytes:
    kind, text = key
    return hashlib.blake2b(f"{kind}\0{text}".encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _refusal(grammar: Grammar, problem: str) -> RequestError:
    return RequestError(f"The grammar of '{grammar.param}' was refused: {problem}.", grammar.param, "invalid_grammar")
