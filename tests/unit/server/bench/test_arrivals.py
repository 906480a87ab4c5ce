"""Times of arrival: their statistics with fixed seeds, and vLLM's scaling."""

from __future__ import annotations

import math

import numpy as np
import pytest

from oarlock.server.bench import workload

COUNT = 20_000


def gaps(times):
    return np.diff(times, prepend=0.0)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_intervals_have_the_mean_and_spread_of_a_gamma_distribution(burstiness):
    found = gaps(workload.constant_arrivals(COUNT, 8.0, burstiness, seed=1))
    assert found.mean() == pytest.approx(1 / 8, rel=1e-9)
    assert found.std() / found.mean() == pytest.approx(1 / math.sqrt(burstiness), rel=0.05)
    assert found.min() >= 0


def test_poisson_counts_vary_as_much_as_they_are_large():
    times = workload.constant_arrivals(COUNT, 10.0, 1.0, seed=2)
    counts = np.bincount(times.astype(int))[:-1]
    assert counts.mean() == pytest.approx(10, rel=0.02)
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.1)


def test_the_last_of_a_constant_rate_is_sent_at_count_over_rate():
    for seed in range(5):
        assert workload.constant_arrivals(50, 5.0, 1.0, seed)[-1] == pytest.approx(10.0)


def test_even_and_all_at_once():
    assert workload.constant_arrivals(4, 2.0, math.inf, 0) == pytest.approx([0.5, 1.0, 1.5, 2.0])
    assert workload.constant_arrivals(3, math.inf, 1.0, 0).tolist() == [0, 0, 0]


def test_seeds():
    assert workload.constant_arrivals(9, 1.0, 1.0, 3).tolist() == workload.constant_arrivals(9, 1.0, 1.0, 3).tolist()
    assert workload.constant_arrivals(9, 1.0, 1.0, 3).tolist() != workload.constant_arrivals(9, 1.0, 1.0, 4).tolist()


def test_a_ramp_goes_from_one_rate_to_the_other():
    even = gaps(workload.ramp_arrivals(101, 1.0, 11.0, math.inf, 0))
    assert 1 / even == pytest.approx(np.linspace(1, 11, 101))
    random = gaps(workload.ramp_arrivals(COUNT, 2.0, 20.0, 1.0, seed=5))
    tenth = COUNT // 10
    assert 1 / random[:tenth].mean() == pytest.approx(2.9, rel=0.1)
    assert 1 / random[-tenth:].mean() == pytest.approx(19.1, rel=0.1)


def test_how_many_requests_a_ramp_has_in_a_time():
    count = workload.ramp_count(60, 2.0, 20.0)
    assert workload.ramp_arrivals(count, 2.0, 20.0, math.inf, 0)[-1] == pytest.approx(60, rel=0.02)
    assert workload.ramp_count(10, 3.0, 3.0) == 30
    assert workload.ramp_count(0.001, 1.0, 2.0) == 1
