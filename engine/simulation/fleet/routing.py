"""Routers of a simulated fleet: at random, to the least loaded replica, or as our frontend chooses.

A router sees present loads and caches; a real one learns of them a little later.
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
        """Choose a replica: its place, and how many tokens of the prompt the router knows to be cached there."""
        ...


class AtRandom:
    """Chooses a replica at random, always with the same seed."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._random = random.Random(0)

    def choose(self, request: Request) -> tuple[int, int]:
        return self._random.randrange(len(self._replicas)), 0


class LeastLoaded:
    """Chooses the replica with the fewest open requests; among equals, the next in turn."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self._replicas = replicas
        self._turn = 0

    def choose(self, request: Request) -> tuple[int, int]:
        count, loads = len(self._replicas), [replica.load.num_open for replica in self._replicas]
        chosen = min(range(count), key=lambda place: (loads[place], (place - self._turn) % count))
        self._turn = chosen + 1
        return chosen, 0


class ByPrefix:
    """Chooses by the longest cached prefix within a bound of load, with the code of `--data-parallel-size`."""

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
