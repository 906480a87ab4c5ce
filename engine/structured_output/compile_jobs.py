"""Grammars that wait for a lane: a bounded queue, and whatever nobody waits for any more leaves it.

The loop puts and withdraws, lane threads take. Knows grammars and counts. Does not know requests or what a lane does.
"""

import threading
from collections import OrderedDict

from engine.errors import QueueFullError
from engine.sampling_params import Grammar

MAX_JOBS = 128
MAX_CHARACTERS = 8 << 20
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_WEIGHT = 0.2  # of the last compilation in what one is expected to take

Key = tuple[str, str]  # kind, text


def key_of(grammar: Grammar) -> Key:
    """Equal for grammars that one compilation serves."""
    return grammar.kind, grammar.text


class GrammarJobs:
    """In the order in which they came."""

    def __init__(self, num_lanes: int) -> None:
        self._num_lanes = num_lanes
        self._changed = threading.Condition()
        self._jobs: OrderedDict[Key, Grammar] = OrderedDict()
        self._num_characters = 0
        self._seconds = 0.0  # that one takes, lately
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
                min(_MAX_RETRY_S, max(_MIN_RETRY_S, waiting / 2 * self._seconds / self._num_lanes)),
            )

    def put(self, grammar: Grammar) -> None:
        with self._changed:
            self._jobs[key_of(grammar)] = grammar
            self._num_characters += len(grammar.text)
            self._changed.notify()

    def withdraw(self, key: Key) -> bool:
        """Forget what nobody waits for. False: a lane has it already."""
        with self._changed:
            grammar = self._jobs.pop(key, None)
            self._num_characters -= 0 if grammar is None else len(grammar.text)
        return grammar is not None

    def get(self) -> Grammar | None:
        """The next one, waited for; None when there will be no more. For lane threads."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._is_closed)
            if self._is_closed:
                return None
            _, grammar = self._jobs.popitem(last=False)
            self._num_characters -= len(grammar.text)
            return grammar

    def took(self, seconds: float) -> None:
        """How long a lane was at work on one."""
        self._seconds += _WEIGHT * (seconds - self._seconds)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
