"""Replicas of one model behind the interface of one engine. Each request goes to a chosen replica.

Among replicas that are not too busy, the replica with the longest cached prefix is chosen: a pure function of counts,
without clock, randomness or engine. Consistent hashing with bounded loads (Mirrokni et al., 2018) has the same bound;
here the cached prefix replaces the hash. `PrefixIndex`, in the frontend, has the hashes in the prefix cache of each
replica. It follows the cache events of each engine, so it is exact except for events that are still in transit.

A replica whose engine dies is started again while the others serve. If that fails, or it dies too often, `lost` is set:
the server should let the others finish, and end. If no replica is alive, `dead` is set, as with one engine.
"""

import asyncio
import itertools
import logging
import math
import time
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from oarlock.base.errors import EXIT_RANK_DIED, StartupError
from oarlock.base.host_memory import free_host_bytes
from oarlock.base.watched_reads import WatchedReads
from oarlock.engine.client import EngineClient, digest_of
from oarlock.engine.config import EngineConfig
from oarlock.engine.engine_process import EngineProcess
from oarlock.engine.errors import EngineDeadError, RequestError, UnavailableError
from oarlock.engine.ipc.frames import FrameError
from oarlock.engine.kv_cache.block_events import BlockChanges, extend_hashes, salt_with_adapter
from oarlock.engine.stats import EngineState, EngineStats, RequestHistory
from oarlock.engine.types import AdapterInfo, EngineInfo, Request, TokenEvent
from oarlock.workers.config import OnProgress

logger = logging.getLogger("oarlock.engine.replicas")

# Weight of an open request in addition to its prompt tokens that are not computed yet: it takes a row of each step
# until it ends.
REQUEST_WEIGHT_TOKENS = 128
# A replica may be chosen for its prefix while it has at most this many tokens more than the least busy replica, or a
# fourth more. A prefix shared by all prompts is therefore computed on a second replica as soon as a few of them run at
# a time. From then on it is cached on both, and the less busy replica is chosen.
SLACK_TOKENS = 512
SLACK_SHARE = 4


@dataclass(slots=True)
class Load:
    """Load of a replica, counted in the frontend from the requests sent to it."""

    num_open: int = 0  # requests that have not ended
    num_waiting_tokens: int = 0  # uncached tokens of prompts without an event so far
    num_chosen: int = 0  # total number of requests sent there: breaks ties, so that all replicas' memory is used
    max_open: float = math.inf  # most requests that can run and wait there
    max_waiting_tokens: float = math.inf  # most prompt tokens in its queue

    @property
    def weight(self) -> int:
        """Weight of the load, in tokens."""
        return REQUEST_WEIGHT_TOKENS * self.num_open + self.num_waiting_tokens

    @property
    def has_room(self) -> bool:
        """Whether the queue would accept another request, judging by the counted requests."""
        return self.num_open < self.max_open and self.num_waiting_tokens < self.max_waiting_tokens


def largest_weight(least: int) -> int:
    """Return the largest weight with which a replica is still chosen if the least busy one has the weight `least`."""
    return least + max(SLACK_TOKENS, least // SLACK_SHARE)


def choose(loads: Sequence[Load | None], num_cached: Sequence[int]) -> int:
    """Return the number of the chosen replica. A load of None marks a replica that takes no requests.

    A replica without room is skipped while another has room. `num_cached`: leading tokens of the prompt in each
    replica's prefix cache. If prefixes are equally long, the least busy replica is chosen; ties go to the replica that
    was chosen least often, then to the first. Raises `ValueError` if no replica takes requests.
    """
    available = [(number, load) for number, load in enumerate(loads) if load is not None]
    available = [(number, load) for number, load in available if load.has_room] or available
    most = largest_weight(min(load.weight for _, load in available))
    return min(
        (-num_cached[number], load.weight, load.num_chosen, number) for number, load in available if load.weight <= most
    )[-1]


class PrefixIndex:
    """Hashes in the prefix caches of several replicas."""

    def __init__(self, num_replicas: int, block_size: int) -> None:
        """`block_size`: tokens of a block."""
        self._block_size = block_size
        self._held: list[set[bytes]] = [set() for _ in range(num_replicas)]

    def apply(self, replica: int, changes: BlockChanges) -> None:
        """Apply the cache changes that `replica` has reported."""
        held = self._held[replica]
        if changes.is_cleared:
            held.clear()
        held.update(changes.stored)
        held.difference_update(changes.removed)

    def clear(self, replica: int) -> None:
        """Forget all blocks of `replica`, whose engine is gone."""
        self._held[replica].clear()

    def held(self, replica: int) -> frozenset[bytes]:
        """Return all hashes of a replica."""
        return frozenset(self._held[replica])

    def num_cached(self, token_ids: Sequence[int], cache_salt: bytes) -> list[int]:
        """Return the number of leading prompt tokens cached by each replica: whole blocks, and never the last token.

        Hashes are computed up to the first block that no replica has.
        """
        found = [0] * len(self._held)
        alive, hashes = [number for number, held in enumerate(self._held) if held], list[bytes]()
        for column in range((len(token_ids) - 1) // self._block_size):
            if not alive:
                break
            extend_hashes(hashes, token_ids, cache_salt, self._block_size, column + 1)
            alive = [number for number in alive if hashes[column] in self._held[number]]
            for number in alive:
                found[number] += self._block_size
        return found


MAX_DEATHS = 3  # this many within `DEATHS_S` are a fault that a new start does not fix
DEATHS_S = 600.0

# The text is the same for every replica.
_DIFFERENT_VALUES = StartupError(
    "The replicas would compute different values, because their model, dtypes or kernels differ.",
    "Check whether files of the model or of its kernels have changed since the start, then start again.",
)
_DEAD_GAUGES = {
    "state": "dead",
    "num_requests_running": 0,
    "num_requests_waiting": 0,
    "num_waiting_tokens": 0,
    "kv_cache_usage": 0.0,
    "num_blocks_free": 0,
    "num_blocks_cached": 0,
    "num_blocks_held": 0,
    "num_state_slots_held": 0,
    "num_state_checkpoints": 0,
    "num_adapters_loaded": 0,
    "num_adapters_in_slots": 0,
    "num_requests_waiting_for_adapter": 0,
    "running_adapters": [],
    "waiting_adapters": [],
}
StartReplica = Callable[[int, int], Awaitable[EngineClient]]  # its number, and how often it was started before


class Replica:
    """A running engine with its number and load, made once it is ready."""

    def __init__(self, number: int, client: EngineClient, start: StartReplica) -> None:
        """`start`: starts the engine again after each death."""
        self.number = number
        self.client = client
        info = client.info
        self.load = Load(
            max_open=info.max_num_seqs + info.max_waiting_requests, max_waiting_tokens=info.max_waiting_tokens
        )
        self._start = start
        self._num_starts = 1
        self._deaths: deque[float] = deque(maxlen=MAX_DEATHS)

    @property
    def is_alive(self) -> bool:
        return self.client.is_alive

    async def stats(self) -> EngineStats:
        """Return the statistics of the engine. Counters begin again with a new engine; a dead engine runs nothing."""
        stats = await self.client.stats()
        return stats if self.is_alive else replace(stats, **_DEAD_GAUGES)

    async def state(self) -> EngineState | None:
        """Return the live state, or None if the engine is dead."""
        return await self.client.state()

    async def histories(self, request_ids: Sequence[int]) -> list[RequestHistory]:
        """Return the histories of the given requests that the present engine knows."""
        return await self.client.histories(request_ids)

    async def generate(self, request: Request, num_new_tokens: int) -> AsyncGenerator[TokenEvent, None]:
        """Generate like `EngineClient.generate`. `num_new_tokens`: prompt tokens that must be computed first.

        Raises `UnavailableError` if the engine dies: the client may send the same request again, and it goes to another
        replica. It is not sent again here: part of its response may already be sent, and it may be the cause of the
        death.
        """
        load = self.load
        load.num_open += 1
        load.num_waiting_tokens += num_new_tokens
        try:
            async with aclosing(self.client.generate(request)) as events:
                async for event in events:
                    load.num_waiting_tokens -= num_new_tokens
                    num_new_tokens = 0
                    yield event
        except EngineDeadError as error:
            raise UnavailableError(
                f"The engine that processed this request has stopped (replica {self.number}). Other replicas are "
                "running: send the request again.",
                "replica_lost",
            ) from error
        finally:
            load.num_open -= 1
            load.num_waiting_tokens -= num_new_tokens

    async def died(self) -> None:
        """Wait until its engine has ended; by then all its requests have ended, too."""
        await self.client.dead.wait()
        self._deaths.append(time.monotonic())
        cause = self.client.death_cause or "its process has ended"
        logger.error('event=replica_lost engine=%d exit_code=%s cause="%s"', self.number, self.client.exit_code, cause)

    @property
    def dies_too_often(self) -> bool:
        return len(self._deaths) == MAX_DEATHS and self._deaths[-1] - self._deaths[0] < DEATHS_S

    async def restart(self, numbers_digest: str, equip: Callable[[EngineClient], Awaitable[None]]) -> None:
        """Start an engine in place of the dead one. It must compute the same values as the others.

        `equip`: called with the engine before it gets requests. Raises `StartupError`.
        """
        began = time.monotonic()
        client = await self._start(self.number, self._num_starts)
        if client.info.numbers_digest != numbers_digest:
            await client.close(0.0)
            raise _DIFFERENT_VALUES
        with suppress(EngineDeadError):  # it is noticed as every other death
            await equip(client)
        self.client = client
        self._num_starts += 1
        logger.info("event=replica_ready engine=%d seconds=%.1f", self.number, time.monotonic() - began)


class ReplicaHandle:
    """Handle on the replica chosen for a prompt: all its requests go there, and the prompt is computed once."""

    def __init__(self, replica: Replica, num_new_tokens: int) -> None:
        self.number = replica.number
        self._replica = replica
        self._num_new_tokens = num_new_tokens

    def generate(self, request: Request) -> AsyncGenerator[TokenEvent, None]:
        """Yield the events of one request, like `Replica.generate`."""
        num_new_tokens, self._num_new_tokens = self._num_new_tokens, 0
        return self._replica.generate(request, num_new_tokens)


async def start_together(starts: Sequence[Awaitable[EngineClient]]) -> list[EngineClient]:
    """Await the starts of all engines. If one fails or their values differ, close all and raise `StartupError`."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        clients = list(await asyncio.gather(*tasks))
        if len({client.info.numbers_digest for client in clients}) > 1:
            raise _DIFFERENT_VALUES
        return clients
    except BaseException:
        for task in tasks:
            task.cancel()
        for started in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(started, EngineClient):
                await started.close(0.0)
        raise


class JoinedProgress:
    """Reports the phase and share of the replica that is furthest behind, whenever they change."""

    def __init__(self, num_replicas: int, on_progress: OnProgress) -> None:
        self._on_progress = on_progress
        self._phases: list[str] = []  # ordered by first appearance
        # Phase index, fraction and detail of each replica.
        self._progress: list[tuple[int, float, str]] = [(-1, 0.0, "")] * num_replicas
        self._shown: tuple[int, float, str] | None = None

    def of(self, number: int) -> OnProgress:
        """Return the callback to which replica `number` reports its progress."""
        return partial(self._report, number)

    def _report(self, number: int, phase: str, fraction: float, detail: str = "") -> None:
        if phase not in self._phases:
            self._phases.append(phase)
        self._progress[number] = self._phases.index(phase), fraction, detail
        last = min(self._progress)
        if last[0] >= 0 and last != self._shown:
            self._shown = last
            self._on_progress(self._phases[last[0]], *last[1:])


def _no_replica() -> EngineDeadError:
    return EngineDeadError("No replica is running now.")


class _KnownAdapter(NamedTuple):
    digest: str
    directory: str


class Replicas:
    """Running replicas of one model, made by `start_engine`. All methods belong to one event loop."""

    def __init__(self, replicas: Sequence[Replica], prefixes: PrefixIndex) -> None:
        self.replicas = replicas
        self.prefixes = prefixes
        self.dead = asyncio.Event()  # all have ended; `exit_code` and `death_cause` describe the first permanent end
        self.lost = asyncio.Event()  # one replica has ended for good: the others should finish their requests
        self.exit_code: int | None = None
        self.death_cause: str | None = None
        self._ids = itertools.count(1)
        self._is_closing = False
        self._adapter_reads = WatchedReads()
        self._adapters: dict[str, _KnownAdapter] = {}  # LoRA adapters by name, for replicas that start again
        self._supervisors = [
            asyncio.create_task(self._supervise(replica), name=f"replica-{replica.number}") for replica in replicas
        ]

    # -- requests

    def new_request_id(self) -> int:
        return next(self._ids)

    def choose(self, request: Request, rank: int | None = None) -> ReplicaHandle:
        """Choose a replica for this request and others that share its prompt.

        `rank`: number of the replica if the caller has chosen it. Raises `EngineDeadError`, or `UnavailableError` if
        that replica is not alive.
        """
        loads = [replica.load if replica.is_alive else None for replica in self.replicas]
        if self._is_closing or not any(loads):
            raise EngineDeadError("The inference engine has stopped. No request can be served until it is restarted.")
        salt, adapter = request.cache_salt, self._adapters.get(request.adapter or "")
        if adapter is not None:
            salt = salt_with_adapter(salt, adapter.digest)
        num_cached = self.prefixes.num_cached(request.prompt_token_ids, salt)
        number = choose(loads, num_cached) if rank is None else rank
        if loads[number] is None:
            raise UnavailableError(
                f"Replica {number}, which the request selects, is not running now. Send the request again later, or "
                "let the server choose.",
                "replica_lost",
            )
        chosen = self.replicas[number]
        chosen.load.num_chosen += 1
        return ReplicaHandle(chosen, len(request.prompt_token_ids) - num_cached[number])

    # -- state

    @property
    def info(self) -> EngineInfo:
        """Facts that hold for every replica."""
        infos = [replica.client.info for replica in self.replicas]
        of_batch = next((info for info in infos if not info.batch_invariant), infos[0])
        of_ranks = next((info for info in infos if not info.rank_invariant), infos[0])
        return replace(
            infos[0],
            data_parallel_size=len(infos),
            num_blocks=min(info.num_blocks for info in infos),
            load_seconds=max(info.load_seconds for info in infos),
            rank_pids=tuple(itertools.chain.from_iterable(info.rank_pids for info in infos)),
            batch_invariant=of_batch.batch_invariant,
            batch_invariant_reason=of_batch.batch_invariant_reason,
            rank_invariant=of_ranks.rank_invariant,
            rank_invariant_reason=of_ranks.rank_invariant_reason,
        )

    @property
    def is_alive(self) -> bool:
        """Whether any replica serves."""
        return not self._is_closing and any(replica.is_alive for replica in self.replicas)

    @property
    def last_progress_age_s(self) -> float:
        """Seconds since any replica made progress. A replica that hangs is ended by its own watch."""
        ages_s = (replica.client.last_progress_age_s for replica in self.replicas if replica.is_alive)
        return min(ages_s, default=float("inf"))

    @property
    def num_open(self) -> int:
        return sum(replica.client.num_open for replica in self.replicas)

    # -- LoRA adapters

    async def add_adapter(self, name: str, directory: str) -> None:
        """Add an adapter on all live replicas, as `EngineClient.add_adapter` does, or on none if any of them fails.

        Replicas that start again load it before they get requests.
        """
        known = _KnownAdapter(await digest_of(name, directory, self._adapter_reads), directory)
        is_new = name not in self._adapters
        if is_new:
            self._adapters[name] = known
        adding = (client.add_known_adapter(name, *known) for client in self._live_clients())
        results = await asyncio.gather(*adding, return_exceptions=True)
        failures = [result for result in results if isinstance(result, BaseException)]
        refusals = [failure for failure in failures if not isinstance(failure, EngineDeadError)]
        if not refusals and len(failures) < len(results):
            held = self._adapters.get(name)
            if held is not None and held.digest == known.digest:  # nobody has removed or replaced it meanwhile
                self._adapters[name] = known  # perhaps in another directory
            return
        if is_new and self._adapters.get(name) is known:  # nobody has removed it meanwhile, or added another one
            await self.remove_adapter(name)
        raise (refusals or failures or [_no_replica()])[0]

    async def remove_adapter(self, name: str) -> int:
        """Forget an adapter on all live replicas, as `EngineClient.remove_adapter` does, and return the number of its
        requests that were open."""
        known = self._adapters.pop(name, None)
        removing = (client.remove_adapter(name) for client in self._live_clients())
        results = await asyncio.gather(*removing, return_exceptions=True)
        counts = [result for result in results if isinstance(result, int)]
        if not counts and known is None:
            raise next((result for result in results if isinstance(result, BaseException)), _no_replica())
        return sum(counts)

    async def list_adapters(self) -> list[AdapterInfo]:
        """Return all adapters with the state of the first live replica, and their requests on all replicas."""
        asking = (client.list_adapters() for client in self._live_clients())
        lists = [one for one in await asyncio.gather(*asking, return_exceptions=True) if isinstance(one, list)]
        counts = Counter[str]()
        for info in itertools.chain.from_iterable(lists):
            counts[info.name] += info.num_requests
        return [replace(info, num_requests=counts[info.name]) for info in lists[0]] if lists else []

    def _live_clients(self) -> list[EngineClient]:
        return [replica.client for replica in self.replicas if replica.is_alive]

    async def _equip(self, client: EngineClient) -> None:
        """Give a new engine the adapters that the others have, as far as it can load them.

        Adapters may be added, removed or replaced meanwhile: repeats until the engine's list shows no difference.
        """
        lost: set[tuple[str, _KnownAdapter]] = set()
        while client.info.max_loras:
            digests = {info.name: info.digest for info in await client.list_adapters()}
            wanted = {name: known for name, known in self._adapters.items() if (name, known) not in lost}
            stale = [name for name, digest in digests.items() if name not in wanted or wanted[name].digest != digest]
            missing = [name for name in wanted if name not in digests]
            if not stale and not missing:
                return
            for name in stale:
                await client.remove_adapter(name)
            for name in missing[:1]:  # a load takes long: look again after each
                try:
                    await client.add_known_adapter(name, *wanted[name])
                except (RequestError, UnavailableError) as error:
                    lost.add((name, wanted[name]))
                    logger.error('event=adapter_lost engine=%d name=%r cause="%s"', client.number, name, error)

    async def reset_prefix_cache(self) -> int:
        """Empty the prefix caches of all live replicas, and return how many blocks they had."""
        live = [replica.client for replica in self.replicas if replica.is_alive]
        return sum(await asyncio.gather(*(client.reset_prefix_cache() for client in live)))

    # -- the life of the replicas

    async def _supervise(self, replica: Replica) -> None:
        """Start `replica` again whenever it dies, and give it up if that fails for any reason."""
        try:
            cause = await self._restart_until_lost(replica)
        except Exception as error:  # our bug: unless caught, the replica would stay dead unnoticed
            logger.exception("event=replica_supervision_failed engine=%d", replica.number)
            cause = f"replica {replica.number} could not be supervised: {type(error).__name__}: {error}"
        if self._is_closing:
            return
        # This is the exit code of the death, so that a new start of the server may help.
        exit_code = replica.client.exit_code or EXIT_RANK_DIED
        if self.exit_code is None:
            self.exit_code, self.death_cause = exit_code, cause
            self.lost.set()
            logger.error('event=replica_not_restarted engine=%d cause="%s"', replica.number, cause)
        if not self.is_alive:
            self.dead.set()

    async def _restart_until_lost(self, replica: Replica) -> str:
        """Start `replica` again while another replica serves and it does not die too often. Return why this ended."""
        while True:
            await replica.died()
            self.prefixes.clear(replica.number)
            cause = replica.client.death_cause or "its process has ended"
            if self._is_closing or not self.is_alive:
                return cause
            if replica.dies_too_often:
                return f"replica {replica.number} died too often, most recently because {cause}"
            try:
                digest = self.replicas[replica.number - 1].client.info.numbers_digest
                await replica.restart(digest, self._equip)
            except (StartupError, OSError, FrameError) as error:  # OSError: it ended in the middle of a message
                return f"replica {replica.number} could not be started again: {error}"

    async def close(self, timeout_s: float = 10.0) -> None:
        """Stop all engines in parallel. Idempotent."""
        self._is_closing = True
        for supervisor in self._supervisors:
            supervisor.cancel()
        await asyncio.gather(*self._supervisors, return_exceptions=True)
        await asyncio.gather(*(replica.client.close(timeout_s) for replica in self.replicas))


async def start_engine(
    config: EngineConfig,
    on_progress: OnProgress,
    *,
    processes: Sequence[EngineProcess] = (),
    start_process: Callable[[], EngineProcess] | None = None,
) -> EngineClient | Replicas:
    """Start all replicas of `config` at the same time, and wait until all their ranks have loaded.

    `processes`: processes that were started before, one per replica, or none. `start_process`: starts another one.
    Raises `StartupError`.
    """
    worker = config.worker
    make = start_process or (lambda: EngineProcess(worker.ranks_per_node))
    given = list(processes) or [make() for _ in range(config.num_replicas)]
    if len(given) == 1:
        return await EngineClient.start(config, on_progress, process=given[0])
    free, progress = free_host_bytes(), JoinedProgress(len(given), on_progress)
    configs = [config.of_replica(number, free) for number in range(len(given))]
    prefixes = PrefixIndex(len(given), worker.block_size)

    async def start_again(number: int, num_starts: int) -> EngineClient:
        own = configs[number]
        if own.record_path is not None:  # the recording until the death is kept
            own = replace(own, record_path=f"{own.record_path}.{num_starts}")
        return await EngineClient.start(own, _silent, process=make(), on_blocks=partial(prefixes.apply, number))

    starts = [
        EngineClient.start(own, progress.of(number), process=process, on_blocks=partial(prefixes.apply, number))
        for number, (own, process) in enumerate(zip(configs, given, strict=True))
    ]
    try:
        clients = await start_together(starts)
    finally:
        for process in given:
            process.discard()
    return Replicas([Replica(number, client, start_again) for number, client in enumerate(clients)], prefixes)


def _silent(phase: str, fraction: float, detail: str = "") -> None:
    """Ignore the progress of a replica that starts again, since the others serve meanwhile."""
