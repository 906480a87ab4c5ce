"""Seconds of a step by the roofline model."""

from dataclasses import replace

import pytest

from oarlock.engine.simulated_ranks import Roofline, Speed, StepLoad
from oarlock.workers.capacity import RankWork


def test_the_roofline_reads_or_computes_whichever_takes_longer() -> None:
    work = RankWork(10**9, 1000, 1e9, 1e8, 10.0, 0, 0, 0)
    speed = Speed(bandwidth=1e10, ops=1e11, link=0.0, sum_s=0.0, step_s=0.001, is_shared=False)
    time = Roofline((work,), 1, speed)
    assert time.seconds(StepLoad(1, 1, 0, 0)) == pytest.approx(0.101)
    assert time.seconds(StepLoad(100, 1, 100, 5000)) == pytest.approx(0.001 + (1e11 + 1e8 + 5e4) / 1e11)
    recurrent = Roofline((replace(work, state_bytes=10**8),), 1, speed)
    assert recurrent.seconds(StepLoad(8, 8, 0, 0)) == pytest.approx(0.101 + 8 * 0.01), "each sequence has a state"
    shared = Roofline((work,), 2, replace(speed, is_shared=True))
    assert shared.seconds(StepLoad(1, 1, 0, 0)) == pytest.approx(0.201), "two ranks read through the same memory"
    sums = replace(work, sum_bytes=1000, num_sums=4)
    linked = Roofline((sums,), 2, replace(speed, link=1e6, sum_s=0.5))
    assert linked.seconds(StepLoad(1, 1, 0, 0)) == pytest.approx(0.101 + 4 * 0.5 + 0.001)
