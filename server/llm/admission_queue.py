"""Admission queue: sends a request's sequences to the engine as its queue has room.

One request may have more sequences than that queue holds.

The first sequence of a request goes to the engine at once; a full queue refuses it, and the request with it. The others
have their place from then on, and follow as there is room: no more of one request than can run and as many again, so
that no row is idle while the next ones are on their way, and only while half of the queue is left to first sequences.
Where one ends, the next of the same request takes its place. Requests take turns. One that yields, such as a request of
a batch, has one sequence at the engine while others are open.

It counts all that is at the engine, so it also knows when the engine's queue is full: then a request can be refused
before its body is read.

Knows counts of sequences and of their prompts' tokens. Does not know the engine, events or HTTP.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from oarlock.engine.errors import QueueFullError

Send = Callable[[int, bool], None]  # the sequence's index in its request, and whether it has a place already
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0  # as the engine's


class AdmissionQueue:
    """Admission queue for the sequences of all open requests: those not yet sent, and counts of those at the engine."""

    def __init__(
        self, max_num_seqs: int, max_waiting_requests: int, max_waiting_tokens: int, num_replicas: int = 1
    ) -> None:
        """The engine's limits, of all replicas together."""
        self._max_running, self._max_waiting = max_num_seqs, max_waiting_requests
        self._max_of_one = 2 * max_num_seqs
        self._max_open = max_num_seqs + max_waiting_requests // 2
        self._max_tokens = max_waiting_tokens // 2
        self._num_replicas = num_replicas
        self._num_open = 0  # sequences at the engine
        self._num_tokens = 0  # of prompts at the engine for which nothing has come back
        # Sequences at the engine that count in its queue, by the label of their key: those that yield do not.
        self._by_client: Counter[str] = Counter()
        self._unsent: deque[Submission] = deque()  # in turn
        self._begun_s: deque[float] = deque(maxlen=64)  # when something first came back of the last ones
        self.others_are_open: Callable[[], bool] = lambda: False  # beside requests that yield

    def open(
        self, num_prompt_tokens: Sequence[int], send: Send, *, yields: bool = False, client: str = ""
    ) -> Submission:
        """Add a request, with the prompt length of each sequence. Its first ones are sent before this returns."""
        submission = Submission(self, num_prompt_tokens, send, yields=yields, client=client)
        submission.send_next()
        if submission.num_unsent:
            self._unsent.append(submission)
            self.advance()
        return submission

    def check_room(self, client: str) -> None:
        """Raise `QueueFullError` where the engine would certainly refuse the next request of `client`, whatever it is.

        All rows are taken and all places of the queue. A client that may have less than its share of these places is
        not refused here: at most as many of its sequences run as there are rows, so the others wait, and with several
        clients the share of one is half of the queue at most. In doubt the engine decides, which knows.
        """
        num_open, own = self._by_client.total(), self._by_client[client]
        if num_open < self._max_running + self._max_waiting:
            return
        if own < num_open:  # there are several clients
            num_waiting = own - self._max_running
            if self._num_replicas > 1 or num_waiting < self._max_waiting // 2:
                return
        raise QueueFullError(
            f"{num_open - self._max_running} requests are waiting already (at most {self._max_waiting} may). "
            "Retry later.",
            self._retry_after_s(),
        )

    def _retry_after_s(self) -> float:
        """Seconds until about half of the queue will be gone, at the rate of the last prompts."""
        now = time.monotonic()
        if not self._begun_s or now <= self._begun_s[0]:
            return _MIN_RETRY_S
        rate = len(self._begun_s) / (now - self._begun_s[0])
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, self._max_waiting / 2 / rate))

    @property
    def is_idle(self) -> bool:
        """Whether nothing is at the engine, and nothing is to be sent."""
        return not (self._num_open or self._num_tokens or self._unsent)

    def count(self, client: str | None, num_sequences: int, num_tokens: int) -> None:
        """Count more sequences and tokens at the engine, or fewer. `client`: None for a request that yields."""
        self._num_open += num_sequences
        self._num_tokens += num_tokens
        if client is not None:
            self._by_client[client] += num_sequences
            if not self._by_client[client]:
                del self._by_client[client]

    def begun(self, client: str | None, num_tokens: int) -> None:
        """Note the first event of a sequence, whose prompt has `num_tokens`."""
        self._begun_s.append(time.monotonic())
        self.count(client, 0, -num_tokens)

    def has_room(self, submission: Submission, *, has_place: bool = False) -> bool:
        """Whether the next sequence may be sent. `has_place`: one of the same request has just ended."""
        if not submission.num_open:
            return True  # else it could wait for ever behind other requests
        if submission.yields and self.others_are_open():
            return False
        if self._num_tokens + submission.next_tokens > self._max_tokens:
            return False
        return has_place or (submission.num_open < self._max_of_one and self._num_open < self._max_open)

    def advance(self) -> None:
        """Send what there is room for, one sequence of each request in turn."""
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
    """The sequences of one request: unsent, at the engine, or ended."""

    def __init__(
        self,
        queue: AdmissionQueue,
        num_prompt_tokens: Sequence[int],
        send: Send,
        *,
        yields: bool,
        client: str,
    ) -> None:
        self._queue = queue
        self._num_prompt_tokens = num_prompt_tokens
        self._send = send
        self._client = None if yields else client
        self._num_sent = 0
        self.yields = yields
        self._silent: set[int] = set()  # at the engine, and nothing has come back
        self.num_open = 0  # at the engine
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
        """Note the first event of a sequence: it waits no longer."""
        if index in self._silent:
            self._silent.remove(index)
            self._queue.begun(self._client, self._num_prompt_tokens[index])
            self._queue.advance()

    def ended(self, index: int) -> None:
        """Note the end of a sequence at the engine: the next one takes its place."""
        tokens = self._num_prompt_tokens[index] if index in self._silent else 0
        self._silent.discard(index)
        self.num_open -= 1
        self._queue.count(self._client, -1, -tokens)
        if self.num_unsent and self._queue.has_room(self, has_place=True):
            self.send_next()
        if not self.num_unsent:
            self._queue.forget(self)
        self._queue.advance()

    def close(self) -> None:
        """Drop the sequences that were not sent."""
        self.num_unsent = 0
        self._queue.forget(self)
