"""Counts the events of requests in an `EngineStats`, with one function per event. Times are in seconds."""

from collections.abc import Collection

import numpy as np

from oarlock.engine.scheduler.kv_cache_manager import KVCacheManager
from oarlock.engine.scheduler.request_queue import RequestQueue
from oarlock.engine.scheduler.sequence import Sequence
from oarlock.engine.stats import EngineStats
from oarlock.engine.types import FinishReason


def record_arrival(stats: EngineStats, seq: Sequence) -> None:
    """Count `seq`, which was accepted and waits."""
    stats.num_accepted += 1
    stats.prompt_tokens += seq.num_prompt_tokens
    stats.request_prompt_tokens.observe(seq.num_prompt_tokens)


def record_first_scheduled(stats: EngineStats, seq: Sequence, now: float) -> None:
    """Count `seq`, which begins to run for the first time."""
    stats.queue_time_s.observe(now - seq.arrival_s)
    stats.prefix_cache_queries += seq.num_prompt_tokens
    stats.prefix_cache_hits += seq.num_cached_tokens


def record_first_token(stats: EngineStats, seq: Sequence, now: float) -> None:
    """Count the first sampled token of `seq`."""
    assert seq.first_scheduled_s is not None
    seq.first_token_s = now
    seq.trace.got_first_token(now)
    stats.generation_tokens += 1
    stats.time_to_first_token_s.observe(now - seq.arrival_s)
    stats.prefill_time_s.observe(now - seq.first_scheduled_s)


def record_tokens(stats: EngineStats, since_s: np.ndarray) -> None:
    """Count the tokens that a step sampled for n sequences that had one before; `since_s`, float64 [n]: the time since.

    Most sequences of a step got their last token in the same step before, so that there are few different times.
    """
    stats.generation_tokens += len(since_s)
    if not len((since_s != since_s[0]).nonzero()[0]):
        stats.inter_token_latency_s.observe(float(since_s[0]), len(since_s))
        return
    for seconds, num_tokens in zip(*np.unique(since_s, return_counts=True), strict=True):
        stats.inter_token_latency_s.observe(float(seconds), int(num_tokens))


def record_tokens_of(stats: EngineStats, seq: Sequence, num_tokens: int, now: float) -> None:
    """Count `num_tokens` that a step sampled for `seq`, perhaps its first. They share the time since the one before."""
    last_s = seq.last_token_s
    if last_s is None:
        assert num_tokens == 1
        record_first_token(stats, seq, now)
    else:
        stats.generation_tokens += num_tokens
        stats.inter_token_latency_s.observe((now - last_s) / num_tokens, num_tokens)


def record_drafts(stats: EngineStats, num_drafts: int, num_accepted: int) -> None:
    """Count the drafts after the newest token of a sequence, and those of them that were right."""
    stats.num_drafts += 1
    stats.num_draft_tokens += num_drafts
    stats.num_accepted_draft_tokens += num_accepted


def record_finish(stats: EngineStats, seq: Sequence, reason: FinishReason, now: float) -> None:
    """Count the end of `seq`. Times of aborted and failed requests are left out: they do not measure speed."""
    stats.finished[reason.value] += 1
    if reason in (FinishReason.ABORT, FinishReason.ERROR):
        return
    stats.e2e_latency_s.observe(now - seq.arrival_s)
    if seq.pooling is None:
        stats.request_generation_tokens.observe(seq.num_generated_tokens)
    if seq.first_token_s is not None:
        stats.decode_time_s.observe(now - seq.first_token_s)
        if seq.num_generated_tokens > 1:
            stats.time_per_output_token_s.observe((now - seq.first_token_s) / (seq.num_generated_tokens - 1))


def set_loading(stats: EngineStats, loading: Collection[Sequence]) -> None:
    """Add the sequences that wait for files to be read."""
    stats.num_requests_loading = len(loading)
    stats.num_requests_waiting += len(loading)
    stats.num_waiting_tokens += sum(seq.num_prompt_tokens for seq in loading)


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
