"""`oarlock verify` as a user runs it: a table and exit code 0 for a correct model, two lines for every mistake."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.e2e.running import DEMO, ROOT, command, environment
from tests.golden.tiny_models import make_tiny

ADAPTER = ROOT / "models" / "oarlock-demo-lora"


def verify(*arguments: str | int | Path, cwd: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("verify", *arguments), cwd=cwd, env=environment(OMP_NUM_THREADS="1", **variables), capture_output=True,
        text=True, timeout=240,
    )  # fmt: skip


@pytest.mark.soak
def test_a_small_model(tmp_path: Path) -> None:
    model = make_tiny(tmp_path, "qwen2", num_hidden_layers=2)
    result = verify(model, "--output", tmp_path / "report.json")
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "result: ok"
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ok"] and {entry["layer"] for entry in report["tensors"]} == {None, 0, 1}


@pytest.mark.soak
def test_the_demo_model_on_two_ranks(tmp_path: Path, foreign: Path) -> None:
    out = tmp_path / "report.json"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("import os\n\nfor line in file:\n")
    result = verify(DEMO, "-tp", 2, "--dtype", "float32", "--prompts", prompts, "--output", out, cwd=foreign)
    assert result.returncode == 0, result.stderr
    assert not (foreign / "it-ran").exists()
    lines = result.stdout.splitlines()
    assert lines[0].startswith(
        "oarlock-demo (Qwen2ForCausalLM), float32, KV cache in float32, tensor-parallel size 2: "
    )
    assert lines[2].split()[:2] == ["layer", "tensor"]
    assert [line.split()[0] for line in lines[4:12]] == [str(layer) for layer in range(8)]
    assert lines[-1] == "result: ok"
    assert "greedy completions: 24 tokens of 2 prompts equal transformers' generate" in lines
    assert "verify: transformers: every layer in float64" in result.stderr
    report = json.loads(out.read_text())
    assert report["ok"] and report["tensor_parallel_size"] == 2
    assert {entry["layer"] for entry in report["tensors"]} == {None, *range(8)}
    assert all(len(entry["ranks"]) == 2 for entry in report["tensors"])


@pytest.mark.soak
def test_the_adapter_of_the_demo_model(tmp_path: Path) -> None:
    """By its hub id, since the directory in the cache has the name of a commit."""
    out, cached, commit = tmp_path / "report.json", tmp_path / "models--owner--in-short", "0" * 40
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text(commit)
    shutil.copytree(ADAPTER, cached / "snapshots" / commit)
    result = verify(DEMO, "-tp", 2, "--lora", "owner/in-short", "--output", out, HF_HUB_CACHE=str(tmp_path))
    assert result.returncode == 0, result.stderr
    lines, report = result.stdout.splitlines(), json.loads(out.read_text())
    assert ", adapter owner/in-short: " in lines[0] and lines[-1] == "result: ok"
    assert report["adapter"] == "owner/in-short" and report["halves"]["compared"] == 16


@pytest.mark.slow
def test_an_adapter_that_cannot_be_verified(tmp_path: Path) -> None:
    for options, cause in (
        (["--lora", tmp_path / "nowhere"], "nowhere is neither a directory, nor a GGUF file, nor a hub id"),
        (["--lora", DEMO], "neither adapter_config.json nor a GGUF file"),
        (["--lora", ADAPTER, "-pp", 2], "only the ranks of one stage"),
    ):
        result = verify(DEMO, *options)
        assert result.returncode == 3 and cause in result.stderr.splitlines()[-2], result.stderr
        assert result.stderr.splitlines()[-1].startswith("fix: ")


@pytest.mark.soak
def test_rounded_weights(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    result = verify(DEMO, "-tp", 2, "--quantization", "int4", "--output", out)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("oarlock-demo (Qwen2ForCausalLM), int4 in ")
    losses = lines.index("layer  weights  hidden")
    assert [line.split()[0] for line in lines[losses + 1 : losses + 10]] == [*map(str, range(8)), "logits"]
    assert lines[-1] == "result: ok"
    report = json.loads(out.read_text())
    assert report["quantization"] == "int4"
    assert 0.08 < report["rounding_loss"]["layers"][0]["weights"] < 0.1


MISTAKES = {
    "wrong path": (["{folder}/nowhere/at/all"], "is neither a directory, nor a GGUF file, nor a hub id"),
    "no number": (["{model}", "-tp", "two"], "--tensor-parallel-size is 'two'"),
    "size that does not divide": (["{model}", "-tp", "3"], "tensor_parallel_size 3 does not fit this model"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_gets_two_lines(tmp_path: Path, name: str) -> None:
    words, cause = MISTAKES[name]
    result = verify(*[word.format(folder=tmp_path, model=DEMO) for word in words])
    assert result.returncode == 3, result.stderr
    lines = result.stderr.splitlines()
    assert len(lines) == 2, result.stderr
    assert lines[0].startswith("error: ") and cause in lines[0]
    assert lines[1].startswith("fix: ")
    assert result.stdout == ""
