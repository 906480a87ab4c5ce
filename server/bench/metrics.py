"""The measures of a run, with the definitions of `vllm bench serve` (`calculate_metrics` in vllm/benchmarks/serve.py).

    TTFT   from sending a request to its first chunk
    TPOT   (E2EL - TTFT) / (output tokens - 1): one figure per request with two tokens or more
    ITL    the gap between a chunk and the next: every gap of every request
    E2EL   from sending a request to its last chunk

Only completed requests count. Output tokens are taken from the server's `usage`; percentiles are interpolated linearly.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np

from oarlock.base.errors import StartupError

PERCENTILES = (50, 90, 99)
LATENCIES = ("ttft", "tpot", "itl", "e2el")
SLO_METRICS = ("ttft", "tpot", "e2el")  # the measures with one figure per request


class Cause(StrEnum):
    """Cause of a failed request. A status other than 200 is a cause by itself: `HTTP 429`."""

    CONNECT = "connection failed"
    TIMEOUT = "timed out"
    ERROR_EVENT = "error event"
    ENDED_EARLY = "stream ended early"
    NO_CHUNK = "no chunk"
    MALFORMED = "malformed response"
    INTERRUPTED = "interrupted"
    PREVIOUS_TURN = "previous turn failed"


@dataclass(slots=True)
class Sample:
    """Figures of one request. Times in seconds; `sent_s` and `scheduled_s` count from the start of the run."""

    sent_s: float
    asked_tokens: int
    scheduled_s: float | None = None  # open loop: when it was due
    input_tokens: int = 0
    output_tokens: int = 0
    counted_by: str = "usage"  # "usage", or "chunks" if the server does not count
    ttft_s: float = math.nan
    e2el_s: float = math.nan  # time to the end, or until the request failed
    itl_s: list[float] = field(default_factory=list)
    failure: str | None = None
    detail: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; None for a completion of one token."""
        return (self.e2el_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def summarize(
    samples: Sequence[Sample], duration_s: float, slo_ms: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Return the figures of a run of `duration_s` seconds: latencies in ms, throughput per second. `slo_ms`: for
    goodput."""
    done = [sample for sample in samples if sample.failure is None]
    output = sum(sample.output_tokens for sample in done)
    total = output + sum(sample.input_tokens for sample in done)
    found: dict[str, Any] = {
        "completed": len(done),
        "failed": len(samples) - len(done),
        "duration_s": duration_s,
        "input_tokens": total - output,
        "output_tokens": output,
        "request_throughput": len(done) / duration_s,
        "output_throughput": output / duration_s,
        "total_token_throughput": total / duration_s,
        "peak_output_throughput": max(tokens_per_second(done, duration_s), default=0.0),
        "peak_concurrency": peak_concurrency(done),
    }
    if slo_ms:
        found["goodput"] = sum(meets_slo(sample, slo_ms) for sample in done) / duration_s
    for name in LATENCIES:
        found[f"{name}_ms"] = statistics_of(latencies_ms(done, name))
    return found


def latencies_ms(done: Sequence[Sample], name: str) -> list[float]:
    """Return every value of one measure over completed requests, in milliseconds."""
    if name == "itl":
        return [1e3 * gap for sample in done for gap in sample.itl_s]
    values = (getattr(sample, f"{name}_s") for sample in done)
    return [1e3 * value for value in values if value is not None]


def statistics_of(values: Sequence[float]) -> dict[str, float] | None:
    """Return mean, standard deviation and percentiles; None without values."""
    if not values:
        return None
    found = {"mean": float(np.mean(values)), "std": float(np.std(values))}
    return found | {f"p{percent}": float(np.percentile(values, percent)) for percent in PERCENTILES}


def meets_slo(sample: Sample, slo_ms: Mapping[str, float]) -> bool:
    """Return whether a completed request is within every limit. TPOT counts as 0 for a single token, as in vLLM."""
    return all(1e3 * (getattr(sample, f"{name}_s") or 0.0) <= limit for name, limit in slo_ms.items())


def chunk_times(sample: Sample) -> np.ndarray:
    """Return the arrival times of the chunks, in seconds since the start of the run: shape [chunks]."""
    return sample.sent_s + sample.ttft_s + np.concatenate([[0.0], np.cumsum(sample.itl_s)])


def tokens_per_second(done: Sequence[Sample], duration_s: float, at_least_s: float = 1.0) -> list[float]:
    """Return the output tokens per second in equal stretches of the run, each `at_least_s` long or a little longer.

    With equal stretches the best is never below the mean. A run shorter than two stretches is one, with the mean. A
    chunk counts as its share of the completion's tokens. vLLM counts chunks in whole seconds, and its last one is not
    full.
    """
    if not done:
        return []
    stretches = max(1, int(duration_s / at_least_s))
    width_s = duration_s / stretches
    times = np.concatenate([chunk_times(sample) for sample in done])
    chunks = [1 + len(sample.itl_s) for sample in done]
    weights = np.repeat([sample.output_tokens / count for sample, count in zip(done, chunks, strict=True)], chunks)
    bins = np.minimum((times / width_s).astype(np.int64), stretches - 1)  # the last chunk may end the run
    return [float(tokens) / width_s for tokens in np.bincount(bins, weights, stretches)]


def peak_concurrency(done: Sequence[Sample]) -> int:
    """Return the maximum number of open requests. A request that ends as another begins does not overlap it."""
    ends = [(sample.sent_s + sample.e2el_s, -1) for sample in done]
    level = highest = 0
    for _, change in sorted([(sample.sent_s, 1) for sample in done] + ends):
        level += change
        highest = max(highest, level)
    return highest


def failures(samples: Sequence[Sample]) -> dict[str, dict[str, Any]]:
    """Return cause -> number of requests, and the text of the first; most frequent first."""
    counts = Counter(sample.failure for sample in samples if sample.failure is not None)
    first = {sample.failure: sample.detail for sample in reversed(samples)}
    return {cause: {"count": count, "first": first[cause]} for cause, count in counts.most_common()}


def unasked_lengths(samples: Sequence[Sample]) -> int:
    """Return the number of completions whose length in tokens differs from the requested one."""
    return sum(sample.failure is None and sample.output_tokens != sample.asked_tokens for sample in samples)


FORMAT = "oarlock-bench-1"
_DIGITS = 6  # microseconds


@dataclass(slots=True)
class Result:
    """A run of `kind` serve, throughput or latency.

    `settings`: requested settings by name. `summary`: from `summarize`, or figures of the engine. `samples`: for
    `serve`, every request. `series`: for the other two, a figure's value in each iteration.
    """

    kind: str
    settings: dict[str, Any]
    summary: dict[str, Any]
    samples: list[Sample] = field(default_factory=list)
    series: dict[str, list[float]] = field(default_factory=dict)
    client: dict[str, Any] = field(default_factory=dict)
    is_interrupted: bool = False
    created: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @property
    def failures(self) -> dict[str, dict[str, Any]]:
        return failures(self.samples)

    def as_json(self) -> dict[str, Any]:
        """Return all data as JSON values. Unmeasured values are null."""
        return {
            "format": FORMAT,
            "kind": self.kind,
            "created": self.created,
            "interrupted": self.is_interrupted,
            "settings": self.settings,
            "summary": self.summary,
            "failures": self.failures,
            "client": self.client,
            "series": self.series,
            "requests": [_sample_json(sample) for sample in self.samples],
        }


def write(result: Result, file: Path) -> None:
    """Write the result as JSON. Raises `StartupError`."""
    write_text(file, json.dumps(result.as_json(), allow_nan=False) + "\n", "--output")


def write_text(file: Path, text: str, flag: str) -> None:
    """Write a report that `flag` asked for. Raises `StartupError`."""
    try:
        file.write_text(text, "utf-8")
    except OSError as error:
        raise StartupError(f"{flag} {file} cannot be written: {error.strerror}.", "Choose another file.") from None


def read(file: Path) -> Result:
    """Read a file that `write` made. Raises `StartupError`."""
    fix = "Give a file that `oarlock bench` wrote with --output."
    try:
        found: Any = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise StartupError(f"{file} cannot be read: {error}.", fix) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise StartupError(f"{file} is not a result of `oarlock bench` ({FORMAT}).", fix)
    try:
        return Result(
            kind=found["kind"],
            settings=found["settings"],
            summary=found["summary"],
            samples=[_sample(fields) for fields in found["requests"]],
            series=found["series"],
            client=found["client"],
            is_interrupted=found["interrupted"],
            created=found["created"],
        )
    except (KeyError, TypeError) as error:
        raise StartupError(f"{file} is damaged: {error!r}.", fix) from None


def _sample_json(sample: Sample) -> dict[str, Any]:
    return {
        "sent_s": _rounded(sample.sent_s),
        "scheduled_s": None if sample.scheduled_s is None else _rounded(sample.scheduled_s),
        "input_tokens": sample.input_tokens,
        "asked_tokens": sample.asked_tokens,
        "output_tokens": sample.output_tokens,
        "counted_by": sample.counted_by,
        "ttft_s": _rounded(sample.ttft_s),
        "e2el_s": _rounded(sample.e2el_s),
        "itl_s": [round(gap, _DIGITS) for gap in sample.itl_s],
        "failure": sample.failure,
        "detail": sample.detail,
    }


def _sample(fields: dict[str, Any]) -> Sample:
    unmeasured = {name: math.nan for name in ("ttft_s", "e2el_s") if fields[name] is None}
    values: dict[str, Any] = fields | unmeasured
    return Sample(**values)


def _rounded(value: float) -> float | None:
    return None if math.isnan(value) else round(value, _DIGITS)


def lateness_ms(samples: Sequence[Sample]) -> list[float]:
    """Return how many milliseconds after its due time each request of an open loop was sent."""
    return [1e3 * (each.sent_s - each.scheduled_s) for each in samples if each.scheduled_s is not None]
