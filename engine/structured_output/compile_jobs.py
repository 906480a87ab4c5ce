"""Queue of grammars that wait to be compiled: bounded, with turns by client, without those that no request needs.

The engine's loop puts and withdraws grammars, compiler threads take them. Knows grammars, counts and names of clients.
Does not know requests or compilers.
"""

import threading
from collections import OrderedDict

from oarlock.engine.errors import QueueFullError
from oarlock.engine.sampling_params import Grammar

MAX_JOBS = 128
MAX_CHARACTERS = 8 << 20
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_WEIGHT = 0.2  # of the newest compilation in the average of their times
_SLOW_S = 0.25  # the average beyond which no client has more than one thread

Key = tuple[str, str]  # kind, text


def key_of(grammar: Grammar) -> Key:
    """Key of a grammar, equal for grammars that one compilation serves."""
    return grammar.kind, grammar.text


class CompileJobs:
    """Queue in which clients take turns; the grammars of one client keep the order in which they were put.

    While compilations are slow, a client has one thread at a time, so that another client need not wait for seconds.
    """

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._changed = threading.Condition()
        self._jobs: dict[Key, Grammar] = {}
        # Jobs by client, the client whose turn is next first. A grammar that several clients asked for is a job of each
        # of them, and is taken with the first turn.
        self._turns: OrderedDict[str, dict[Key, None]] = OrderedDict()
        self._running: dict[str, int] = {}  # threads that each client has
        self._num_characters = 0
        self._mean_s = 0.0  # seconds of one compilation, moving average
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._jobs)

    def check(self, grammar: Grammar, client: str) -> None:
        """Raise `QueueFullError` unless `grammar` may wait. An empty queue takes any.

        A client that has less than its share of the queue is not refused: others may have filled it before.
        """
        with self._changed:
            own, clients = list(self._turns.get(client, ())), len(self._turns.keys() | {client})
            waiting, characters = len(self._jobs), self._num_characters + len(grammar.text)
        is_small = clients > 1 and len(own) < MAX_JOBS // clients
        own_characters = sum(len(text) for _, text in own) + len(grammar.text)
        is_short = is_small and own_characters <= MAX_CHARACTERS // clients
        if (waiting >= MAX_JOBS and not is_small) or (waiting and characters > MAX_CHARACTERS and not is_short):
            raise QueueFullError(
                f"{waiting} grammars wait to be compiled already (at most {MAX_JOBS} may, and {MAX_CHARACTERS} "
                "characters of them). Retry later.",
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
        """Add a queued grammar to the turns of another client, so that it may come sooner, unless a thread has it."""
        with self._changed:
            if key in self._jobs:
                self._turns.setdefault(client, {})[key] = None
                self._changed.notify()  # an idle thread may take this client's turn

    def withdraw(self, key: Key) -> bool:
        """Remove a grammar that no request needs any more. False: a thread has taken it already."""
        with self._changed:
            return self._remove(key) is not None

    @property
    def next_client(self) -> str | None:
        """Client whose grammar `get` returns at once; None: it would wait."""
        is_slow = self._mean_s > _SLOW_S
        return next((client for client in self._turns if not is_slow or client not in self._running), None)

    def get(self) -> tuple[str, Grammar] | None:
        """Wait for the next grammar, and return it with the client whose turn it takes; None after `close`. For
        compiler threads, which must call `done` after it."""
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
        """Remove a job from the turns of all clients that asked for it."""
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
