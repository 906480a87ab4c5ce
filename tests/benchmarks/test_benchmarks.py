"""The comparison runs, with our server, its engine alone and transformers on a tiny model; its result makes a page."""

import json
import subprocess
import sys

import pytest

from benchmarks import engine_step, page
from tests.e2e.running import ROOT
from tests.unit.workers.kernel_levels import NO_KERNELS

FIGURES = {"output_tokens_per_s", "decode_tokens_per_s", "ttft_ms", "tpot_ms", "itl_ms", "e2el_ms"}


def run_module(name, *arguments):
    command = [sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.soak
def test_ours_beside_transformers(tmp_path, monkeypatch):
    out = tmp_path / "result.json"
    short = ["--shape", "quick", "--rounds", 1, "--concurrency", 1, 2, "--input-tokens", 8, "--output-tokens", 8]
    flags = ["--systems", "oarlock", "engine", "transformers", "--threads", 1, "--first-token", 16, "--json", out]
    printed = run_module("peers", *short, *flags).stdout
    result = json.loads(out.read_text())
    assert set(result["systems"]) == {"oarlock", "engine", "transformers"}
    (turn,) = result["rounds"]
    assert list(turn["measures"]) == ["c=1", "c=2", "first token, 16"]
    for measured in turn["measures"].values():
        assert all(set(figures) >= FIGURES for figures in measured.values())
        assert all(figures["output_tokens_per_s"] > 0 for figures in measured.values())
    assert turn["measures"]["c=2"]["oarlock"]["output_tokens"] == 16
    assert turn["measures"]["c=2"]["oarlock"]["step_seconds"] > 0
    assert all(one["read_gb_s"] > 0 and min(one["gemm_gflops"].values()) > 0 for one in turn["ceilings"])
    assert "Oarlock divided by" in printed
    monkeypatch.setattr(page, "RESULTS", tmp_path / "results.json")
    assert page.take_in(out) == f"forms-{result['machine']['kind']}"  # as the shape is not the first
    assert "transformers `generate`" in page.forms()


@pytest.mark.slow
@pytest.mark.soak
def test_growth(tmp_path):
    out = tmp_path / "scaling.json"
    short = ["--shapes", "quick", "--dtypes", "float32", "--batch", 1, 4, "--length", 64, "--rounds", 1]
    printed = run_module("scaling", *short, "--input-tokens", 8, "--output-tokens", 8, "--json", out).stdout
    (model,) = json.loads(out.read_text())["models"]
    assert {name: set(ranks) for name, ranks in model["rounds"][0]["points"].items()} == {
        "batch 1": {"1", "2"},
        "batch 4": {"1", "2"},
        "length 64": {"1", "2"},
    }
    assert "sequences at a time" in printed and "tokens of prompt" in printed


def test_the_parts_of_an_engine_step(tmp_path):
    out = tmp_path / "result.json"
    printed = run_module("engine_step", "--sequences", 4, "--rounds", 1, "--tree", ROOT, "--json", out).stdout
    found = json.loads(out.read_text())["4"]
    assert all(set(rounds[0]) == set(engine_step.ALL) for rounds in found.values())
    assert printed.count("| this |") == 1


@pytest.mark.soak
def test_the_way_of_a_token(tmp_path):
    out = tmp_path / "result.json"
    printed = run_module("token_path", "--tokens", 24, "--functions", "--json", out).stdout
    found = json.loads(out.read_text())["this"]
    through = {
        "frontend": "server/llm/output_processor.py",
        "engine": "engine/scheduler/scheduler.py",
        "rank": "workers/runner/step.py",
    }
    assert set(found) == set(through)
    for process, file in through.items():
        calls = found[process]["functions"]
        assert any(name.startswith(f"{file}:") and count == pytest.approx(1, abs=0.1) for name, count in calls.items())
    assert "| this | all three |" in printed and "\nthis, rank, ours\n" in printed


def test_products(tmp_path):
    out = tmp_path / "products.json"
    short = ["--shape", "quick", "--rows", 1, 3, "--rounds", 1, "--seconds", 0.01, "--threads", 1]
    printed = run_module("products", *short, "--json", out).stdout
    (level,) = json.loads(out.read_text())["levels"]
    (turn,) = level["rounds"]
    assert list(turn["seconds"]) == ["1", "3"] and "torch" in level["systems"]
    for systems in turn["seconds"].values():
        assert list(systems) == level["systems"]
        for parts in systems.values():
            assert list(parts) == ["q, k, v", "attention out", "gate, up", "down", "head", "step"]
            assert min(parts.values()) > 0
    assert "of streaming read" in printed


@pytest.mark.soak
@pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")
def test_experts():
    printed = run_module("experts", "--shapes", "quick", "--rows", 1, 3, "--rounds", 1, "--threads", 1).stdout
    assert [line.split("|")[2:4] for line in printed.splitlines()[2:]] == [
        [f" {form} ", f" {rows} "] for form in ("bfloat16", "int8", "int4") for rows in (1, 3)
    ]
