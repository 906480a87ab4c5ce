"""The model of a step over a link, and the benchmark beside it on a tiny model."""

import subprocess
import sys

import pytest

from benchmarks.link_cost import LinkFigures, last_stage_share, micro_batch, pp_step_s, tp_step_s
from tests.e2e.running import ROOT
from tests.multihost.hosts import why_not

SLOW = LinkFigures(round_trip_s=0.002, bytes_per_s=1e6)


def test_tensor_parallel_ranks_wait_for_two_messages_in_each_layer():
    assert tp_step_s(0.5, SLOW, layers=10, hidden_size=500, rows=1) == pytest.approx(0.5 + 20 * (0.001 + 0.002))
    assert tp_step_s(0.5, SLOW, layers=10, hidden_size=500, rows=8) == pytest.approx(0.5 + 20 * (0.001 + 0.016))


def test_stages_wait_for_one_message_and_the_answer():
    step_s = pp_step_s(0.5, SLOW, hidden_size=500, rows=4, num_batches=1, last_share=0.6)
    assert step_s == pytest.approx(0.5 + (0.001 + 0.004) + 0.001)
    assert [micro_batch(concurrency) for concurrency in (1, 2, 8)] == [1, 1, 4]


def test_two_micro_batches_take_turns_on_the_last_stage():
    """Messages on their way cost nothing meanwhile, until they take longer than a turn."""
    step_s = pp_step_s(0.5, SLOW, hidden_size=500, rows=4, num_batches=2, last_share=0.6)
    assert step_s == pytest.approx(2 * 0.6 * 0.5)
    slower = LinkFigures(round_trip_s=0.2, bytes_per_s=1e6)
    assert pp_step_s(0.5, slower, hidden_size=500, rows=4, num_batches=2, last_share=0.6) == pytest.approx(0.704)
    assert last_stage_share("0.5b") == pytest.approx(0.638, abs=0.001), "12 of 24 layers, and a head of 9"


@pytest.mark.soak
def test_the_benchmark_runs():
    if reason := why_not("relay"):
        pytest.skip(reason)
    short = ["--shape", "quick", "--rounds", "1", "--delays-ms", "0", "0.5", "--mbit", "100", "--concurrency", "2"]
    command = [sys.executable, "-m", "benchmarks.link_cost", *short, "--output-tokens", "64"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if line.startswith("| 0")]
    assert [row.split("|")[1].strip() for row in rows] == ["0 ms", "0.5 ms", "0.5 ms, 100 Mbit/s"]
