"""`oarlock plan --simulate`: a trace through fleets of several sizes, and the smallest fleet within latency limits.

The time of a step comes from the roofline, or from measurements by `oarlock bench serve` (`--calibrate`). A trace has
the arrival time of each request, the lengths of its prompt and completion, and shared prefixes:

ours        {"arrival_s": 1.5, "prompt_tokens": 128, "output_tokens": 64}; with "prefix_id" and "prefix_tokens", the
            first tokens of prompts with the same id are the same; "prompt_token_ids" in place of "prompt_tokens"
Mooncake    {"timestamp": 1500, "input_length": 128, "output_length": 64, "hash_ids": [3, 7]}: ms, blocks of 512
            tokens (github.com/kvcache-ai/Mooncake)
Bailian     the same with "chat_id": seconds, blocks of 16 (github.com/alibaba-edu/qwen-bailian-usagetraces-anon) bench
the file that `oarlock bench serve --output` wrote
"""

import argparse
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oarlock.base.errors import StartupError
from oarlock.engine.config import EngineConfig
from oarlock.engine.fleet import FleetReport, ReplicaModel, TracedRequest, replica_model, simulate_fleet
from oarlock.engine.simulated_ranks import Measured, StepLoad, StepTime
from oarlock.server.bench import metrics as result
from oarlock.server.bench.metrics import Sample
from oarlock.server.bench.workload import BLOCK_TOKENS
from oarlock.server.cli.arguments import UsageError
from oarlock.server.cli.plan.layouts import Layout, layout
from oarlock.server.cli.plan.machine import Machine
from oarlock.server.cli.plan.report import aligned, rate
from oarlock.server.launch.banner import Counted
from oarlock.workers.preflight import OpenModel

_EXIT_CODE = 2
_ALL_UP_TO = 8  # sizes of a range that are all simulated; of a longer range, powers of two and sizes that --slo needs
_MOST = 1024  # replicas
_MEASURES, _PERCENTILES = ("ttft", "itl", "e2e"), (50, 95, 99)
_CALIBRATE_FIX = (
    "Give results of `oarlock bench serve --concurrency N --output FILE`, of a server like those to be simulated."
)
_BAILIAN_TOKENS = 16
_FORM = '{"arrival_s": 1.5, "prompt_tokens": 128, "output_tokens": 64}'
_TRACE_FIX = f"A line is such as {_FORM}, or of a trace of Mooncake or Bailian."


class _Run(NamedTuple):
    """Figures of one run, to which the time of a step is fitted."""

    users: float  # concurrent users
    gap_s: float  # median time between tokens
    first_s: float  # median time to the first token
    prompt: float  # tokens
    context: float  # tokens in the middle of a completion


def calibrated(files: Sequence[Path], estimate: StepTime) -> Measured:
    """Fit the time of a step to `files`: a straight line through their gaps by the number of users, and the first
    tokens of the run with the fewest users. With a single run, `estimate` gives the cost of one more user. Raises
    `StartupError`."""
    runs = sorted((_read_run(file) for file in files), key=lambda run: run.users)
    users, gaps_s = np.array([run.users for run in runs]), np.array([run.gap_s for run in runs])
    if users[-1] - users[0] > 0.5:
        row_s, step_s = (float(value) for value in np.polyfit(users, gaps_s, 1))
    else:
        one, two = (_estimated(estimate, count, runs[0].context) for count in (1.0, 2.0))
        row_s = (two - one) * gaps_s[0] / _estimated(estimate, users[0], runs[0].context)
        step_s = float(gaps_s[0]) - row_s * users[0]
    row_s = max(row_s, 0.0)
    step_s = max(step_s, 0.0)
    token_s = (runs[0].first_s - step_s) / runs[0].prompt
    if runs[0].first_s <= runs[0].gap_s:
        raise StartupError(
            "--calibrate: the first tokens came as fast as all others, so what a prompt takes cannot be told.",
            "Measure with longer prompts: --input-tokens 512.",
            _EXIT_CODE,
        )
    return Measured(step_s, token_s, row_s)


def _estimated(estimate: StepTime, users: float, context: float) -> float:
    return float(estimate.seconds(StepLoad(users, users, users * context, users * context)))


def _read_run(file: Path) -> _Run:
    try:
        found = result.read(file)
    except StartupError as error:
        raise StartupError(f"--calibrate: {error.cause}", _CALIBRATE_FIX, _EXIT_CODE) from None
    done: list[Sample] = [one for one in found.samples if one.failure is None and one.itl_s]
    if not done or not found.summary.get("duration_s"):
        raise StartupError(f"--calibrate {file}: no request of it has two tokens or more.", _CALIBRATE_FIX, _EXIT_CODE)
    gaps = np.concatenate([one.itl_s for one in done])
    return _Run(
        users=max(1.0, sum(one.e2el_s for one in done) / found.summary["duration_s"]),
        gap_s=float(np.median(gaps)),
        first_s=float(np.median([one.ttft_s for one in done])),
        prompt=float(np.mean([one.input_tokens for one in done])),
        context=float(np.mean([one.input_tokens + one.output_tokens / 2 for one in done])),
    )


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of `--slo`, for example `ttft_p99` of at most `seconds`."""

    measure: str
    percent: int
    seconds: float

    def holds(self, report: Any) -> bool:
        """Return whether a `FleetReport` is within the limit. Every request must have been served, too."""
        found = getattr(report, f"{self.measure}_s")
        value = 0.0 if found is None else getattr(found, f"p{self.percent}")
        return not report.refused + report.failed and value <= self.seconds


def parse_replicas(text: str | None) -> tuple[list[int], bool]:
    """Parse `--replicas`: the sizes, ascending, and whether intermediate sizes may be left out. Raises `UsageError`."""
    text = "1..8" if text is None else text
    fix = "Write a number, several or a range, such as --replicas 4, --replicas 1,2,8 or --replicas 1..64."
    match = re.fullmatch(r"(\d+)\.\.(\d+)", text)
    if match is not None:
        low, high = int(match[1]), int(match[2])
        if not 1 <= low <= high <= _MOST:
            raise UsageError(f"--replicas {text}: {low} to {high} is no range from 1 to {_MOST}.", fix)
        return list(range(low, high + 1)), True
    parts = text.split(",")
    if not all(re.fullmatch(r"\d{1,9}", part.strip()) for part in parts):
        raise UsageError(f"--replicas is {text!r}.", fix)
    sizes = sorted({int(part) for part in parts})
    if not 1 <= sizes[0] <= sizes[-1] <= _MOST:
        raise UsageError(f"--replicas {text}: not all are from 1 to {_MOST}.", fix)
    return sizes, False


def parse_slo(text: str | None) -> list[Limit]:
    """Parse `--slo`. Raises `UsageError`."""
    found = []
    for part in (text or "").split(",") if text is not None else []:
        match = re.fullmatch(r"\s*([a-z0-9]+)_p(\d+)\s*=\s*(\d+(?:\.\d+)?)\s*(ms|s)\s*", part)
        names = ", ".join(f"{name}_p{percent}" for name in _MEASURES for percent in _PERCENTILES)
        fix = f"Write NAME=TIME with s or ms, such as ttft_p99=1s,itl_p99=50ms; the names are {names}."
        if match is None:
            raise UsageError(f"--slo {text}: {part.strip()!r} is no limit.", fix)
        measure, percent, seconds = match[1], int(match[2]), float(match[3]) * (1e-3 if match[4] == "ms" else 1.0)
        if measure not in _MEASURES or percent not in _PERCENTILES:
            raise UsageError(f"--slo {text}: there is no measure {match[1]}_p{percent}.", fix)
        if seconds <= 0:
            raise UsageError(f"--slo {text}: {part.strip()} can never be held.", fix)
        found.append(Limit(measure, percent, seconds))
    return found


def run(
    arguments: argparse.Namespace,
    trace: Sequence[TracedRequest],
    config: EngineConfig,
    model: OpenModel,
    machine: Machine,
    best: Layout,
) -> tuple[str, dict[str, Any], int]:
    """Return text, JSON and the exit code. A replica has the layout of a replica of `best`, on its own devices or
    host."""
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
    """Reports by number of replicas, simulated on request."""

    def __init__(self, trace: Sequence[TracedRequest], model: ReplicaModel, routing: str) -> None:
        self._trace, self._model, self._routing = trace, model, routing
        self.reports: dict[int, FleetReport] = {}

    def report(self, size: int) -> FleetReport:
        if size not in self.reports:
            with Counted(f"{size} replica(s)", 100) as bar:

                def show(share: float) -> None:
                    bar.add(round(100 * share) - bar.done)

                self.reports[size] = simulate_fleet(self._trace, size, self._model, self._routing, show)
        return self.reports[size]


def run_sizes(
    sizes: Sequence[int], is_range: bool, limits: Sequence[Limit], report: Callable[[int], FleetReport]
) -> int | None:
    """Simulate, and return the smallest number of replicas within `limits`; None if there is none, or no limits.

    In a long range, powers of two are simulated, then sizes between the last that is not within the limits and the
    first that is, by bisection. This assumes that more replicas are not worse.
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
    """Return a table of the simulated fleets, by number of replicas."""
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
    """Return a duration as text: `0.0213` as `21.3 ms`."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 1000 else f"{seconds:,.0f} s"


def as_json(
    reports: Sequence[FleetReport], limits: Sequence[Limit], fewest: int | None, routing: str
) -> dict[str, Any]:
    """Return the simulated fleets as JSON: times in seconds, rates per second."""
    return {
        "routing": routing,
        "slo": [asdict(limit) for limit in limits],
        "fewest_replicas": fewest,
        "fleets": [asdict(one) | {"holds": all(limit.holds(one) for limit in limits)} for one in reports],
    }


def read_trace(file: Path) -> list[TracedRequest]:
    """Read the requests in the order of arrival, from time 0. Raises `StartupError` with the line that is wrong."""
    try:
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise _wrong(f"--simulate {file} cannot be read: {reason}.", "Name a file of JSON lines.") from None
    if _is_result(text):
        return _from_result(file)
    found: list[TracedRequest] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        one = _request(line, f"{file}:{number}")
        if found and one.at_s < found[-1].at_s:
            raise _wrong(
                f"{file}:{number}: the request came at {one.at_s:g} s, before the one above, at {found[-1].at_s:g} s.",
                "Sort the lines by time.",
            )
        found.append(one)
    if not found:
        raise _wrong(f"--simulate {file} has no request.", _TRACE_FIX)
    return _from_zero(found)


def _from_zero(found: Iterable[TracedRequest]) -> list[TracedRequest]:
    requests = list(found)
    began_s = requests[0].at_s
    return [
        TracedRequest(one.at_s - began_s, one.num_prompt_tokens, one.num_output_tokens, one.blocks, one.block_tokens)
        for one in requests
    ]


def _is_result(text: str) -> bool:
    return text.lstrip().startswith("{") and f'"format": "{result.FORMAT}"' in text[:400]


def _from_result(file: Path) -> list[TracedRequest]:
    """Read the requests of a result. Each arrives when it was due, or, in a closed loop, when it was sent."""
    try:
        samples = result.read(file).samples
    except StartupError as error:
        raise _wrong(error.cause, error.fix) from None
    done = [one for one in samples if one.failure is None and one.output_tokens]
    if not done:
        raise _wrong(f"--simulate {file}: none of its requests was answered.", "Name another result, or a trace.")
    at_s = [(one.sent_s if one.scheduled_s is None else one.scheduled_s, one) for one in done]
    at_s.sort(key=lambda pair: pair[0])
    return _from_zero(TracedRequest(when, one.input_tokens, one.output_tokens) for when, one in at_s)


def _request(line: str, place: str) -> TracedRequest:
    try:
        fields: Any = json.loads(line)
    except ValueError as error:
        raise _wrong(f"{place} is not JSON: {error}.", _TRACE_FIX) from None
    if not isinstance(fields, dict):
        raise _wrong(f"{place} is not a JSON object.", _TRACE_FIX)
    if "arrival_s" in fields:
        return _ours(fields, place)
    if "timestamp" not in fields:
        raise _wrong(f"{place} says neither arrival_s nor timestamp.", _TRACE_FIX)
    is_bailian = "chat_id" in fields
    at_s = _time(fields, "timestamp", place) * (1 if is_bailian else 1e-3)
    lengths = _count(fields, "input_length", place), _count(fields, "output_length", place)
    blocks = tuple(_whole_numbers(fields, "hash_ids", place))
    return TracedRequest(at_s, *lengths, blocks, _BAILIAN_TOKENS if is_bailian else BLOCK_TOKENS)


def _ours(fields: dict[str, Any], place: str) -> TracedRequest:
    at_s, output = _time(fields, "arrival_s", place), _count(fields, "output_tokens", place)
    if "prompt_token_ids" in fields:
        tokens = _whole_numbers(fields, "prompt_token_ids", place)
        if not tokens:
            raise _wrong(f"{place}: prompt_token_ids is empty.", _TRACE_FIX)
        return TracedRequest(at_s, len(tokens), output, tuple(tokens), 1)
    prompt = _count(fields, "prompt_tokens", place)
    if "prefix_id" not in fields:
        return TracedRequest(at_s, prompt, output)
    name = fields["prefix_id"]
    if isinstance(name, bool) or not isinstance(name, int) or name < 0:
        raise _wrong(f"{place}: prefix_id is {name!r}, not a whole number of at least 0.", _TRACE_FIX)
    return TracedRequest(at_s, prompt, output, (name,), _count(fields, "prefix_tokens", place))


def _time(fields: dict[str, Any], name: str, place: str) -> float:
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise _wrong(f"{place}: {name} is {value!r}, not a number of at least 0.", _TRACE_FIX)
    return float(value)


def _count(fields: dict[str, Any], name: str, place: str) -> int:
    value = fields.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _wrong(f"{place}: {name} is {value!r}, not a whole number of at least 1.", _TRACE_FIX)
    return value


def _whole_numbers(fields: dict[str, Any], name: str, place: str) -> list[int]:
    value = fields.get(name, [])
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise _wrong(f"{place}: {name} is not a list of whole numbers of at least 0.", "Correct the line.")
    return value


def _wrong(cause: str, fix: str) -> StartupError:
    return StartupError(cause, fix, _EXIT_CODE)
