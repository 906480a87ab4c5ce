"""The load-test scripts run, on a tiny model: their figures mean nothing here, but every one of them is there."""

import subprocess
import sys

import pytest

from tests.e2e.running import ROOT
from tests.unit.workers.kernel_levels import NO_KERNELS


def run_module(name, *arguments):
    command = [sys.executable, "-m", f"tests.load.{name}", *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    return result


def test_the_cost_of_forms():
    result = run_module("structured_cost", "--quick", "--rounds", 1, "--concurrency", 4, "--output-tokens", 12)
    assert result.stdout.count("of a free token's time") == 3


@pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")
def test_the_overhead_of_a_step():
    result = run_module("step_overhead", "--layers", 2, "--rounds", 1)
    assert "one call per half" in result.stdout and "separate operations" in result.stdout
