"""Autoscaling policy: the number of replicas follows from the requests that wait in their queues.

Named by `autoscaling_config.policy` in the YAML.

Serve's own policy counts open requests; this one asks whether any of them wait, which is what their users feel.
"""

from __future__ import annotations

import math
import re
from typing import Any

WAITING, RUNNING, SLOTS = "waiting", "running", "slots"  # of `Replica.record_autoscaling_stats`


_GAUGE = re.compile(r"^vllm:num_requests_(waiting|running)(?:\{.*\})? (\S+)$", re.MULTILINE)


def desired_replicas(
    current: int, waiting: float, running: float, slots: float, waiting_per_replica: float, fill: float
) -> int:
    """More as soon as more than `waiting_per_replica` wait; fewer once all fit into fewer that are `fill` full.

    `waiting`, `running`: requests of all replicas together. `slots`: what one replica runs at a time.
    """
    if waiting > waiting_per_replica * current:
        return max(current + 1, math.ceil((running + waiting) / slots))
    return min(current, math.ceil((running + waiting) / (slots * fill)))


class QueueLength:
    """Serve calls it with its context; delays and limits of the YAML are applied by Serve."""

    def __init__(self, waiting_per_replica: float = 1.0, fill: float = 0.75) -> None:
        """`fill`: how full, of 1, replicas may be for one of them to be stopped."""
        if waiting_per_replica < 0 or not 0 < fill <= 1:
            raise ValueError(
                "error: policy_kwargs: waiting_per_replica must be at least 0, and fill above 0 and at most 1.\n"
                "fix: For example: {waiting_per_replica: 1, fill: 0.75}"
            )
        self._waiting_per_replica = waiting_per_replica
        self._fill = fill

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        current = context.current_num_replicas
        metrics = context.aggregated_metrics or {}
        slots = list(metrics.get(SLOTS, {}).values())
        if not current or not slots:  # none has said anything yet
            return context.target_num_replicas, {}
        waiting = sum(metrics.get(WAITING, {}).values()) + (context.total_queued_requests or 0.0)
        running = sum(metrics.get(RUNNING, {}).values())
        wanted = desired_replicas(
            current, waiting, running, sum(slots) / len(slots), self._waiting_per_replica, self._fill
        )
        return wanted, {}


def load_of(metrics: str) -> dict[str, float]:
    """The two gauges that the autoscaler reads, from the text of `/metrics`."""
    load = {WAITING: 0.0, RUNNING: 0.0}
    for name, value in _GAUGE.findall(metrics):
        load[name] += float(value)
    return load
