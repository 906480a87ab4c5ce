"""`oarlock plan --simulate`: a trace through fleets of several sizes, and the smallest that holds limits of latency."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from oarlock.engine.config import EngineConfig
from oarlock.engine.fleet import FleetReport, ReplicaModel, TracedRequest, replica_model, simulate_fleet
from oarlock.engine.preflight import OpenModel
from oarlock.server.cli.arguments import UsageError
from oarlock.server.cli.plan.calibrate import calibrated
from oarlock.server.cli.plan.flags import Limit, parse_replicas, parse_slo
from oarlock.server.cli.plan.layouts import Layout, layout
from oarlock.server.cli.plan.machine import Machine
from oarlock.server.cli.plan.table import aligned, rate

_ALL_UP_TO = 8  # so many sizes of a range are all simulated; of more, powers of two and what --slo asks for


def run(
    arguments: argparse.Namespace,
    trace: Sequence[TracedRequest],
    config: EngineConfig,
    model: OpenModel,
    machine: Machine,
    best: Layout,
) -> tuple[str, dict[str, Any], int]:
    """Text, JSON and the exit code. A replica is laid out as one of `best`, on devices or a host of its own."""
    tp, pp, _ = best.sizes
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": 1}
    replica = layout(model, machine, sizes)
    time = replica.time
    if time is None:
        raise UsageError("A simulation needs to know how fast memory is read.", "Give --bandwidth, or a GPU by name.")
    if arguments.calibrate is not None:
        time = calibrated(arguments.calibrate, time)
    spec, limits = model.spec, parse_slo(arguments.slo)
    fleets = Fleets(
        trace, replica_model(config, replica.capacity, spec.vocab_size, spec.longest_window, time), arguments.routing
    )
    numbers, is_range = parse_replicas(arguments.replicas)
    fewest = run_sizes(numbers, is_range, limits, fleets.report)
    reports = [fleets.reports[size] for size in sorted(fleets.reports)]
    span = f"{len(trace):,} requests in {duration(trace[-1].at_s)}; a replica: TP {tp} x PP {pp}"
    text = f"{span}\n\n{as_text(reports, limits, fewest, arguments.routing)}"
    found = as_json(reports, limits, fewest, arguments.routing)
    return text, found, 1 if limits and fewest is None else 0


class Fleets:
    """Reports by number of replicas, simulated when they are asked for."""

    def __init__(self, trace: Sequence[TracedRequest], model: ReplicaModel, routing: str) -> None:
        self._trace, self._model, self._routing = trace, model, routing
        self.reports: dict[int, FleetReport] = {}

    def report(self, size: int) -> FleetReport:
        if size not in self.reports:
            from tqdm import tqdm

            with tqdm(total=100, desc=f"{size} replica(s)", unit="%", disable=None, leave=False) as bar:

                def show(share: float) -> None:
                    bar.update(round(100 * share) - bar.n)

                self.reports[size] = simulate_fleet(self._trace, size, self._model, self._routing, show)
        return self.reports[size]


def run_sizes(
    sizes: Sequence[int], is_range: bool, limits: Sequence[Limit], report: Callable[[int], FleetReport]
) -> int | None:
    """Simulate; return the fewest replicas that hold `limits`, if there are limits and any does.

    Of a long range, powers of two are simulated, and those between the last that does not hold and the first that does,
    by halving: more replicas are taken not to be worse.
    """

    def holds(size: int) -> bool:
        found = report(size)
        return all(limit.holds(found) for limit in limits)

    if is_range and len(sizes) > _ALL_UP_TO:
        coarse = sorted({sizes[0], sizes[-1], *(1 << bit for bit in range(11) if sizes[0] <= 1 << bit <= sizes[-1])})
    else:
        coarse = list(sizes)
    held = [size for size in coarse if holds(size)]
    if not limits or not held:
        return None
    high = held[0]
    if is_range:
        low = max((size for size in coarse if size < high), default=high)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def as_text(reports: Sequence[FleetReport], limits: Sequence[Limit], fewest: int | None, routing: str) -> str:
    """Table of the simulated fleets, by number of replicas."""
    heads = ["replicas", "TTFT p50", "p95", "p99", "ITL p50", "p95", "p99", "E2E p50", "p95", "p99"]
    heads += ["tokens/s", "busy", "queue", "prefix hits", "refused"]
    rows = [heads + (["holds"] if limits else [])]
    for one in reports:
        cells = [f"{one.replicas}"]
        for quantiles in (one.ttft_s, one.itl_s, one.e2e_s):
            cells += ["-"] * 3 if quantiles is None else [duration(value) for value in asdict(quantiles).values()]
        cells += [rate(one.output_tokens_per_s), f"{one.utilisation:.0%}", f"{one.mean_waiting:.1f}"]
        cells += [f"{one.prefix_hit_rate:.0%}", f"{one.refused + one.failed:,}"]
        rows.append(cells + (["yes" if all(limit.holds(one) for limit in limits) else "no"] if limits else []))
    lines = aligned(rows)
    if limits:
        text = ", ".join(f"{limit.measure}_p{limit.percent} within {duration(limit.seconds)}" for limit in limits)
        answer = f"The fewest replicas that hold {text}: {fewest}." if fewest else f"No number of these holds {text}."
        lines += ["", answer]
    return "\n".join([*lines, f"Routing: {routing}. Every request but those refused was served in virtual time."])


def duration(seconds: float) -> str:
    """Duration as text: `0.0213` as `21.3 ms`."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def as_json(
    reports: Sequence[FleetReport], limits: Sequence[Limit], fewest: int | None, routing: str
) -> dict[str, Any]:
    """Simulated fleets as JSON: times in seconds, rates per second."""
    return {
        "routing": routing,
        "slo": [asdict(limit) for limit in limits],
        "fewest_replicas": fewest,
        "fleets": [asdict(one) | {"holds": all(limit.holds(one) for limit in limits)} for one in reports],
    }
