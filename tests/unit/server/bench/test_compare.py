"""Comparisons: what the interval covers, by simulation, and the verdicts on results whose truth is known."""

from __future__ import annotations

import numpy as np
import pytest

from oarlock.base.errors import StartupError
from oarlock.server.bench.compare import (
    Verdict,
    _Run,
    as_text,
    block_length,
    compare,
    draw_blocks,
    ratio_interval,
    verdict,
)
from oarlock.server.bench.metrics import Result, Sample
from tests.unit.server.bench.runs import closed_loop, noisy


def run(seed, tpot=0.02, ttft=0.1, count=200, **more):
    random = np.random.default_rng(seed)
    return closed_loop(noisy(random, count, tpot), noisy(random, count, ttft), **more)


def verdicts(comparison):
    return {row.metric: row.verdict for row in comparison.rows}


@pytest.mark.slow
def test_a_faster_server_is_called_faster_in_every_figure():
    found = verdicts(compare(run(1), run(2, tpot=0.016, ttft=0.08)))
    assert {found[name] for name in ("request_throughput", "output_throughput", "ttft_ms mean", "tpot_ms p50")} == {
        Verdict.FASTER
    }
    back = verdicts(compare(run(2, tpot=0.016, ttft=0.08), run(1)))
    assert {back[name] for name in ("output_throughput", "ttft_ms mean", "e2el_ms p50", "itl_ms mean")} == {
        Verdict.SLOWER
    }


def test_equal_servers_show_no_difference():
    found = verdicts(compare(run(3), run(4)))
    assert found["output_throughput"] == found["ttft_ms mean"] == found["itl_ms p50"] == Verdict.NONE


def test_ratios_are_b_over_a():
    rows = {row.metric: row for row in compare(run(5), run(5, tpot=0.04)).rows}
    assert rows["tpot_ms mean"].ratio == pytest.approx(2)
    assert rows["tpot_ms mean"].low < 2 < rows["tpot_ms mean"].high
    assert rows["ttft_ms mean"].ratio == pytest.approx(1)


@pytest.mark.parametrize(("correlation", "length"), [(0.0, 6), (0.8, 20)])
@pytest.mark.slow
def test_intervals_cover_the_true_ratio(correlation, length):
    """150 pairs of runs of equal servers: how many 95 % intervals of the ratio of means hold 1.

    Where requests are related, blocks nearly keep the promise; single requests are far from it.
    """
    random = np.random.default_rng(6)
    count, pairs, held = 200, 150, {length: 0, 1: 0}
    for _ in range(pairs):
        values = [noisy(random, count, correlation=correlation) for _ in range(2)]
        for each in held:
            draws = [value[draw_blocks(count, each, 300, random)].mean(1) for value in values]
            ratio = values[1].mean() / values[0].mean()
            low, high = ratio_interval(*draws, ratio, count // each, 0.95)
            held[each] += low <= 1 <= high
    assert 0.90 <= held[length] / pairs <= 0.985
    if correlation:
        assert held[1] / pairs < 0.7


@pytest.mark.slow
def test_throughput_intervals_cover_the_true_ratio_in_a_closed_loop():
    held, pairs = 0, 50
    for pair in range(pairs):
        results = [run(1000 * side + pair, count=80, users=4) for side in (1, 2)]
        sides = [_Run(result.samples, result, seed) for seed, result in enumerate(results)]
        first, second = (result.summary["output_throughput"] for result in results)
        draws = [side.throughput("output_throughput") for side in sides]
        low, high = ratio_interval(*draws, second / first, sides[0].num_blocks, 0.95)
        held += low <= 1 <= high
    assert held / pairs >= 0.88


def test_blocks_are_consecutive_and_as_long_as_requests_run_together():
    drawn = draw_blocks(10, 3, 50, np.random.default_rng(0))
    assert drawn.shape == (50, 10)
    assert ((drawn[:, 1] - drawn[:, 0]) % 10 == 1).all() and ((drawn[:, 2] - drawn[:, 1]) % 10 == 1).all()
    assert block_length(1000, 32) == 32
    assert block_length(1000, 1) == 10
    assert block_length(100, 32) == 10
    assert block_length(5, 32) == 1


@pytest.mark.parametrize(
    ("low", "high", "higher_is_better", "expected"),
    [
        (1.1, 1.2, True, Verdict.FASTER),
        (1.1, 1.2, False, Verdict.SLOWER),
        (0.8, 0.9, True, Verdict.SLOWER),
        (0.8, 0.9, False, Verdict.FASTER),
        (0.9, 1.1, True, Verdict.NONE),
        (1.0, 1.1, False, Verdict.NONE),
    ],
)
def test_verdicts(low, high, higher_is_better, expected):
    assert verdict(low, high, higher_is_better=higher_is_better) is expected


def test_a_percentile_needs_values_beyond_it():
    found = verdicts(compare(run(7, count=100), run(8, count=100)))
    assert found["ttft_ms p90"] is not Verdict.TOO_FEW
    assert found["ttft_ms p99"] is Verdict.TOO_FEW
    tiny = compare(run(7, count=9), run(8, count=9))
    assert set(verdicts(tiny).values()) == {Verdict.TOO_FEW}
    assert all(row.low is None for row in tiny.rows)


def test_an_open_loops_throughput_is_not_judged():
    found = verdicts(compare(run(9, open_loop=True), run(10, open_loop=True)))
    assert found["request_throughput"] is Verdict.BY_ARRIVALS and found["ttft_ms mean"] is Verdict.NONE


@pytest.mark.slow
def test_differences_of_settings_and_failures_are_reported():
    failed = [Sample(0.0, 5, failure="timed out", detail="x")]
    other = run(11, failed=failed, prompts="shared-prefix", url="http://y")
    text = as_text(compare(run(12), other))
    assert "prompts is random in A, shared-prefix in B" in text
    assert "url" not in text
    assert "1 requests of B failed" in text


def test_results_that_cannot_be_compared():
    engine = Result("latency", {}, {}, series={"latency_ms": [1.0]})
    with pytest.raises(StartupError, match="latency"):
        compare(run(1, count=20), engine)
    with pytest.raises(StartupError, match="no completed"):
        compare(run(1, count=20), closed_loop([], [], failed=[Sample(0.0, 5, failure="x")], users=1))


@pytest.mark.slow
def test_gaps_of_nothing_have_no_ratio():
    """Chunks that arrive together: most gaps are 0, and some draws of requests have no other."""
    zero = run(13)
    for sample in zero.samples:
        sample.itl_s = [0.0] * 4
    zero.summary["itl_ms"] = dict.fromkeys(("mean", "std", "p50", "p90", "p99"), 0.0)
    comparison = compare(zero, run(14))
    row = next(row for row in comparison.rows if row.metric == "itl_ms p50")
    assert row.ratio is None and row.verdict is Verdict.ZERO and str(Verdict.ZERO) in as_text(comparison)


def test_results_of_the_engine():
    a = Result("throughput", {}, {}, series={"output_throughput": [100.0, 101, 99, 100, 102, 98]})
    b = Result("throughput", {}, {}, series={"output_throughput": [120.0, 121, 119, 120, 122, 118]})
    (row,) = compare(a, b).rows
    assert row.verdict is Verdict.FASTER and row.low < 1.2 < row.high
    c = Result("latency", {}, {}, series={"latency_ms": [120.0, 121, 119, 120, 122, 118]})
    d = Result("latency", {}, {}, series={"latency_ms": [100.0, 101, 99, 100, 102, 98]})
    assert compare(d, c).rows[0].verdict is Verdict.SLOWER
    few = Result("latency", {}, {}, series={"latency_ms": [100.0, 101]})
    assert compare(few, c).rows[0].verdict is Verdict.TOO_FEW
