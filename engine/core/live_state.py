"""Live state of one engine: its requests, a map of its KV blocks, the times of its steps. Bounded in size and cost."""

from collections.abc import Iterable
from itertools import chain, groupby, islice

from oarlock.engine.kv_cache.manager import KVCacheManager
from oarlock.engine.scheduler.scheduler import Scheduler
from oarlock.engine.scheduler.sequence import Sequence, Status
from oarlock.engine.stats import EngineState, KvState, OpenRequest, RequestHistory

MAX_CELLS = 4096
MAX_SLOWEST = 20


def live_state(scheduler: Scheduler, now: float) -> EngineState:
    """Take the state between two steps. `now`: the engine's clock."""
    stats, steps = scheduler.refresh_gauges(), scheduler.requests.log.steps
    return EngineState(
        running=stats.num_requests_running,
        waiting=stats.num_requests_waiting,
        kv=_kv_state(scheduler.kv_cache_manager),
        step=steps.times(),
        tokens_per_second=steps.token_rates(now, stats.generation_tokens),
        slowest=[_open_request(seq, now) for seq in islice(scheduler.requests.by_id.values(), MAX_SLOWEST)],
    )


def history(scheduler: Scheduler, request_id: int) -> RequestHistory | None:
    """History of a request that is open, or was one of the last to end."""
    seq = scheduler.requests.by_id.get(request_id)
    if seq is not None:
        queue = scheduler.requests.waiting if seq.status is Status.WAITING else ()
        position = next((place for place, one in enumerate(queue) if one is seq), None)
        return seq.timeline.history(seq.num_generated_tokens, position)
    timeline = scheduler.requests.log.ended.get(request_id)
    return None if timeline is None else timeline.history(timeline.output_tokens)


def _kv_state(manager: KVCacheManager) -> KvState:
    per_cell = -(-manager.num_total // MAX_CELLS)
    return KvState(
        block_size=manager.block_size,
        total=manager.num_total,
        held=manager.num_held,
        cached=manager.num_cached,
        free=manager.num_free,
        cells_of=per_cell,
        map=run_lengths(manager.states(per_cell)),
    )


def run_lengths(letters: Iterable[str]) -> str:
    """Run-length encoding: `hhhcc` becomes `h3c2`."""
    return "".join(chain.from_iterable((letter, str(sum(1 for _ in run))) for letter, run in groupby(letters)))


def _open_request(seq: Sequence, now: float) -> OpenRequest:
    return OpenRequest(
        request_id=seq.request_id,
        state="running" if seq.status is Status.RUNNING else "waiting",
        age_s=round(now - seq.timeline.arrival_s, 3),
        prompt_tokens=seq.num_prompt_tokens,
        cached_tokens=seq.timeline.cached_tokens,
        output_tokens=seq.num_generated_tokens,
    )
