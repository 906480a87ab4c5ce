"""Which replica a prompt goes to: the one that was sent the longest beginning of it, unless that one is too busy.

Each proxy chooses by what it has sent itself. A prompt that begins like none before goes to the replica that its first
block names (rendezvous hashing: Thaler and Ravishankar, 1998), so that all proxies choose alike; the bound of loads is
that of consistent hashing with bounded loads (Mirrokni et al., 2018). Knows nothing of Ray.
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence

# Hashes that are remembered, of all prompts: 32 MiB. The longest unused are forgotten first.
MAX_HASHES = 1 << 17


class SentPrefixes:
    """The beginnings of prompts that were sent, each with the replicas that got it."""

    def __init__(self, max_hashes: int = MAX_HASHES) -> None:
        self._max_hashes = max_hashes
        self._replicas: OrderedDict[str, set[str]] = OrderedDict()

    def add(self, chain: Sequence[str], replica: str) -> None:
        """`replica` was sent a prompt with these hashes."""
        for one in reversed(chain):  # the longest beginnings are forgotten first
            self._replicas.setdefault(one, set()).add(replica)
            self._replicas.move_to_end(one)
        while len(self._replicas) > self._max_hashes:
            self._replicas.popitem(last=False)

    def keep(self, replicas: set[str]) -> None:
        """Forget all others: they are gone, and what they had cached with them."""
        for one in [one for one, holders in self._replicas.items() if not holders <= replicas]:
            self._replicas[one] &= replicas
            if not self._replicas[one]:
                del self._replicas[one]

    def matches(self, chain: Sequence[str]) -> dict[str, int]:
        """For each replica that was sent a beginning of the prompt: how many blocks of it."""
        found: dict[str, int] = {}
        for number, one in enumerate(chain, 1):
            holders = self._replicas.get(one)
            if not holders:
                break
            found.update(dict.fromkeys(holders, number))
        return found


class OpenRequests:
    """Requests that one proxy has chosen a replica for and that have not ended, in numbers for each replica.

    What a replica reports is late: it says nothing of a request that is not there yet, and what it said a moment ago
    takes the place of what was sent since. So of many requests at once each would find it as idle as the first did.
    """

    def __init__(self) -> None:
        self._chosen: dict[str, str | None] = {}
        self._sent: Counter[str] = Counter()

    def begin(self, request: str) -> None:
        """A replica is looked for, until `leave`."""
        self._chosen[request] = None

    def choose(self, request: str, replica: str | None) -> None:
        """The request is about to go to this replica; None where all seem full."""
        if request in self._chosen:
            self._chosen[request] = replica

    def leave(self, request: str) -> None:
        """The request is not about to go anywhere: it is sent now, or its client has gone."""
        del self._chosen[request]

    def send(self, replica: str) -> None:
        """One request is sent there now."""
        self._sent[replica] += 1

    def end(self, replica: str) -> None:
        """One request that was sent there has ended, however that was."""
        self._sent[replica] -= 1
        if self._sent[replica] <= 0:
            del self._sent[replica]

    def loads(self, reported: Mapping[str, int]) -> dict[str, int]:
        """Open requests of each replica. `reported`: what each said last, in which those of other proxies are too."""
        chosen = Counter(self._chosen.values())
        return {name: max(number, self._sent[name]) + chosen[name] for name, number in reported.items()}


def ranked(chain: Sequence[str], matches: Mapping[str, int], loads: Mapping[str, int], slack: int) -> list[str]:
    """The replicas in the order in which they are asked to take the request.

    `loads`: open requests of each. `slack`: how many more than the least busy one a replica may have and still be
    chosen for its prefix; those with more come last. Without a prompt the least busy come first.
    """
    most = min(loads.values(), default=0) + slack

    def rank(replica: str) -> tuple[bool, int, int, bytes]:
        too_busy = loads[replica] > most
        first = chain[0] if chain else ""
        named = hashlib.blake2b(f"{first} {replica}".encode(), digest_size=8).digest()
        busy = loads[replica] if too_busy or not chain else 0
        return too_busy, -matches.get(replica, 0) if not too_busy else 0, busy, named

    return sorted(loads, key=rank)
