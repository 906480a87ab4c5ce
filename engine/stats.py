"""Counters, gauges and histograms of the engine as plain data, sent to the server as JSON.

The server names and formats them for Prometheus. Knows no clock.
"""

import json
from bisect import bisect_left
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.types import FinishReason

_SECONDS = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
)
_SHORT_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3)
_LONG_SECONDS = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_ITERATION_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16_384)


@dataclass(slots=True)
class Histogram:
    """Counts per bucket; `counts[i]` holds values <= `bounds[i]`, the last one everything above. Not cumulative."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0
    count: int = 0

    def __post_init__(self) -> None:
        self.bounds = tuple(self.bounds)
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        """Count `value` as often as it was seen."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times
        self.count += times


def _seconds() -> Histogram:
    return Histogram(_SECONDS)


def _short_seconds() -> Histogram:
    return Histogram((*_SHORT_SECONDS, 0.5, 1.0, 2.5, 5.0, 10.0))


def _long_seconds() -> Histogram:
    return Histogram(_LONG_SECONDS)


def _tokens() -> Histogram:
    return Histogram(_TOKENS)


def _iteration_tokens() -> Histogram:
    return Histogram(_ITERATION_TOKENS)


@dataclass(slots=True)
class EngineStats:
    """One engine since its start. Gauges are set when a snapshot is taken, counters only grow."""

    state: str = "ready"  # ready | dead
    uptime_s: float = 0.0
    step_id: int = 0  # the last step that was begun
    # gauges
    num_requests_running: int = 0
    num_requests_waiting: int = 0
    num_waiting_tokens: int = 0
    kv_cache_usage: float = 0.0  # 0..1, share of blocks that running requests hold
    num_blocks_total: int = 0  # without the null block
    num_blocks_free: int = 0  # without content
    num_blocks_cached: int = 0  # held by no request, kept for prefix hits, evicted when needed
    num_blocks_held: int = 0
    # counters
    prefix_cache_queries: int = 0  # prompt tokens looked up
    prefix_cache_hits: int = 0  # prompt tokens found
    prompt_tokens: int = 0
    generation_tokens: int = 0
    num_preemptions: int = 0
    num_accepted: int = 0
    num_rejected: int = 0  # refused: request at fault (400) or queue full (429)
    num_errors: int = 0  # requests that failed by the engine's fault
    num_nonfinite: int = 0  # of these: the model's logits were not finite
    finished: dict[str, int] = field(default_factory=lambda: {reason.value: 0 for reason in FinishReason})
    # histograms
    queue_time_s: Histogram = field(default_factory=_long_seconds)
    time_to_first_token_s: Histogram = field(default_factory=_seconds)
    prefill_time_s: Histogram = field(default_factory=_long_seconds)
    decode_time_s: Histogram = field(default_factory=_long_seconds)
    e2e_latency_s: Histogram = field(default_factory=_long_seconds)
    inter_token_latency_s: Histogram = field(default_factory=_short_seconds)
    time_per_output_token_s: Histogram = field(default_factory=_short_seconds)  # of one request, mean after the first
    step_time_s: Histogram = field(default_factory=_short_seconds)
    iteration_tokens: Histogram = field(default_factory=_iteration_tokens)
    request_prompt_tokens: Histogram = field(default_factory=_tokens)
    request_generation_tokens: Histogram = field(default_factory=_tokens)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> "EngineStats":
        return EngineStats.from_dict(json.loads(text))

    def to_dict(self) -> dict[str, Any]:
        """A copy: later changes do not reach it."""
        return asdict(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> "EngineStats":
        fields: dict[str, Any] = {
            key: Histogram(**value) if _is_histogram(value) else value for key, value in data.items()
        }
        return EngineStats(**fields)


def _is_histogram(value: object) -> bool:
    return isinstance(value, dict) and "bounds" in value
