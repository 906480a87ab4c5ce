"""Queue of waiting requests, ordered by client shares. A full queue refuses requests (429).

The shares are fair queueing as Sheng et al. apply it to language models ("Fairness in Serving Large Language Models",
2024): each client has a virtual time, the work done for it so far, and the client with the least virtual time is next.
Work is counted in tokens: prompt tokens on admission, completion tokens when they are generated. A client that returns
after a pause starts at the virtual time of the clients served now, so no client saves up a share.

Sequences whose blocks are being read from files wait outside the queue, so that they do not delay later sequences.
Knows order and counts. Does not know rows or steps.
"""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import NamedTuple

from oarlock.engine.errors import QueueFullError
from oarlock.engine.kv_cache.offload import KVOffload
from oarlock.engine.kv_cache.sequence_memory import SequenceMemory
from oarlock.engine.scheduler.sequence import Sequence

MAX_READ_AHEAD = 8  # sequences at the head of the queue that may begin to read files
_OUTPUT_WEIGHT = 2.0  # prompt tokens that equal the work of a generated token
_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0


class ClientShares:
    """Virtual times of all clients, in weighted tokens."""

    def __init__(self) -> None:
        self._now = 0.0
        self._times: dict[str, float] = {}

    @property
    def num_clients(self) -> int:
        """Number of clients that ever had a request admitted."""
        return len(self._times)

    def time_of(self, client: str) -> float:
        """Return the virtual time at which the next request of `client` begins."""
        return max(self._now, self._times.get(client, 0.0))

    def begin(self, client: str, num_prompt_tokens: int, waiting: Iterable[str]) -> None:
        """Count an admitted request of `client` while the clients `waiting` wait, which may include `client`."""
        begins = self.time_of(client)
        self._now = min([begins, *map(self.time_of, waiting)])
        self._times[client] = begins + num_prompt_tokens

    def generate(self, client: str, num_tokens: int) -> None:
        """Count generated tokens of `client`, which had a request admitted before."""
        self._times[client] += _OUTPUT_WEIGHT * num_tokens


def _key(seq: Sequence) -> tuple[float, int]:
    return seq.key


def _line(seq: Sequence) -> tuple[bool, str]:
    return seq.request.is_low_priority, seq.request.client


class Pending(NamedTuple):
    """Accepted requests of one client that are not in the queue yet because their grammars are being compiled."""

    num_requests: int
    num_tokens: int  # prompt tokens


class RequestQueue:
    """Queue bounded in requests and in prompt tokens.

    Clients take turns by their shares; sequences of one client are in the order of their keys. Low-priority
    sequences come after all others and do not count towards the bounds.
    """

    def __init__(self, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens
        self.num_tokens = 0  # prompt tokens
        self._num_low_priority_tokens = 0  # prompt tokens of low-priority sequences
        self.pending: Mapping[str, Pending] = {}  # pending requests by client; they count as waiting
        # Requests by client that wait for their adapters outside the queue, except low-priority requests; they count
        # as waiting. No client is kept that has none.
        self._parked: dict[str, Pending] = {}
        self._shares = ClientShares()
        # True if generated tokens must be counted. A single client needs no count: a second begins at its time.
        self.has_had_several_clients = False
        # (is_low_priority, client) -> waiting sequences.
        self.lines: dict[tuple[bool, str], list[Sequence]] = {}
        self._admitted_s: deque[float] = deque(maxlen=64)  # times of the last admissions

    def __len__(self) -> int:
        return sum(map(len, self.lines.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate in the order in which sequences would be admitted if no other sequence came."""
        if len(self.lines) == 1:
            yield from next(iter(self.lines.values()))
            return
        turns = [(is_low, self._shares.time_of(client), client, 0) for is_low, client in self.lines]
        heapify(turns)
        while turns:
            is_low, time, client, index = heappop(turns)
            line = self.lines[is_low, client]
            seq = line[index]
            yield seq
            if index + 1 < len(line):
                work = 0 if seq.timeline.first_scheduled_s is not None else seq.num_prompt_tokens
                heappush(turns, (is_low, time + work, client, index + 1))

    def __getitem__(self, index: int) -> Sequence:
        """Return the waiting sequence with `index` others ahead of it."""
        return next(islice(self, index, None))

    def has_several_clients(self, running: Iterable[Sequence]) -> bool:
        """Return whether a client waits while another client waits or runs."""
        clients = self.clients
        if len(clients) != 1 or self._shares.num_clients < 2:
            return len(clients) > 1
        (client,) = clients
        return any(seq.request.client != client for seq in running)

    @property
    def clients(self) -> Collection[str]:
        """Clients with waiting sequences."""
        return {client for _, client in self.lines}

    @property
    def has_normal_priority(self) -> bool:
        """True if a sequence that does not have low priority is waiting."""
        return not all(is_low for is_low, _ in self.lines)

    @property
    def num_pending(self) -> int:
        """Pending requests of all clients."""
        return sum(pending.num_requests for pending in self.pending.values())

    @property
    def num_pending_tokens(self) -> int:
        """Prompt tokens of all pending requests."""
        return sum(pending.num_tokens for pending in self.pending.values())

    def time_of(self, client: str) -> float:
        """Return the virtual time of `client`: the work done for it so far. The client with the least is next."""
        return self._shares.time_of(client)

    def check(self, num_tokens: int, num_free_rows: int, now: float, client: str) -> None:
        """Raise `QueueFullError` if a prompt of `num_tokens` may not wait. Requests that can run at once do not count.

        A client that has less than its share of the queue is not refused, because other clients may have filled the
        queue before. `num_free_rows` is the number of requests that can run at once.
        """
        lines = {client: seqs for (is_low, client), seqs in self.lines.items() if not is_low}
        outside = self._outside(client)
        clients = len(lines.keys() | self.pending.keys() | self._parked.keys() | {client})
        num_waiting = sum(map(len, lines.values())) + self.num_pending + self._sum_of_parked(0)
        num_waiting_tokens = self.num_tokens - self._num_low_priority_tokens + self.num_pending_tokens
        num_waiting_tokens += self._sum_of_parked(1)
        own = lines.get(client, ())
        is_small = clients > 1 and len(own) + outside.num_requests < self.max_requests // clients
        if num_waiting >= self.max_requests + num_free_rows and not is_small:
            raise QueueFullError(
                f"{num_waiting} requests are already waiting (at most {self.max_requests} may wait). Retry later.",
                self._retry_after_s(now, num_waiting),
            )
        own_tokens = sum(seq.num_prompt_tokens for seq in own) + outside.num_tokens if is_small else 0
        is_short = is_small and own_tokens + num_tokens <= self.max_tokens // clients
        # An empty queue takes any prompt. Otherwise a prompt longer than the limit could never be served.
        if num_waiting and num_waiting_tokens + num_tokens > self.max_tokens and not is_short:
            raise QueueFullError(
                f"{num_waiting_tokens} prompt tokens are already waiting (at most {self.max_tokens} may wait). Retry "
                "later.",
                self._retry_after_s(now, num_waiting),
            )

    def count_parked(self, seq: Sequence, change: int) -> None:
        """Count `seq`, which waits outside the queue from now on (1) or no longer (-1)."""
        client, is_low = seq.request.client, seq.request.is_low_priority
        if not is_low:
            count, tokens = self._parked.get(client, (0, 0))
            self._parked[client] = Pending(count + change, tokens + change * seq.num_prompt_tokens)
            if self._parked[client].num_requests == 0:
                del self._parked[client]

    def _outside(self, client: str) -> Pending:
        """Return the requests of `client` that wait outside the queue."""
        first, second = self.pending.get(client, (0, 0)), self._parked.get(client, (0, 0))
        return Pending(first[0] + second[0], first[1] + second[1])

    def _sum_of_parked(self, index: int) -> int:
        """Return the number of parked requests (0), or of their prompt tokens (1)."""
        return sum(parked[index] for parked in self._parked.values())

    def push(self, seq: Sequence) -> None:
        insort(self.lines.setdefault(_line(seq), []), seq, key=_key)
        self._count(seq, seq.num_prompt_tokens)

    def admit(self, seq: Sequence, now: float) -> None:
        """Remove `seq`, which begins to run."""
        self._admitted_s.append(now)
        if seq.timeline.first_scheduled_s is None:
            # Low-priority sequences may wait for long; they must not hold back the virtual time of other sequences.
            waiting = {client for is_low, client in self.lines if is_low <= seq.request.is_low_priority}
            self._shares.begin(seq.request.client, seq.num_prompt_tokens, waiting)
            self.has_had_several_clients = self._shares.num_clients > 1
        self.remove(seq)

    def remove(self, seq: Sequence) -> None:
        line = _line(seq)
        seqs = self.lines[line]
        index = bisect_left(seqs, seq.key, key=_key)
        assert seqs[index] is seq
        del seqs[index]
        if not seqs:
            del self.lines[line]
        self._count(seq, -seq.num_prompt_tokens)

    def count_generated(self, client: str, num_tokens: int) -> None:
        """Count `num_tokens` that were generated for admitted sequences of `client`."""
        if self.has_had_several_clients:
            self._shares.generate(client, num_tokens)

    def _count(self, seq: Sequence, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        self._num_low_priority_tokens += num_tokens if seq.request.is_low_priority else 0

    def _retry_after_s(self, now: float, num_waiting: int) -> float:
        """Return the seconds until about half of `num_waiting` requests, in the queue and outside, have been admitted
        at the rate of the last admissions."""
        if not self._admitted_s or now <= self._admitted_s[0]:
            return _MIN_RETRY_S
        rate = len(self._admitted_s) / (now - self._admitted_s[0])
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, num_waiting / 2 / rate))


class LoadingSequences:
    """Sequences taken out of the queue while their files are read, and put back in order afterwards."""

    def __init__(
        self,
        offload: KVOffload,
        queue: RequestQueue,
        memory: SequenceMemory,
        put_back: Callable[[Sequence, float], object],
    ) -> None:
        """`put_back`: queues a sequence again, at a time."""
        self._offload = offload
        self._queue = queue
        self._put_back = put_back
        self._memory = memory
        self._seqs: dict[int, Sequence] = {}  # request id -> sequence

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs.values())

    def update(self, now: float) -> None:
        """Queue sequences whose blocks have been read or will not arrive, and begin to read the blocks of the next
        ones."""
        for request_id in self._offload.take_ready(now):
            self._put_back(self._seqs.pop(request_id), now)
        for seq in [seq for seq in islice(self._queue, MAX_READ_AHEAD) if not seq.has_searched_files]:
            seq.has_searched_files = True
            first_column, digests = self._memory.missing_hashes(seq)
            if self._offload.begin_load(seq.request_id, digests, first_column, now):
                self._queue.remove(seq)
                self._seqs[seq.request_id] = seq

    def remove(self, seq: Sequence) -> None:
        """Remove `seq`, which has ended, from the queue or from the loading sequences."""
        if self._seqs.pop(seq.request_id, None) is None:
            self._queue.remove(seq)
        self.release(seq)

    def forget(self, seq: Sequence) -> None:
        """Release the blocks read for `seq`, which waits for long: they will be searched and read again."""
        seq.has_searched_files = False
        self.release(seq)

    def release(self, seq: Sequence) -> None:
        """Release the blocks read for `seq`, which has got its blocks or has ended."""
        self._offload.release(seq.request_id)
