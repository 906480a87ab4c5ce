"""Sends a request's sequences to the engine as its queue has room: one request may have more than the queue holds.

The first sequence of a request goes to the engine at once; a full queue refuses it, and the request with it. The others
have their place from then on, and follow as there is room: no more of one request than can run and as many again, so
that no row is idle while the next ones are on their way, and only while half of the queue is left to first sequences.
Where one ends, the next of the same request takes its place. Requests take turns. One that yields, such as a request of
a batch, has one sequence at the engine while others are open.

Knows counts of sequences and of their prompts' tokens. Does not know the engine, events or HTTP.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

Send = Callable[[int, bool], None]  # the sequence's index in its request, and whether it has a place already


class Submissions:
    """Those of all open requests."""

    def __init__(self, max_num_seqs: int, max_waiting_requests: int, max_waiting_tokens: int) -> None:
        """The engine's limits."""
        self._max_of_one = 2 * max_num_seqs
        self._max_open = max_num_seqs + max_waiting_requests // 2
        self._max_tokens = max_waiting_tokens // 2
        self._num_open = 0  # sequences at the engine
        self._num_tokens = 0  # of prompts at the engine for which nothing has come back
        self._unsent: deque[Submission] = deque()  # in turn
        self.others_are_open: Callable[[], bool] = lambda: False  # beside requests that yield

    def open(self, num_prompt_tokens: Sequence[int], send: Send, *, yields: bool = False) -> Submission:
        """A request with a prompt of so many tokens for each sequence. Its first ones are sent before this returns."""
        submission = Submission(self, num_prompt_tokens, send, yields=yields)
        submission.send_next()
        if submission.num_unsent:
            self._unsent.append(submission)
            self.advance()
        return submission

    @property
    def is_idle(self) -> bool:
        """Nothing is at the engine, and nothing is to be sent."""
        return not (self._num_open or self._num_tokens or self._unsent)

    def count(self, num_sequences: int, num_tokens: int) -> None:
        """So many more, or fewer, are at the engine."""
        self._num_open += num_sequences
        self._num_tokens += num_tokens

    def has_room(self, submission: Submission, *, has_place: bool = False) -> bool:
        """`has_place`: one of the same request has just ended."""
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
        """It has nothing more to send."""
        if submission in self._unsent:
            self._unsent.remove(submission)


class Submission:
    """The sequences of one request: unsent, at the engine, or ended."""

    def __init__(
        self, submissions: Submissions, num_prompt_tokens: Sequence[int], send: Send, *, yields: bool = False
    ) -> None:
        self._submissions = submissions
        self._num_prompt_tokens = num_prompt_tokens
        self._send = send
        self._num_sent = 0
        self.yields = yields
        self._silent: set[int] = set()  # at the engine, and nothing has come back
        self.num_open = 0  # at the engine
        self.num_unsent = len(num_prompt_tokens)

    @property
    def next_tokens(self) -> int:
        """Of the prompt of the next one to be sent."""
        return self._num_prompt_tokens[self._num_sent]

    def send_next(self) -> None:
        index = self._num_sent
        self._submissions.count(1, self.next_tokens)
        self._silent.add(index)
        self._num_sent += 1
        self.num_open += 1
        self.num_unsent -= 1
        self._send(index, index > 0)

    def begun(self, index: int) -> None:
        """Something has come back: it waits no longer."""
        if index in self._silent:
            self._silent.remove(index)
            self._submissions.count(0, -self._num_prompt_tokens[index])
            self._submissions.advance()

    def ended(self, index: int) -> None:
        """It is at the engine no more. The next one takes its place."""
        tokens = self._num_prompt_tokens[index] if index in self._silent else 0
        self._silent.discard(index)
        self.num_open -= 1
        self._submissions.count(-1, -tokens)
        if self.num_unsent and self._submissions.has_room(self, has_place=True):
            self.send_next()
        if not self.num_unsent:
            self._submissions.forget(self)
        self._submissions.advance()

    def close(self) -> None:
        """What was not sent never will be."""
        self.num_unsent = 0
        self._submissions.forget(self)
