"""The queue of waiting requests: their order, and when it is full. A full queue refuses (429), it does not grow.

Knows order and counts. Does not know blocks, rows or steps.
"""

from bisect import bisect_left, insort
from collections import deque

from engine.errors import QueueFullError
from engine.scheduler.sequence import Sequence

_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


def _key(seq: Sequence) -> tuple[float, int]:
    return seq.key


class RequestQueue:
    """Sequences in the order of their keys, bounded by requests and by prompt tokens."""

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_tokens = 0  # of prompts
        # Accepted requests that are not in the queue yet, because their grammar is being compiled: they count as well.
        self.num_pending = 0
        self.num_pending_tokens = 0
        self._seqs: list[Sequence] = []
        self._admitted_s: deque[float] = deque(maxlen=64)  # when the last ones were admitted

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self):
        return iter(self._seqs)

    def check(self, num_tokens: int, num_free_rows: int, now: float) -> None:
        """Raise `QueueFullError` unless a prompt of `num_tokens` may wait. Requests that can run at once do not count.

        `num_free_rows` is how many can run at once.
        """
        num_waiting = len(self._seqs) + self.num_pending
        num_waiting_tokens = self.num_tokens + self.num_pending_tokens
        if num_waiting >= self.max_requests + num_free_rows:
            raise QueueFullError(
                f"{num_waiting} requests are waiting already (at most {self.max_requests} may). Retry later.",
                self._retry_after_s(now),
            )
        # An empty queue takes any prompt: one that is longer than the limit could otherwise never be served.
        if num_waiting and num_waiting_tokens + num_tokens > self.max_tokens:
            raise QueueFullError(
                f"{num_waiting_tokens} prompt tokens are waiting already (at most {self.max_tokens} may). Retry later.",
                self._retry_after_s(now),
            )

    def push(self, seq: Sequence) -> None:
        insort(self._seqs, seq, key=_key)
        self.num_tokens += seq.num_prompt_tokens

    def __getitem__(self, index: int) -> Sequence:
        """The sequence that `index` others are ahead of."""
        return self._seqs[index]

    def admit(self, seq: Sequence, now: float) -> None:
        """Remove `seq`, which begins to run."""
        self._admitted_s.append(now)
        self.remove(seq)

    def remove(self, seq: Sequence) -> None:
        index = bisect_left(self._seqs, seq.key, key=_key)
        assert self._seqs[index] is seq
        del self._seqs[index]
        self.num_tokens -= seq.num_prompt_tokens

    def _retry_after_s(self, now: float) -> float:
        """About when half of the queue will be gone, at the rate of the last admissions."""
        if not self._admitted_s or now <= self._admitted_s[0]:
            return _MIN_RETRY_S
        rate = len(self._admitted_s) / (now - self._admitted_s[0])
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, len(self._seqs) / 2 / rate))
