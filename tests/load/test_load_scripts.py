"""The load-test scripts run, on a tiny model: their figures mean nothing here, but every one of them is there."""

import subprocess
import sys

import pytest

from oarlock.server.bench.serve import ServePlan, measure
from tests.e2e.running import ROOT
from tests.load import agreement
from tests.load.client_ceiling import PacedServer
from tests.unit.workers.kernel_levels import NO_KERNELS


def run_module(name, *arguments):
    command = [sys.executable, "-m", f"tests.load.{name}", *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.soak
def test_the_cost_of_forms():
    result = run_module("structured_cost", "--quick", "--rounds", 1, "--concurrency", 4, "--output-tokens", 12)
    assert result.stdout.count("of a free token's time") == 3


@pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")
@pytest.mark.soak
def test_attention_backends_side_by_side():
    printed = run_module("attention_bench", "--threads", 1, "--rounds", 1, "--only", "1 x 160").stdout
    assert "cpp" in printed and "torch" in printed


def test_the_ceiling_of_the_client():
    result = run_module("client_ceiling", "--quick")
    assert result.stdout.count("tokens/s") == 2


def test_times_shorter_than_the_pace_of_the_server_are_not_reported():
    with PacedServer(0.05, 0.01) as server:
        found = measure(ServePlan(server.url, concurrency=3, num_requests=6, output_tokens=11)).summary
    assert found["completed"] == 6 and found["output_tokens"] == 66
    assert found["ttft_ms"]["mean"] >= 50
    assert found["e2el_ms"]["mean"] >= 50 + 10 * 10
    assert found["itl_ms"]["mean"] == pytest.approx(found["tpot_ms"]["mean"])


def test_the_table_of_two_tools():
    pair = (dict.fromkeys(agreement.MEASURES, 2.0), dict.fromkeys(agreement.MEASURES, 4.0))
    lines = agreement.table([pair, pair], "other").splitlines()
    assert len(lines) == 2 + len(agreement.MEASURES)
    assert lines[2] == "| `request_throughput` | 2.00 | 4.00 | 0.500 (0.500 to 0.500) |"
