"""Made-up results with known properties."""

from __future__ import annotations

import numpy as np

from oarlock.server.bench import metrics
from oarlock.server.bench.metrics import Result, Sample

TOKENS = 5
SETTINGS = {"url": "http://x", "model": "m", "load": "closed loop", "prompts": "random", "goodput": {}}
CLIENT = {"lag_ms": {"p50": 0.1, "p99": 0.4, "max": 1.0}, "cpu_share": 0.1}


def closed_loop(tpot_s, ttft_s, *, users=1, failed=(), open_loop=False, **settings) -> Result:
    """Requests with these TPOT and TTFT (arrays, one value each), sent by users one after the other."""
    clock, samples = np.zeros(users), []
    for tpot, ttft in zip(np.asarray(tpot_s), np.asarray(ttft_s), strict=True):
        user = int(clock.argmin())
        lasted = float(ttft + tpot * (TOKENS - 1))
        began = float(clock[user])
        samples.append(
            Sample(
                began, TOKENS, began if open_loop else None, 8, TOKENS, "usage", float(ttft), lasted,
                [float(tpot)] * (TOKENS - 1),
            )
        )  # fmt: skip
        clock[user] += lasted
    samples += failed
    summary = metrics.summarize(samples, float(clock.max()) or 1.0)
    return Result("serve", SETTINGS | settings, summary, samples, client=CLIENT)


def noisy(random, count, mean=0.02, correlation=0.0):
    """Positive values around `mean`, each related to the one before it: log-normal AR(1) with a deviation of 0.2."""
    steps = random.normal(0, 0.2 * np.sqrt(1 - correlation**2), count)
    level = np.empty(count)
    value = random.normal(0, 0.2)
    for at in range(count):
        value = correlation * value + steps[at]
        level[at] = value
    return mean * np.exp(level)
