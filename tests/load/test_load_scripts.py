"""The load-test scripts run, on a tiny model: their figures mean nothing here, but every one of them is there."""

import subprocess
import sys

import pytest

from oarlock.server.bench.plan import ServePlan
from oarlock.server.bench.serve import measure
from tests.e2e.running import ROOT
from tests.golden.tiny_models import make_tiny
from tests.load import agreement, sampling_bench
from tests.load.paced_server import PacedServer
from tests.unit.workers.kernel_levels import NO_KERNELS


def run_module(name, *arguments):
    command = [sys.executable, "-m", f"tests.load.{name}", *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    return result


def test_the_cost_of_forms():
    result = run_module("structured_cost", "--quick", "--rounds", 1, "--concurrency", 4, "--output-tokens", 12)
    assert result.stdout.count("of a free token's time") == 3


def test_what_grammars_cost_a_step():
    result = run_module("structured_step", "--device-ms", 1, "--sequences", 2, 3, "--rounds", 1, "--tokens", 20)
    assert result.stdout.count("events") == 2 * 4 and not result.stderr


@pytest.mark.soak
def test_what_pinning_changes():
    result = run_module("affinity_bench", "--quick", "--rounds", 1, "--concurrency", 2, "--output-tokens", 4)
    assert "1 rank(s), 2 client(s): none" in result.stdout and "auto / none" in result.stdout


@pytest.mark.soak
@pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")
def test_the_overhead_of_a_step():
    result = run_module("step_overhead", "--layers", 2, "--rounds", 1)
    assert "one call per half" in result.stdout and "separate operations" in result.stdout


@pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")
def test_what_slices_cost(tmp_path):
    model = make_tiny(tmp_path, "qwen2", head_dim=32, max_position_embeddings=4096)
    result = run_module("slice_cost", model, "--rounds", 1, "--threads", 1)
    assert "8 slices" in result.stdout and result.stdout.count("ratio") == 5


@pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")
def test_the_time_of_a_sum_over_ranks():
    result = run_module("collective_bench", "--floats", 64, "--rounds", 1)
    assert "python" in result.stdout and "kernels" in result.stdout


@pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")
def test_the_share_of_sampling_in_a_step():
    result = run_module("sampling_in_step", "--rows", 2, "--layers", 1, "--rounds", 1)
    assert result.stdout.count(" ms: ") == len(sampling_bench.cases(2))


def test_the_ceiling_of_the_client():
    result = run_module("client_ceiling", "--quick")
    assert result.stdout.count("tokens/s") == 2


def test_what_a_paced_server_cannot_undercut_is_not_reported():
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
