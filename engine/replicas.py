"""Several engines with the interface of one: each request goes to the replica that `data_parallel/choice.py` names.

A replica whose engine dies is started again while the others serve. When that fails, or it dies too often, `lost` is
set: the server should let the others finish, and end. When no replica is alive, `dead` is set, as with one engine.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from oarlock.engine.client import EngineClient
from oarlock.engine.config import EngineConfig, OnProgress
from oarlock.engine.data_parallel.replica import (
    JoinedProgress,
    PrefixIndex,
    Replica,
    ReplicaHandle,
    choose,
    start_together,
)
from oarlock.engine.engine_process import EngineProcess
from oarlock.engine.errors import EXIT_RANK_DIED, EngineDeadError, StartupError, UnavailableError
from oarlock.engine.ipc.frames import FrameError
from oarlock.engine.preflight import free_host_bytes
from oarlock.engine.types import EngineInfo, Request

logger = logging.getLogger("oarlock.engine.replicas")


class Replicas:
    """Running replicas of one model, made by `start_engine`. All methods belong to one event loop."""

    def __init__(self, replicas: Sequence[Replica], prefixes: PrefixIndex) -> None:
        self.replicas = replicas
        self.prefixes = prefixes
        self.dead = asyncio.Event()  # all have ended; `exit_code` and `death_cause` say how the first one did for good
        self.lost = asyncio.Event()  # one replica has ended for good: the others should finish their requests
        self.exit_code: int | None = None
        self.death_cause: str | None = None
        self._ids = itertools.count(1)
        self._is_closing = False
        self._keepers = [asyncio.create_task(self._keep(one), name=f"replica-{one.number}") for one in replicas]

    # -- requests

    def new_request_id(self) -> int:
        return next(self._ids)

    def choose(self, request: Request, rank: int | None = None) -> ReplicaHandle:
        """Choose a replica for this request and those that share its prompt. `rank`: the number of the replica that the
        caller has chosen. Raises `EngineDeadError`, or `UnavailableError` when that replica is not alive."""
        loads = [one.load if one.is_alive else None for one in self.replicas]
        if self._is_closing or not any(loads):
            raise EngineDeadError("The inference engine has stopped. Nothing can be served until it is restarted.")
        num_cached = self.prefixes.num_cached(request.prompt_token_ids, request.cache_salt)
        number = choose(loads, num_cached) if rank is None else rank
        if loads[number] is None:
            raise UnavailableError(
                f"Replica {number}, which the request asks for, is not there now. Send it again, or leave the choice "
                "to the server.",
                "replica_lost",
            )
        chosen = self.replicas[number]
        chosen.load.num_chosen += 1
        return ReplicaHandle(chosen, len(request.prompt_token_ids) - num_cached[number])

    # -- state

    @property
    def info(self) -> EngineInfo:
        """Facts that hold for every replica."""
        infos = [one.client.info for one in self.replicas]
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
        return not self._is_closing and any(one.is_alive for one in self.replicas)

    @property
    def last_progress_age_s(self) -> float:
        """Seconds since any replica made progress. When another hangs, its own watch ends it."""
        return min((one.client.last_progress_age_s for one in self.replicas if one.is_alive), default=float("inf"))

    @property
    def num_open(self) -> int:
        return sum(one.client.num_open for one in self.replicas)

    async def reset_prefix_cache(self) -> int:
        """Empty the prefix caches of all live replicas; return how many blocks they had."""
        return sum(await asyncio.gather(*(one.client.reset_prefix_cache() for one in self.replicas if one.is_alive)))

    # -- the life of the replicas

    async def _keep(self, one: Replica) -> None:
        """Start `one` again whenever it dies; give it up when that fails, whatever the reason."""
        try:
            cause = await self._restart_until_lost(one)
        except Exception as error:  # a bug of ours: unless caught, the replica would stay dead unnoticed
            logger.exception("event=replica_failed engine=%d", one.number)
            cause = f"replica {one.number} could not be kept: {type(error).__name__}: {error}"
        if self._is_closing:
            return
        exit_code = one.client.exit_code or EXIT_RANK_DIED  # of the death: a new start of the server may mend it
        if self.exit_code is None:
            self.exit_code, self.death_cause = exit_code, cause
            self.lost.set()
            logger.error('event=replica_given_up engine=%d cause="%s"', one.number, cause)
        if not self.is_alive:
            self.dead.set()

    async def _restart_until_lost(self, one: Replica) -> str:
        """Start `one` again while another serves and it does not die too often. Returns why it is given up."""
        while True:
            await one.died()
            self.prefixes.clear(one.number)
            cause = one.client.death_cause or "its process has ended"
            if self._is_closing or not self.is_alive:
                return cause
            if one.dies_too_often:
                return f"replica {one.number} dies too often, at last because {cause}"
            try:
                await one.restart(self.replicas[one.number - 1].client.info.numbers_digest)
            except (StartupError, OSError, FrameError) as error:  # OSError: it ended in the middle of a message
                return f"replica {one.number} could not be started again: {error}"

    async def close(self, timeout_s: float = 10.0) -> None:
        """Stop all engines, side by side. Idempotent."""
        self._is_closing = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(one.client.close(timeout_s) for one in self.replicas))


async def start_engine(
    config: EngineConfig,
    on_progress: OnProgress,
    *,
    processes: Sequence[EngineProcess] = (),
    start_process: Callable[[], EngineProcess] | None = None,
) -> EngineClient | Replicas:
    """Start as many engines as `config` has replicas, all at once, and wait until every rank of all has loaded.

    `processes`: those that were started before, one for each replica, or none. `start_process` starts another one.
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
    """Ignore the progress of a replica that starts again: the others serve meanwhile."""
