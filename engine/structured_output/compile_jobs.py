"""Grammars that wait to be compiled: a bounded queue, without those that no request needs any more.

The engine's loop puts and withdraws, compiler threads take. Knows grammars and counts. Does not know requests or
compilers.
"""

import threading
from collections import OrderedDict

from engine.errors import QueueFullError
from engine.sampling_params import Grammar

MAX_JOBS = 128
MAX_CHARACTERS = 8 << 20
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_WEIGHT = 0.2  # of the last compilation in the average of their times

Key = tuple[str, str]  # kind, text


def key_of(grammar: Grammar) -> Key:
    """Equal for grammars that one compilation serves."""
    return grammar.kind, grammar.text


class CompileJobs:
    """Grammars in the order in which they were put."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._changed = threading.Condition()
        self._jobs: OrderedDict[Key, Grammar] = OrderedDict()
        self._num_characters = 0
        self._mean_s = 0.0  # seconds of one compilation, moving average
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._jobs)

    def check(self, grammar: Grammar) -> None:
        """Raise `QueueFullError` unless `grammar` may wait. An empty queue takes any."""
        waiting, characters = len(self._jobs), self._num_characters + len(grammar.text)
        if waiting >= MAX_JOBS or (waiting and characters > MAX_CHARACTERS):
            raise QueueFullError(
                f"{waiting} grammars wait to be compiled already (at most {MAX_JOBS} may, and {MAX_CHARACTERS} "
                "characters of them). Retry later.",
                min(_MAX_RETRY_S, max(_MIN_RETRY_S, waiting / 2 * self._mean_s / self._num_threads)),
            )

    def put(self, grammar: Grammar) -> None:
        with self._changed:
            self._jobs[key_of(grammar)] = grammar
            self._num_characters += len(grammar.text)
            self._changed.notify()

    def withdraw(self, key: Key) -> bool:
        """Remove a grammar that no request needs any more. False: a thread has taken it already."""
        with self._changed:
            grammar = self._jobs.pop(key, None)
            self._num_characters -= 0 if grammar is None else len(grammar.text)
        return grammar is not None

    def get(self) -> Grammar | None:
        """Wait for the next grammar; None after `close`. For compiler threads."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed)
            if self._is_closed:
                return None
            _, grammar = self._jobs.popitem(last=False)
            self._num_characters -= len(grammar.text)
            return grammar

    def record_seconds(self, seconds: float) -> None:
        """How long one compilation took."""
        self._mean_s += _WEIGHT * (seconds - self._mean_s)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
