"""Where requests with a grammar wait until it is compiled, out of everyone's way.

    loop            `enter` a request: its state at once where the grammar is known, else it waits here
    lane threads    ask the forge whether the grammar is safe, then compile it for the engine
    loop            woken through `fileno`, it `take`s what has become ready, or has been refused

Requests that ask for the same grammar share one compilation. What was compiled is kept, and so is what is wrong with a
grammar. One that nobody waits for any more is not compiled, unless a lane has begun: that is over within a second or
so, and kept. Knows grammars and threads. Does not know the scheduler, steps or frames.
"""

import contextlib
import logging
import os
import queue
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path

from engine.errors import INTERNAL, EngineError, RequestError, UnavailableError
from engine.sampling_params import Grammar
from engine.structured_output.compile_jobs import GrammarJobs, Key, key_of
from engine.structured_output.compiler import Compiled, Compiler, GrammarError
from engine.structured_output.matcher import GrammarMatcher
from engine.structured_output.sandbox import TOO_LONG
from engine.structured_output.sandbox_client import Forge, ForgeLostError
from engine.types import Request

logger = logging.getLogger("oarlock.engine")

NUM_LANES = 2
MAX_KEPT = 64
MAX_KEPT_CHARACTERS = 4 << 20
LOST = "The process that tries grammars could not be kept alive; the cause is in the server's log. Retry later."
_STACK_BYTES = 16 << 20


class _Ours(Enum):
    """Why a grammar was not compiled, when nothing is known to be wrong with it."""

    LOST = auto()  # the process that tries it
    BROKEN = auto()  # something here

    def error(self) -> EngineError:
        return UnavailableError(LOST, "grammar_process_lost") if self is _Ours.LOST else EngineError(INTERNAL)


_Result = Compiled | str | _Ours  # compiled, or what is wrong with it, or nothing is known of it


@dataclass(frozen=True, slots=True)
class Outcome:
    """A request that waits no longer: it has a state, or it is refused."""

    request: Request
    arrival_s: float
    state: GrammarMatcher | None
    error: RequestError | EngineError | None


@dataclass(frozen=True, slots=True)
class _Parked:
    request: Request
    arrival_s: float


class StructuredOutputManager:
    """All methods belong to the engine's loop. Nothing in it waits."""

    def __init__(self, tokenizer_file: Path, compiler: Compiler | None, missing: str = "") -> None:
        """`missing` says why there is no compiler."""
        self._compiler = compiler
        self._missing = missing
        self._forge = Forge(tokenizer_file, NUM_LANES)
        self._kept: OrderedDict[Key, Compiled | str] = OrderedDict()  # compiled, or what is wrong with it
        self._kept_characters = 0
        self._parked: dict[int, _Parked] = {}
        self._num_parked_tokens = 0
        self._waiting: dict[Key, dict[int, None]] = {}  # who waits for a grammar that has a job, or is being compiled
        self._jobs = GrammarJobs(NUM_LANES)
        self._done: queue.SimpleQueue[tuple[Grammar, _Result]] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)

    @staticmethod
    def open(model_path: str) -> "StructuredOutputManager":
        """With the tokens of a checkpoint. One without usable tokens is served all the same, but not with grammars."""
        file = Path(model_path) / "tokenizer.json"
        begun = time.monotonic()
        try:
            compiler = Compiler(file)
        except ValueError as error:
            logger.warning('event=grammars_unavailable cause="%s"', error)
            missing = "this server cannot bind answers to a form, because it cannot read the model's tokenizer.json"
            return StructuredOutputManager(file, None, missing)
        logger.info("event=grammar_tokens_ready seconds=%.3f", time.monotonic() - begun)
        return StructuredOutputManager(file, compiler)

    def fileno(self) -> int:
        """Readable when `take` has something."""
        return self._wake_read

    @property
    def num_parked(self) -> int:
        return len(self._parked)

    @property
    def num_parked_tokens(self) -> int:
        """Of the prompts of those who wait here."""
        return self._num_parked_tokens

    def enter(self, request: Request, now: float) -> GrammarMatcher | None:
        """The state of a request whose grammar is known; None: it waits here.

        Raises `RequestError`, and `QueueFullError` when too many grammars wait already.
        """
        grammar = _grammar(request)
        if self._compiler is None:
            raise _refusal(grammar, self._missing)
        if request.request_id in self._parked:
            raise RequestError(f"Request id {request.request_id} is in use.", "request_id")
        key = key_of(grammar)
        known = self._kept.get(key)
        if known is None:
            if key not in self._waiting and not request.has_place:
                self._jobs.check(grammar)
            self._park(request, key, now)
            return None
        self._kept.move_to_end(key)
        if isinstance(known, str):
            raise _refusal(grammar, known)
        return self._state(request, known)

    def take(self) -> list[Outcome]:
        """What has become of those who waited, in the order in which their grammars were done."""
        if not self._threads:
            return []
        with contextlib.suppress(BlockingIOError):  # nothing new, or the byte was read together with an earlier one's
            os.read(self._wake_read, 4096)
        outcomes: list[Outcome] = []
        while not self._done.empty():
            grammar, result = self._done.get()
            key = key_of(grammar)
            # Which may be the fault of who else was compiling, or is ours: the next request tries again.
            if result != TOO_LONG and not isinstance(result, _Ours):
                self._keep(key, result)
            for request_id in self._waiting.pop(key):
                outcomes.append(self._outcome(self._unpark(request_id), result))
        return outcomes

    def abort(self, request_id: int) -> bool:
        """Whether the request waited here; it no longer does."""
        if request_id not in self._parked:
            return False
        key = key_of(_grammar(self._unpark(request_id).request))
        waiting = self._waiting[key]
        del waiting[request_id]
        if not waiting and self._jobs.withdraw(key):
            del self._waiting[key]
        return True

    def abort_all(self) -> list[int]:
        """Everyone who waits leaves."""
        left = list(self._parked)
        for request_id in left:
            self.abort(request_id)
        return left

    def close(self) -> None:
        self._jobs.close()
        self._forge.close()

    # -- the loop's side

    def _park(self, request: Request, key: Key, now: float) -> None:
        self._parked[request.request_id] = _Parked(request, now)
        self._num_parked_tokens += len(request.prompt_token_ids)
        if key in self._waiting:
            self._waiting[key][request.request_id] = None
            return
        self._waiting[key] = {request.request_id: None}
        self._start_threads()
        self._jobs.put(_grammar(request))

    def _unpark(self, request_id: int) -> _Parked:
        parked = self._parked.pop(request_id)
        self._num_parked_tokens -= len(parked.request.prompt_token_ids)
        return parked

    def _outcome(self, parked: _Parked, result: _Result) -> Outcome:
        request = parked.request
        if isinstance(result, _Ours):
            return Outcome(request, parked.arrival_s, None, result.error())
        if isinstance(result, str):
            return Outcome(request, parked.arrival_s, None, _refusal(_grammar(request), result))
        return Outcome(request, parked.arrival_s, self._state(request, result), None)

    def _state(self, request: Request, compiled: Compiled) -> GrammarMatcher:
        assert self._compiler is not None
        params = request.params
        return GrammarMatcher(self._compiler, compiled, (*params.eos_token_ids, *params.stop_token_ids))

    def _keep(self, key: Key, result: Compiled | str) -> None:
        self._kept[key] = result
        self._kept_characters += len(key[1])
        while len(self._kept) > MAX_KEPT or self._kept_characters > MAX_KEPT_CHARACTERS:
            (_, text), _ = self._kept.popitem(last=False)
            self._kept_characters -= len(text)

    # -- the threads' side

    def _start_threads(self) -> None:
        """With the first grammar: a server that never sees one has neither threads nor a forge."""
        if self._threads:
            return
        size = threading.stack_size(_STACK_BYTES)
        try:
            for number in range(NUM_LANES):
                thread = threading.Thread(target=self._work, args=(number,), name=f"grammar-{number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        finally:
            threading.stack_size(size)

    def _work(self, number: int) -> None:
        while (grammar := self._jobs.get()) is not None:
            begun = time.monotonic()
            result = self._compile(number, grammar)
            seconds = time.monotonic() - begun
            self._jobs.took(seconds)
            is_ok = "true" if isinstance(result, Compiled) else "false"  # never the reason: it may quote the text
            size = len(grammar.text)
            logger.info("event=grammar kind=%s characters=%d ms=%.1f ok=%s", grammar.kind, size, seconds * 1e3, is_ok)
            self._done.put((grammar, result))
            with contextlib.suppress(BlockingIOError):  # the pipe is full of such bytes: the loop will wake
                os.write(self._wake_write, b"g")

    def _compile(self, number: int, grammar: Grammar) -> _Result:
        assert self._compiler is not None
        try:
            problem = self._forge.ask(number, grammar)
            return self._compiler.compile(grammar) if problem is None else problem
        except GrammarError as error:
            return str(error)
        except ForgeLostError:
            return _Ours.LOST
        except Exception:
            logger.exception("event=grammar_failed kind=%s", grammar.kind)
            return _Ours.BROKEN


def _grammar(request: Request) -> Grammar:
    grammar = request.params.grammar
    assert grammar is not None, "only requests with a grammar come here"
    return grammar


def _refusal(grammar: Grammar, problem: str) -> RequestError:
    return RequestError(f"The grammar of '{grammar.param}' was refused: {problem}.", grammar.param, "invalid_grammar")
