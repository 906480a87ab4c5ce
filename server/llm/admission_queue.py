"""Admission queue: sends a request's sequences to the engine when the engine's queue has room.

A request may have more sequences than the engine's queue holds. Its first sequence is sent at once; if the queue is
full, the engine refuses it and thereby the request. The other sequences are then guaranteed a slot and follow when
there is room. At most twice as many sequences of one request are sent as the engine can run, so that no row is idle
while the next sequences are on their way, and half of the queue is reserved for first sequences. When a sequence ends,
the next of the same request takes its slot. Requests take turns. A request that yields, such as a batch request, has
only one sequence at the engine while other requests are open.

The queue counts all sequences at the engine, so it also knows when the engine's queue is full. Then a request can be
refused before its body is read.

Knows counts of sequences and of their prompt tokens. Does not know the engine, events or HTTP.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from oarlock.engine.errors import QueueFullError

Send = Callable[[int, bool], None]  # (index of the sequence in its request, whether a full queue must accept it)
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0  # same limits as the engine's


class AdmissionQueue:
    """Unsent sequences of all open requests, and counts of the sequences at the engine."""

    def __init__(
        self, max_num_seqs: int, max_waiting_requests: int, max_waiting_tokens: int, num_replicas: int = 1
    ) -> None:
        """Take the engine's limits, summed over all replicas."""
        self._max_running, self._max_waiting = max_num_seqs, max_waiting_requests
        self._max_of_one = 2 * max_num_seqs
        self._max_open = max_num_seqs + max_waiting_requests // 2
        self._max_tokens = max_waiting_tokens // 2
        self._num_replicas = num_replicas
        self._num_open = 0  # sequences at the engine
        self._num_tokens = 0  # prompt tokens of sequences at the engine without an event so far
        # Sequences at the engine by the label of their API key, without sequences that yield.
        self._by_client: Counter[str] = Counter()
        self._unsent: deque[Submission] = deque()  # in the order of their turns
        self._begun_s: deque[float] = deque(maxlen=64)  # times of the first events of the most recent sequences
        self.others_are_open: Callable[[], bool] = lambda: False  # whether requests that do not yield are open

    def open(
        self, num_prompt_tokens: Sequence[int], send: Send, *, is_low_priority: bool = False, client: str = ""
    ) -> Submission:
        """Add a request, with the prompt length of each sequence. Sends its first sequences before it returns."""
        submission = Submission(self, num_prompt_tokens, send, is_low_priority=is_low_priority, client=client)
        submission.send_next()
        if submission.num_unsent:
            self._unsent.append(submission)
            self.advance()
        return submission

    def check_room(self, client: str) -> None:
        """Raise `QueueFullError` if the engine would certainly refuse the next request of `client`.

        This requires that all rows and all queue slots are taken. A client that may use less than its share of the
        queue is not refused here: at most `max_num_seqs` of its sequences run, so the others wait, and with several
        clients a client's share is at most half of the queue. In case of doubt the engine decides, since it has the
        exact state.
        """
        num_open, own = self._by_client.total(), self._by_client[client]
        if num_open < self._max_running + self._max_waiting:
            return
        if own < num_open:  # there are several clients
            num_waiting = own - self._max_running
            if self._num_replicas > 1 or num_waiting < self._max_waiting // 2:
                return
        raise QueueFullError(
            f"{num_open - self._max_running} requests are waiting (at most {self._max_waiting} may wait). Retry later.",
            self._retry_after_s(),
        )

    def _retry_after_s(self) -> float:
        """Return the seconds until about half of the queue is processed, at the rate of the most recent prompts."""
        now = time.monotonic()
        if not self._begun_s or now <= self._begun_s[0]:
            return _MIN_RETRY_S
        rate = len(self._begun_s) / (now - self._begun_s[0])
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, self._max_waiting / 2 / rate))

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is at the engine or waiting to be sent."""
        return not (self._num_open or self._num_tokens or self._unsent)

    def count(self, client: str | None, num_sequences: int, num_tokens: int) -> None:
        """Add to the counts of sequences and tokens at the engine (negative: subtract). `client`: None if it yields."""
        self._num_open += num_sequences
        self._num_tokens += num_tokens
        if client is not None:
            self._by_client[client] += num_sequences
            if not self._by_client[client]:
                del self._by_client[client]

    def begun(self, client: str | None, num_tokens: int) -> None:
        """Record the first event of a sequence, whose prompt has `num_tokens`."""
        self._begun_s.append(time.monotonic())
        self.count(client, 0, -num_tokens)

    def has_room(self, submission: Submission, *, is_admitted: bool = False) -> bool:
        """Return whether the next sequence may be sent.

        `is_admitted`: a sequence of the same request has just ended.
        """
        if not submission.num_open:
            return True  # otherwise it could wait forever behind other requests
        if submission.is_low_priority and self.others_are_open():
            return False
        if self._num_tokens + submission.next_tokens > self._max_tokens:
            return False
        return is_admitted or (submission.num_open < self._max_of_one and self._num_open < self._max_open)

    def advance(self) -> None:
        """Send sequences while there is room; requests take turns."""
        num_refused = 0
        while num_refused < len(self._unsent):
            submission = self._unsent.popleft()
            if self.has_room(submission):
                submission.send_next()
                num_refused = 0
            else:
                num_refused += 1
            if submission.num_unsent:
                self._unsent.append(submission)

    def forget(self, submission: Submission) -> None:
        """Remove a request that has nothing more to send."""
        if submission in self._unsent:
            self._unsent.remove(submission)


class Submission:
    """Sequences of one request: unsent, at the engine, or ended."""

    def __init__(
        self,
        queue: AdmissionQueue,
        num_prompt_tokens: Sequence[int],
        send: Send,
        *,
        is_low_priority: bool,
        client: str,
    ) -> None:
        self._queue = queue
        self._num_prompt_tokens = num_prompt_tokens
        self._send = send
        self._client = None if is_low_priority else client
        self._num_sent = 0
        self.is_low_priority = is_low_priority
        self._silent: set[int] = set()  # indices of sequences at the engine without an event so far
        self.num_open = 0  # number of sequences at the engine
        self.num_unsent = len(num_prompt_tokens)

    @property
    def next_tokens(self) -> int:
        """Number of prompt tokens of the next sequence to be sent."""
        return self._num_prompt_tokens[self._num_sent]

    def send_next(self) -> None:
        index = self._num_sent
        self._queue.count(self._client, 1, self.next_tokens)
        self._silent.add(index)
        self._num_sent += 1
        self.num_open += 1
        self.num_unsent -= 1
        self._send(index, index > 0)

    def begun(self, index: int) -> None:
        """Record the first event of a sequence: it no longer waits."""
        if index in self._silent:
            self._silent.remove(index)
            self._queue.begun(self._client, self._num_prompt_tokens[index])
            self._queue.advance()

    def ended(self, index: int) -> None:
        """Record the end of a sequence at the engine: the next sequence takes its slot."""
        tokens = self._num_prompt_tokens[index] if index in self._silent else 0
        self._silent.discard(index)
        self.num_open -= 1
        self._queue.count(self._client, -1, -tokens)
        if self.num_unsent and self._queue.has_room(self, is_admitted=True):
            self.send_next()
        if not self.num_unsent:
            self._queue.forget(self)
        self._queue.advance()

    def close(self) -> None:
        """Drop the unsent sequences."""
        self.num_unsent = 0
        self._queue.forget(self)
