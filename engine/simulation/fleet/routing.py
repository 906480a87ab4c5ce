"""Which replica gets a request: at random, the least loaded, or the one that our own frontend would send it to.

The loads and caches that a router sees are those of the moment: what a real one learns is a little older.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

from oarlock.engine.data_parallel.choice import choose
from oarlock.engine.data_parallel.prefix_index import PrefixIndex
from oarlock.engine.kv_cache.events import BlockChanges
from oarlock.engine.simulation.fleet.replica import Replica
from oarlock.engine.types import Request


class Router(Protocol):
    """Chooses among replicas whose steps have been simulated up to the arrival."""

    def choose(self, request: Request) -> tuple[int, int]:
        """The replica's place, and how many tokens of the prompt the router knows to be there."""
        ...


class AtRandom:
    """The same choices for the same seed."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._random = random.Random(0)

    def choose(self, request: Request) -> tuple[int, int]:
        return self._random.randrange(len(self._replicas)), 0


class LeastLoaded:
    """Of those with as few requests the next in turn."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._turn = 0

    def choose(self, request: Request) -> tuple[int, int]:
        count, loads = len(self._replicas), [replica.load.num_open for replica in self._replicas]
        chosen = min(range(count), key=lambda place: (loads[place], (place - self._turn) % count))
        self._turn = chosen + 1
        return chosen, 0


class ByPrefix:
    """The longest cached beginning within a bound of load, by the code of `--data-parallel-size`."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._logs = [replica.block_events for replica in replicas]
        self._prefixes = PrefixIndex(len(replicas), replicas[0].scheduler.kv_cache_manager.block_size)

    def choose(self, request: Request) -> tuple[int, int]:
        for place, log in enumerate(self._logs):
            if events := log.take():
                self._prefixes.apply(place, BlockChanges.of(events))
        num_cached = self._prefixes.num_cached(request.prompt_token_ids, request.cache_salt)
        chosen = choose([replica.load for replica in self._replicas], num_cached)
        self._replicas[chosen].load.num_chosen += 1
        return chosen, num_cached[chosen]


ROUTERS = {"prefix": ByPrefix, "least-loaded": LeastLoaded, "random": AtRandom}
