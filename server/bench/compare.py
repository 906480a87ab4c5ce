"""Comparison of two results: the ratio of each figure, its confidence interval, and a verdict.

The interval covers variation within the runs. It cannot cover changes of the machine between them: alternate the runs
and compare several pairs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from statistics import NormalDist
from typing import Any

import numpy as np

from oarlock.base.errors import StartupError
from oarlock.server.bench.metrics import LATENCIES, Result, Sample, latencies_ms
from oarlock.server.bench.report import aligned

Statistic = Callable[[np.ndarray], np.ndarray]  # indices of requests, shape [draws, n] -> a figure per draw: [draws]
DRAWS = 2000
_DRAWS_AT_ONCE = 250  # draws, so that the arrays of indices stay small


def block_length(count: int, together: int) -> int:
    """Return the requests per block: at least the number that run together and n^(1/3), and never over a tenth of the
    run."""
    return max(1, min(max(together, round(count ** (1 / 3))), count // 10))


def draw_blocks(count: int, length: int, draws: int, random: np.random.Generator) -> np.ndarray:
    """Return the indices of `draws` resampled runs of `count` requests: shape [draws, count]."""
    blocks = -(-count // length)
    starts = random.integers(0, count, (draws, blocks, 1))
    return ((starts + np.arange(length)) % count).reshape(draws, -1)[:, :count]


def resampled(statistic: Statistic, count: int, length: int, random: np.random.Generator) -> np.ndarray:
    """Return the figure in each of `DRAWS` resampled runs: shape [DRAWS]."""
    parts = [statistic(draw_blocks(count, length, _DRAWS_AT_ONCE, random)) for _ in range(DRAWS // _DRAWS_AT_ONCE)]
    return np.concatenate(parts)


def ratio_interval(
    first: np.ndarray, second: np.ndarray, ratio: float, blocks: int, confidence: float
) -> tuple[float, float]:
    """Return the interval of second / first from the resampled figures of two independent runs: percentiles of their
    ratios.

    `ratio`: as measured; `blocks`: in the run with fewer blocks. Resampling k blocks shows (k - 1) / k of the variance,
    and k is small, so the interval is stretched to that of Student's t with k - 1 degrees of freedom.
    """
    tail = 50 * (1 - confidence)
    ends = np.percentile(second / first, [tail, 100 - tail])
    stretch = _student(confidence, blocks - 1) * math.sqrt(blocks / (blocks - 1)) if blocks > 1 else math.inf
    low, high = (ratio * math.exp(stretch * math.log(end / ratio)) for end in ends)
    return low, high


def _student(confidence: float, freedom: int) -> float:
    """Return the quantile of Student's t as a multiple of the normal one, by the expansion of Cornish and Fisher."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return 1 + (first + second) / z


_MIN_BEYOND = 5  # values that must be beyond a percentile for it to be meaningful
_MIN_REQUESTS = 10
_MIN_ROUNDS = 3
_STATISTICS = ("mean", "p50", "p90", "p99")
_HIGHER_IS_BETTER = ("request_throughput", "output_throughput", "tokens_per_second")
_MAY_DIFFER = frozenset({"url", "model"})  # settings of the two servers that are compared


class Verdict(StrEnum):
    FASTER = "faster"
    SLOWER = "slower"
    NONE = "no significant difference"
    TOO_FEW = "too few requests"
    ZERO = "too small to compare"  # gaps between chunks that arrived together
    BY_ARRIVALS = "determined by the arrival rate"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of A and B. `low` and `high`: the interval of `ratio`, B / A; None if there is none."""

    metric: str
    a: float
    b: float
    ratio: float | None
    low: float | None
    high: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class ResultComparison:
    rows: list[Row]
    notes: list[str]
    confidence: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compare(a: Result, b: Result, confidence: float = 0.95) -> ResultComparison:
    """Compare B with A. Raises `StartupError` if they cannot be compared."""
    if a.kind != b.kind:
        raise StartupError(
            f"A is a result of bench {a.kind}, B of bench {b.kind}.", "Compare two results of the same command."
        )
    rows = _serve_rows(a, b, confidence) if a.kind == "serve" else _series_rows(a, b, confidence)
    if not rows:
        raise StartupError("One of the results has no completed request.", "Measure again.")
    return ResultComparison(rows, _notes(a, b), confidence)


def as_text(comparison: ResultComparison) -> str:
    """Return the table and the notes."""
    percent = f"{comparison.confidence:.0%} interval"
    rows = [["", "A", "B", "B / A", percent, "B is"]]
    for row in comparison.rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.3f}"
        interval = "" if row.low is None or row.high is None else f"{row.low:.3f} to {row.high:.3f}"
        rows.append([row.metric, f"{row.a:.2f}", f"{row.b:.2f}", ratio, interval, str(row.verdict)])
    return "\n".join([aligned(rows), *(f"note: {note}" for note in comparison.notes)])


def _serve_rows(a: Result, b: Result, confidence: float) -> list[Row]:
    done = [[each for each in result.samples if each.failure is None] for result in (a, b)]
    if not all(done):
        return []
    pair = [_Run(samples, result, seed) for seed, (samples, result) in enumerate(zip(done, (a, b), strict=True))]
    open_loop = any(sample.scheduled_s is not None for samples in done for sample in samples)
    blocks = min(run.num_blocks for run in pair)
    rows = []
    for name in ("request_throughput", "output_throughput"):
        values = (a.summary[name], b.summary[name])
        if open_loop:
            rows.append(Row(name, *values, values[1] / values[0], None, None, Verdict.BY_ARRIVALS))
        else:
            draws = None if _too_few(pair) else [run.throughput(name) for run in pair]
            rows.append(_row(name, values, draws, blocks, confidence))
    for name in LATENCIES:
        for statistic in _STATISTICS:
            figures = [result.summary[f"{name}_ms"] for result in (a, b)]
            if any(found is None for found in figures):
                continue
            usable = not _too_few(pair) and all(run.has_enough(name, statistic) for run in pair)
            draws = [run.latency(name, statistic) for run in pair] if usable else None
            values = [found[statistic] for found in figures]
            rows.append(_row(f"{name}_ms {statistic}", values, draws, blocks, confidence))
    return rows


class _Run:
    """The completed requests of one run, in the order in which they were sent, ready to be resampled."""

    def __init__(self, done: Sequence[Sample], result: Result, seed: int) -> None:
        self._done = sorted(done, key=lambda sample: sample.sent_s)
        self._result = result
        self._length = block_length(len(done), result.summary["peak_concurrency"])
        self._random = np.random.default_rng(seed)  # a different seed for each run, because they are independent

    def __len__(self) -> int:
        return len(self._done)

    @property
    def num_blocks(self) -> int:
        return len(self._done) // self._length

    def has_enough(self, name: str, statistic: str) -> bool:
        """Return whether enough values are beyond a percentile. A gap counts like a request's figure."""
        if not statistic.startswith("p"):
            return True
        return len(latencies_ms(self._done, name)) * (1 - int(statistic[1:]) / 100) >= _MIN_BEYOND

    def throughput(self, name: str) -> np.ndarray:
        """Return the throughput, in a closed loop by Little's law: mean open requests times the rate of a single
        request.

        The number of open requests is kept as it was in the run.
        """
        gives = np.array([sample.output_tokens if "output" in name else 1 for sample in self._done], np.float64)
        takes = np.array([sample.e2el_s for sample in self._done])
        opened = takes.sum() / self._result.summary["duration_s"]
        return self._resampled(lambda at: opened * gives[at].sum(1) / takes[at].sum(1))

    def latency(self, name: str, statistic: str) -> np.ndarray:
        """Return a figure of a latency, in ms."""
        if name != "itl":
            done = [sample for sample in self._done if name != "tpot" or sample.tpot_s is not None]
            values = np.array(latencies_ms(done, name))
            return self._resampled(lambda at: _figure(values[at], statistic), len(values))
        gaps = [1e3 * np.array(sample.itl_s) for sample in self._done]
        if statistic == "mean":
            sums, counts = np.array([gap.sum() for gap in gaps]), np.array([len(gap) for gap in gaps])
            return self._resampled(lambda at: sums[at].sum(1) / counts[at].sum(1))
        return self._resampled(_pooled_percentile(gaps, int(statistic[1:])))

    def _resampled(self, statistic: Statistic, count: int | None = None) -> np.ndarray:
        return resampled(statistic, count or len(self._done), self._length, self._random)


def _pooled_percentile(gaps: Sequence[np.ndarray], percent: int) -> Statistic:
    """Return the percentile of the gaps of all drawn requests. Each gap has the weight of how often its request was
    drawn."""
    values = np.concatenate(gaps)
    owner = np.repeat(np.arange(len(gaps)), [len(gap) for gap in gaps])
    order = np.argsort(values)
    values, owner = values[order], owner[order]

    def figure(drawn: np.ndarray) -> np.ndarray:
        found = np.empty(len(drawn))
        for at, indices in enumerate(drawn):
            below = np.cumsum(np.bincount(indices, minlength=len(gaps))[owner])
            found[at] = values[np.searchsorted(below, below[-1] * percent / 100)]
        return found

    return figure


def _series_rows(a: Result, b: Result, confidence: float) -> list[Row]:
    """Return the rows for results of the engine: the mean of each figure over iterations, which are drawn one by
    one."""
    rows = []
    for name in a.series.keys() & b.series.keys():
        values = [np.array(result.series[name]) for result in (a, b)]
        random = np.random.default_rng(0)
        draws = [resampled(lambda at, v=v: v[at].mean(1), len(v), 1, random) for v in values]
        fewest = min(len(v) for v in values)
        usable = draws if fewest >= _MIN_ROUNDS else None
        rows.append(_row(name, [float(v.mean()) for v in values], usable, fewest, confidence))
    return sorted(rows, key=lambda row: row.metric)


def _figure(values: np.ndarray, statistic: str) -> np.ndarray:
    return values.mean(1) if statistic == "mean" else np.percentile(values, int(statistic[1:]), axis=1)


def _row(name: str, values: Sequence[float], draws: Sequence[np.ndarray] | None, blocks: int, confidence: float) -> Row:
    a, b = values
    if a <= 0 or b <= 0:
        return Row(name, a, b, None, None, None, Verdict.ZERO)
    ratio = b / a
    if draws is None:
        return Row(name, a, b, ratio, None, None, Verdict.TOO_FEW)
    if min(draw.min() for draw in draws) <= 0:
        return Row(name, a, b, ratio, None, None, Verdict.ZERO)
    low, high = ratio_interval(draws[0], draws[1], ratio, blocks, confidence)
    return Row(name, a, b, ratio, low, high, verdict(low, high, higher_is_better=name in _HIGHER_IS_BETTER))


def verdict(low: float, high: float, *, higher_is_better: bool) -> Verdict:
    """Return the verdict on B from the confidence interval of B / A."""
    if low <= 1 <= high:
        return Verdict.NONE
    return Verdict.FASTER if (low > 1) == higher_is_better else Verdict.SLOWER


def _too_few(pair: Sequence[_Run]) -> bool:
    return min(len(run) for run in pair) < _MIN_REQUESTS


def _notes(a: Result, b: Result) -> list[str]:
    found = []
    for name in sorted((a.settings.keys() | b.settings.keys()) - _MAY_DIFFER):
        if a.settings.get(name) != b.settings.get(name):
            found.append(f"the settings differ: {name} is {a.settings.get(name)} in A, {b.settings.get(name)} in B.")
    for letter, result in (("A", a), ("B", b)):
        failed = sum(each["count"] for each in result.failures.values())
        if failed:
            found.append(f"{failed} requests of {letter} failed and are excluded.")
        if result.is_interrupted:
            found.append(f"{letter} was interrupted.")
    return found
