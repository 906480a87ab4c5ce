"""The measures against examples computed by hand, with vLLM's definitions."""

from __future__ import annotations

import math

import pytest

from oarlock.server.bench import metrics
from oarlock.server.bench.metrics import Cause, Sample


def sample(sent=0.0, ttft=1.0, gaps=(0.5, 0.5), tokens=3, **more):
    return Sample(sent, tokens, input_tokens=10, output_tokens=tokens, ttft_s=ttft, e2el_s=ttft + sum(gaps),
                  itl_s=list(gaps), **more)  # fmt: skip


def test_one_request():
    found = metrics.summarize([sample(ttft=1.0, gaps=(0.25, 0.75))], duration_s=4.0)
    assert found["ttft_ms"]["mean"] == 1000
    assert found["e2el_ms"]["p99"] == 2000
    assert found["tpot_ms"]["mean"] == pytest.approx(1000 * (2.0 - 1.0) / 2)
    assert found["itl_ms"] == pytest.approx({"mean": 500, "std": 250, "p50": 500, "p90": 700, "p99": 745})
    assert (found["input_tokens"], found["output_tokens"]) == (10, 3)
    assert found["request_throughput"] == 0.25
    assert found["output_throughput"] == 0.75
    assert found["total_token_throughput"] == 13 / 4
    assert "goodput" not in found


def test_tpot_is_per_request_and_itl_is_pooled():
    """Two tokens with a gap of 1 s, and three with gaps of 0.1 s: the mean of (1, 0.1), and of (1, 0.1, 0.1)."""
    found = metrics.summarize([sample(gaps=(1.0,), tokens=2), sample(gaps=(0.1, 0.1))], 1.0)
    assert found["tpot_ms"]["mean"] == pytest.approx(550)
    assert found["itl_ms"]["mean"] == pytest.approx(400)


def test_a_chunk_with_several_tokens_is_one_gap_but_all_its_tokens_count():
    found = metrics.summarize([sample(ttft=1.0, gaps=(0.9,), tokens=10)], 1.0)
    assert found["tpot_ms"]["mean"] == pytest.approx(100)
    assert found["itl_ms"]["mean"] == pytest.approx(900)


def test_an_answer_of_one_token_has_no_tpot():
    assert sample(gaps=(), tokens=1).tpot_s is None
    found = metrics.summarize([sample(gaps=(), tokens=1)], 1.0)
    assert found["tpot_ms"] is None and found["itl_ms"] is None
    assert found["ttft_ms"]["mean"] == 1000


def test_percentiles_are_interpolated():
    values = metrics.statistics_of(range(101))
    assert values == pytest.approx({"mean": 50, "std": 29.1547594742, "p50": 50, "p90": 90, "p99": 99})
    assert metrics.statistics_of([1.0, 2.0])["p90"] == pytest.approx(1.9)
    assert metrics.statistics_of([]) is None


def test_failed_requests_are_counted_and_left_out_of_every_figure():
    failed = Sample(0.0, 5, output_tokens=4, ttft_s=9.0, e2el_s=9.5, failure=str(Cause.ENDED_EARLY), detail="x")
    found = metrics.summarize([sample(), failed], 1.0)
    assert (found["completed"], found["failed"]) == (1, 1)
    assert found["ttft_ms"]["p99"] == 1000 and found["output_tokens"] == 3
    only = metrics.summarize([failed], 1.0)
    assert only["completed"] == 0 and only["ttft_ms"] is None and only["peak_concurrency"] == 0


def test_failures_by_cause_most_frequent_first_with_the_first_text():
    samples = [Sample(0, 1, failure="HTTP 429", detail="a"), Sample(0, 1, failure="timed out", detail="b")]
    samples += [Sample(0, 1, failure="timed out", detail="c"), sample()]
    found = metrics.failures(samples)
    assert list(found.items()) == [
        ("timed out", {"count": 2, "first": "b"}), ("HTTP 429", {"count": 1, "first": "a"}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        ({"ttft": 1000}, 2),  # a limit that is met exactly is met
        ({"ttft": 999}, 1),
        ({"ttft": 1000, "tpot": 499}, 1),
        ({"tpot": 1}, 1),  # one token: its TPOT counts as 0
        ({"e2el": 100}, 0),
    ],
)
def test_goodput_counts_requests_that_are_within_every_limit(slo, good):
    samples = [sample(), sample(ttft=0.5, gaps=(), tokens=1), sample(failure="timed out")]
    assert metrics.summarize(samples, 2.0, slo)["goodput"] == good / 2


def test_peak_concurrency_and_tokens_per_second():
    one, two, three = sample(sent=0.0), sample(sent=1.0), sample(sent=2.0)  # each takes 2 s
    assert metrics.peak_concurrency([one, two, three]) == 2  # the third begins as the first ends
    assert metrics.tokens_per_second([one], 3.0) == [0, 2, 1]  # at 1.0, 1.5 and 2.0 s
    assert metrics.tokens_per_second([one], 2.0) == [0, 3]  # the last token ends the run
    assert metrics.tokens_per_second([one, two], 4.0) == [0, 2, 3, 1]
    assert metrics.tokens_per_second([one], 2.0, 0.5) == [0, 0, 2, 4]
    assert metrics.tokens_per_second([], 3.0) == []


@pytest.mark.parametrize("duration", [0.3, 0.99, 1.0, 1.9, 2.0, 7.3])
def test_the_peak_is_never_below_the_mean(duration):
    """Chunks at an even pace to the end of the run, each with three tokens."""
    even = sample(ttft=duration / 20, gaps=(duration / 20,) * 19, tokens=60)
    found = metrics.summarize([even], duration)
    assert found["peak_output_throughput"] >= found["output_throughput"] * (1 - 1e-12)
    assert found["peak_output_throughput"] <= 60 / min(duration, 1.0)


def test_the_peak_is_the_best_second():
    burst = sample(sent=2.0, ttft=0.1, gaps=(0.1, 0.1), tokens=30)
    found = metrics.summarize([sample(ttft=0.5, gaps=(), tokens=1), burst], 4.0)
    assert found["peak_output_throughput"] == pytest.approx(30.0)
    assert metrics.summarize([sample(failure="timed out")], 4.0)["peak_output_throughput"] == 0.0


def test_answers_of_another_length_are_noticed():
    assert metrics.unasked_lengths([sample(), Sample(0, 5, output_tokens=3), sample(failure="timed out")]) == 1
    assert math.isnan(Sample(0, 5).ttft_s)
