"""Counts what happens to requests: one function per event, each adds to an `EngineStats`. Times are in seconds."""

from engine.scheduler.kv_cache_manager import KVCacheManager
from engine.scheduler.request_queue import RequestQueue
from engine.scheduler.sequence import Sequence
from engine.stats import EngineStats
from engine.types import FinishReason


def record_arrival(stats: EngineStats, seq: Sequence) -> None:
    """`seq` was accepted and waits."""
    stats.num_accepted += 1
    stats.prompt_tokens += seq.num_prompt_tokens
    stats.request_prompt_tokens.observe(seq.num_prompt_tokens)


def record_first_scheduled(stats: EngineStats, seq: Sequence, now: float) -> None:
    """`seq` begins to run for the first time."""
    stats.queue_time_s.observe(now - seq.arrival_s)
    stats.prefix_cache_queries += seq.num_prompt_tokens
    stats.prefix_cache_hits += seq.num_cached_tokens


def record_first_token(stats: EngineStats, seq: Sequence, now: float) -> None:
    """The first token of `seq` was sampled."""
    assert seq.first_scheduled_s is not None
    seq.first_token_s = now
    stats.generation_tokens += 1
    stats.time_to_first_token_s.observe(now - seq.arrival_s)
    stats.prefill_time_s.observe(now - seq.first_scheduled_s)


def record_tokens(stats: EngineStats, num_tokens_after: dict[float, int]) -> None:
    """How many tokens one step sampled for sequences that had one before, by the time since that one.

    Most sequences of a step got their last token in the same step before, so that there are few different times.
    """
    for gap_s, num_tokens in num_tokens_after.items():
        stats.generation_tokens += num_tokens
        stats.inter_token_latency_s.observe(gap_s, num_tokens)


def record_finish(stats: EngineStats, seq: Sequence, reason: FinishReason, now: float) -> None:
    """`seq` has ended. Times of aborted and failed requests are left out: they do not measure the engine's speed."""
    stats.finished[reason.value] += 1
    if reason in (FinishReason.ABORT, FinishReason.ERROR):
        return
    stats.e2e_latency_s.observe(now - seq.arrival_s)
    stats.request_generation_tokens.observe(seq.num_generated_tokens)
    if seq.first_token_s is not None:
        stats.decode_time_s.observe(now - seq.first_token_s)
        if seq.num_generated_tokens > 1:
            stats.time_per_output_token_s.observe((now - seq.first_token_s) / (seq.num_generated_tokens - 1))


def set_gauges(stats: EngineStats, num_running: int, queue: RequestQueue, kv_cache_manager: KVCacheManager) -> None:
    """Set the gauges to the present state."""
    stats.num_requests_running = num_running
    stats.num_requests_waiting = len(queue) + queue.num_pending
    stats.num_waiting_tokens = queue.num_tokens + queue.num_pending_tokens
    stats.num_blocks_total = kv_cache_manager.num_total
    stats.num_blocks_free = kv_cache_manager.num_free
    stats.num_blocks_cached = kv_cache_manager.num_cached
    stats.num_blocks_held = kv_cache_manager.num_held
    stats.kv_cache_usage = kv_cache_manager.num_held / kv_cache_manager.num_total
