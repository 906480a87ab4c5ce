"""Arrival times of an open loop's requests: Poisson, gamma or even arrivals at a constant or a growing rate.

As `get_request` of vllm/benchmarks/serve.py defines them: intervals are gamma-distributed with shape `burstiness` and
mean 1 / rate. A burstiness of 1 is a Poisson process, below 1 requests come in bursts, above 1 more evenly, and at
infinity evenly. A constant rate is scaled so that the last of n requests is sent at n / rate exactly.
"""

from __future__ import annotations

import math

import numpy as np


def constant(count: int, rate: float, burstiness: float, seed: int) -> np.ndarray:
    """Seconds from the start at which `count` requests are sent, at `rate` per second: shape [count], ascending."""
    if math.isinf(rate):
        return np.zeros(count)
    times = np.cumsum(_intervals(np.full(count, rate), burstiness, seed))
    return times * (count / rate / times[-1])


def ramp(count: int, first: float, last: float, burstiness: float, seed: int) -> np.ndarray:
    """Arrival times at a rate that changes from `first` to `last` in equal steps per request: shape [count].

    Unlike those of `constant`, they are not scaled to the mean duration, as in vLLM.
    """
    rates = first + (last - first) * np.arange(count) / max(count - 1, 1)
    return np.cumsum(_intervals(rates, burstiness, seed))


def ramp_count(seconds: float, first: float, last: float) -> int:
    """Number of requests of a ramp that take `seconds` on average, at least 1."""
    mean_interval = 1 / first if first == last else math.log(last / first) / (last - first)
    return max(1, round(seconds / mean_interval))


def _intervals(rates: np.ndarray, burstiness: float, seed: int) -> np.ndarray:
    if math.isinf(burstiness):
        return 1 / rates
    return np.random.default_rng(seed).gamma(burstiness, 1 / (rates * burstiness))
