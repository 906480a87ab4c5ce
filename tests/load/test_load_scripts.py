"""The load-test scripts run, on a tiny model: their figures mean nothing here, but every one of them is there."""

import subprocess
import sys

from tests.e2e.running import ROOT


def run_module(name, *arguments):
    command = [sys.executable, "-m", f"tests.load.{name}", *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    return result


def test_the_cost_of_forms():
    result = run_module("structured_cost", "--quick", "--rounds", 1, "--concurrency", 4, "--output-tokens", 12)
    assert result.stdout.count("of a free token's time") == 3
