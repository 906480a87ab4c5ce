"""The load-test scripts run, on a tiny model: their figures mean nothing here, but every one of them is there."""

import json
import subprocess
import sys

import pytest

from tests.e2e.running import ROOT, RunningServer
from tests.load import checkpoint, load_test
from tests.unit.workers.kernel_levels import NO_KERNELS


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return checkpoint.ensure(quick=True, folder=tmp_path_factory.mktemp("load"))


def run_module(name, *arguments, cwd=ROOT):
    command = [sys.executable, "-m", f"tests.load.{name}", *map(str, arguments)]
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    return result


def test_every_id_of_the_checkpoint_can_be_decoded(tiny):
    from transformers import AutoConfig, AutoTokenizer

    config, tokenizer = AutoConfig.from_pretrained(tiny), AutoTokenizer.from_pretrained(tiny)
    assert (config.tie_word_embeddings, len(tokenizer)) == (True, config.vocab_size)
    assert all(tokenizer.decode([number]) for number in range(config.vocab_size))


def test_the_checkpoint_is_made_once_and_always_the_same(tiny, tmp_path):
    before = (tiny / "model.safetensors").stat().st_mtime_ns
    assert checkpoint.ensure(quick=True, folder=tiny.parent) == tiny
    assert (tiny / "model.safetensors").stat().st_mtime_ns == before
    again = checkpoint.ensure(quick=True, folder=tmp_path)
    assert (again / "model.safetensors").read_bytes() == (tiny / "model.safetensors").read_bytes()


def test_the_true_shape_is_the_published_one():
    shape = checkpoint.TRUE_SHAPE
    assert shape["hidden_size"] % shape["num_attention_heads"] == 0
    embedding = shape["vocab_size"] * shape["hidden_size"]
    kv = shape["num_key_value_heads"] * shape["hidden_size"] // shape["num_attention_heads"]
    attention = 2 * shape["hidden_size"] ** 2 + 2 * shape["hidden_size"] * kv + shape["hidden_size"] + 2 * kv
    layer = attention + 3 * shape["hidden_size"] * shape["intermediate_size"] + 2 * shape["hidden_size"]
    parameters = embedding + shape["num_hidden_layers"] * layer + shape["hidden_size"]
    assert parameters == 494_032_768


def test_prompts_are_reproducible_and_hold_no_special_token():
    first = checkpoint.prompts(4, 16, 1024, seed=1)
    assert first == checkpoint.prompts(4, 16, 1024, seed=1) != checkpoint.prompts(4, 16, 1024, seed=2)
    assert all(257 <= number < 1024 for prompt in first for number in prompt)


def test_percentiles():
    values = load_test.summary([number / 1000 for number in range(101)])
    assert values == pytest.approx({"mean": 50, "p50": 50, "p90": 90, "p99": 99})
    assert load_test.summary([0.005]) == pytest.approx({"mean": 5, "p50": 5, "p90": 5, "p99": 5})


def test_tpot_leaves_the_first_token_out():
    assert load_test.Sample(output_tokens=5, ttft=1.0, e2el=3.0).tpot == pytest.approx(0.5)
    assert load_test.Sample(output_tokens=1, ttft=1.0, e2el=1.0).tpot is None


def test_the_baseline_alone(tiny):
    result = run_module("transformers_baseline", "--quick", "--model", tiny, "--threads", 1, "--batch", 1)
    lines = [json.loads(line) for line in result.stdout.splitlines()]
    assert [line["batch"] for line in lines] == [1, 4]
    assert all(line["output_tokens_per_s"] > 0 and line["tpot_ms"] > 0 for line in lines)


def test_the_closed_loop_alone(tiny, tmp_path):
    out = tmp_path / "reports.json"
    with RunningServer(tiny, "--max-model-len", 256, "--kv-cache-memory", "16MiB") as server:
        run_module("load_test", "--url", server.url, "--quick", "--json", out)
        counted = server.metrics()
    reports = json.loads(out.read_text())
    assert [(report["concurrency"], report["requests"]) for report in reports] == [(1, 2), (4, 8)]
    assert sum(report["output_tokens"] for report in reports) == 8 * 10 == counted["vllm:generation_tokens_total"]
    assert all(report["ttft_ms"]["p99"] >= report["ttft_ms"]["p50"] > 0 for report in reports)


@pytest.mark.slow
@pytest.mark.soak
def test_the_comparison(tmp_path):
    out = tmp_path / "result.json"
    result = run_module("compare", "--quick", "--json", out)
    written = json.loads(out.read_text())
    assert [row["concurrency"] for row in written["against_transformers"]] == [1, 4]
    assert [row["concurrency"] for row in written["across_ranks"]] == [1, 4]
    for row in [*written["against_transformers"], *written["across_ranks"]]:
        assert row["throughput_ratio"]["median"] > 0
    assert written["time_outside_steps"]["added_to_step"]["median"] > -0.5
    assert "out tok/s" in result.stdout


def test_chunks_are_timed_by_their_last_byte() -> None:
    pieces = [(1.0, b'data: {"a"'), (2.0, b': 1}\n\ndata: {"a": 2}\n\n: ping\n\nda'), (3.0, b"ta: [DONE]\n\n")]
    assert list(load_test.chunks_of(pieces)) == [(2.0, {"a": 1}), (2.0, {"a": 2})]


@pytest.mark.skipif(NO_KERNELS is not None, reason=f"no kernels here: {NO_KERNELS}")
def test_the_overhead_of_a_step():
    result = run_module("step_overhead", "--layers", 2, "--rounds", 1)
    assert "one call per half" in result.stdout and "separate operations" in result.stdout


def test_the_cost_of_forms():
    result = run_module("structured_cost", "--quick", "--rounds", 1, "--concurrency", 4, "--output-tokens", 12)
    assert result.stdout.count("of a free token's time") == 3
