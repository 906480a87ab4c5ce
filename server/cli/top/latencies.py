"""Latencies, prefix hits and preemptions between two readings of `/metrics`, for `oarlock top`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_HISTOGRAMS = {"ttft_ms": "vllm:time_to_first_token_seconds", "itl_ms": "vllm:inter_token_latency_seconds"}
_COUNTERS = {
    "queries": "vllm:prefix_cache_queries_total",
    "hits": "vllm:prefix_cache_hits_total",
    "preemptions": "vllm:num_preemptions_total",
}


@dataclass(frozen=True, slots=True)
class Reading:
    """Sums since the server started, over all engines."""

    buckets: dict[str, dict[float, float]] = field(default_factory=dict)  # name -> upper limit (s) -> observations
    counters: dict[str, float] = field(default_factory=dict)


def read(text: str) -> Reading:
    """Read the text of `/metrics`. Raises `ValueError` for another text."""
    from prometheus_client.parser import text_string_to_metric_families

    buckets: dict[str, dict[float, float]] = {name: {} for name in _HISTOGRAMS}
    counters = dict.fromkeys(_COUNTERS, 0.0)
    of_bucket = {f"{metric}_bucket": name for name, metric in _HISTOGRAMS.items()}
    of_counter = {metric: name for name, metric in _COUNTERS.items()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if (name := of_bucket.get(sample.name)) is not None:
                limit = float(sample.labels["le"])
                buckets[name][limit] = buckets[name].get(limit, 0.0) + sample.value
            elif (name := of_counter.get(sample.name)) is not None:
                counters[name] += sample.value
    return Reading(buckets, counters)


def between(before: Reading, now: Reading) -> dict[str, Any]:
    """Percentiles in ms, the share of prompt tokens found in the prefix cache, and preemptions. None: nothing happened.

    If the server was started again in between, the figures are those since that start.
    """
    if any(now.counters[name] < before.counters.get(name, 0.0) for name in now.counters):
        before = Reading()
    found: dict[str, Any] = {}
    for name, buckets in now.buckets.items():
        old = before.buckets.get(name, {})
        new = {limit: count - old.get(limit, 0.0) for limit, count in sorted(buckets.items())}
        found[name] = {"p50": percentile(new, 0.5), "p90": percentile(new, 0.9)}
    change = {name: count - before.counters.get(name, 0.0) for name, count in now.counters.items()}
    found["prefix_hit_rate"] = round(change["hits"] / change["queries"], 4) if change["queries"] else None
    found["preemptions"] = int(change["preemptions"])
    return found


def percentile(buckets: dict[float, float], share: float) -> float | None:
    """Percentile in ms, interpolated within a bucket as Prometheus does. `buckets`: cumulative, by limit in s."""
    total = max(buckets.values(), default=0.0)
    if total <= 0:
        return None
    wanted, lower, below = share * total, 0.0, 0.0
    for limit, count in buckets.items():
        if count >= wanted:
            if limit == float("inf"):
                break  # the highest limit is all that is known
            part = (wanted - below) / (count - below) if count > below else 1.0
            return round(1e3 * (lower + part * (limit - lower)), 3)
        lower, below = limit, count
    return round(1e3 * lower, 3)
