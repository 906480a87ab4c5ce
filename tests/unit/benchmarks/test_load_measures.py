"""The measures of the closed loop, from requests whose times are given."""

import pytest

from benchmarks import load
from benchmarks.load import Sample
from oarlock.server.bench import metrics


def test_percentiles():
    values = load.summary([number / 1000 for number in range(101)])
    assert values == pytest.approx({"mean": 50, "p50": 50, "p90": 90, "p99": 99})
    assert load.summary([0.005]) == pytest.approx({"mean": 5, "p50": 5, "p90": 5, "p99": 5})


def test_tpot_leaves_the_first_token_out():
    assert Sample(5, sent=10.0, times=[11.0, 13.0], ended=13.0).tpot == pytest.approx(0.5)
    assert Sample(1, sent=10.0, times=[11.0], ended=11.0).tpot is None


def test_decode_speed_counts_only_while_all_decode():
    early = Sample(5, sent=0.0, times=[1.0, 2.0, 3.0, 4.0, 5.0], ended=5.0)
    late = Sample(5, sent=0.0, times=[3.0, 4.0, 5.0, 6.0, 7.0], ended=7.0)
    assert load.decode_speed([early, late]) == pytest.approx(2.0)  # from 3 to 5, both a token a second
    assert load.decode_speed([early]) == pytest.approx(1.0)


def test_decode_speed_divides_tokens_evenly_among_pieces():
    pairs = Sample(6, sent=0.0, times=[1.0, 2.0, 3.0], ended=3.0)
    assert load.decode_speed([pairs]) == pytest.approx(2.0)


def test_there_is_no_decode_speed_where_requests_do_not_overlap():
    first, second = Sample(2, 0.0, [1.0, 2.0], 2.0), Sample(2, 0.0, [3.0, 4.0], 4.0)
    assert load.decode_speed([first, second]) is None
    assert load.decode_speed([Sample(1, 0.0, [1.0], 1.0)]) is None


def test_the_report_of_a_round():
    samples = [Sample(3, 0.0, [1.0, 2.0, 3.0], 3.0), Sample(3, 3.0, [4.0, 5.0, 6.0], 6.0)]
    found = load.report(samples, concurrency=1, duration=6.0)
    assert (found.requests, found.output_tokens, found.output_tokens_per_s) == (2, 6, 1.0)
    assert found.decode_tokens_per_s == pytest.approx(1.0)  # of the first request alone
    assert found.ttft_ms["p50"] == found.tpot_ms["p50"] == found.itl_ms["p99"] == pytest.approx(1000)
    assert found.e2el_ms["mean"] == pytest.approx(3000)


def test_an_answer_of_another_length_is_an_error():
    good = metrics.Sample(0.5, 3, output_tokens=3, ttft_s=1.0, e2el_s=2.0, itl_s=[0.5, 0.5])
    assert load._checked(good) == Sample(3, 0.5, [1.5, 2.0, 2.5], 2.5)
    for wrong in (
        metrics.Sample(0.5, 4, output_tokens=3, ttft_s=1.0, itl_s=[]),
        metrics.Sample(0.5, 3, output_tokens=3, ttft_s=1.0, counted_by="chunks"),
        metrics.Sample(0.5, 3, failure="HTTP 500", detail="no"),
    ):
        with pytest.raises(RuntimeError):
            load._checked(wrong)
