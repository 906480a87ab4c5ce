"""`oarlock bench` on the command line: every mistake is one line that names the field and one that says what to do."""

from __future__ import annotations

import json
import math
import re

import pytest

from oarlock.server.bench.client import RequestForm
from oarlock.server.cli.arguments import Parser
from oarlock.server.cli.bench import serve, vllm_names
from oarlock.server.cli.main import main
from oarlock.server.cli.migrate.rows import parse

URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("arguments", "code", "cause", "fix"),
    [
        ([], 2, "needs a benchmark", "serve, throughput, latency, compare"),
        (["serv"], 2, "oarlock bench serv", "oarlock bench serve"),
        (["xyz"], 2, "oarlock bench xyz", "throughput"),
        (["serve", URL, "--concurency", "4"], 2, "--concurency", "--concurrency"),
        (["serve", URL, "--concurrency", "0"], 2, "--concurrency: 0 is out of range: it must be from 1", "--help"),
        (["serve", URL, "--concurrency", "x"], 2, "--concurrency: 'x' is not an integer", "--help"),
        (["serve", URL, "--request-rate", "-1"], 2, "--request-rate: -1 is out of range: it must be above 0", "--"),
        (["serve", URL, "--timeout", "inf"], 2, "--timeout: inf is out of range", "--help"),
        (["serve", URL, "--length-spread", "1"], 2, "--length-spread: 1 is out of range", "--help"),
        (["serve", URL, "--burstiness", "nan", "--request-rate", "1"], 2, "--burstiness: nan", "--help"),
        (["serve", URL, "--concurrency", "2", "--request-rate", "1"], 2, "--concurrency and --request-rate", "one of"),
        (["serve", URL, "--request-rate", "2", "--ramp", "1:2"], 2, "--request-rate and --ramp", "one of them"),
        (["serve", URL, "--burstiness", "2"], 2, "--burstiness applies to an open loop", "--request-rate"),
        (["serve", URL, "--request-rate", "inf", "--duration", "3"], 2, "--duration", "--num-requests"),
        (["serve", URL, "--request-rate", "2", "--duration", "3", "--num-requests", "3"], 2, "--num-requests", "one"),
        (["serve", URL, "--ramp", "1"], 2, "--ramp 1: ", "--ramp 1:10"),
        (["serve", URL, "--ramp", "0:5"], 2, "above 0", "--ramp 1:10"),
        (["serve", URL, "--turns", "3"], 2, "--turns applies to --workload multi-turn", "--workload multi-turn"),
        (["serve", URL, "--prefix-tokens", "3"], 2, "--prefix-tokens", "--workload shared-prefix"),
        (["serve", URL, "--workload", "trace"], 2, "needs a file", "--trace FILE"),
        (["serve", URL, "--workload", "trace", "--trace", "/no", "--ramp", "1:2"], 2, "--ramp", "--trace-speed"),
        (["serve", URL, "--workload", "trace", "--trace", "/no", "--duration", "2"], 2, "--duration", "--num-requests"),
        (["serve", URL, "--workload", "trace", "--trace", "/no"], 3, "/no cannot be read", "JSON lines"),
        (
            ["serve", URL, "--workload", "multi-turn", "--prompt-form", "ids"],
            2,
            "--prompt-form ids",
            "Leave --prompt-form out",
        ),
        (["serve", URL, "--endpoint", "chat", "--prompt-form", "ids"], 2, "--endpoint chat", "Leave --prompt-form out"),
        (["serve", URL, "--goodput", "itl:5"], 2, "--goodput itl:5", "ttft, tpot, e2el"),
        (["serve", URL, "--goodput", "ttft:0"], 2, "above 0", "ttft:500"),
        (["serve", URL, "--goodput", "ttft"], 2, "--goodput ttft", "ttft:500"),
        (["serve", URL, "--extra-body", "{"], 2, "--extra-body is not JSON", '{"top_k": 5}'),
        (["serve", URL, "--extra-body", "[1]"], 2, "not a JSON object", '{"top_k": 5}'),
        (["serve", "127.0.0.1:8000"], 2, "127.0.0.1:8000 is not the address", "http://127.0.0.1:8000"),
        (["serve", URL, "--vocab-size", "3"], 2, "--vocab-size: 3 is out of range", "--help"),
        (
            ["serve", "--dataset-path", "f", "--dataset-name", "sharegpt"],
            2,
            "--dataset-path, a flag of vllm",
            "--trace",
        ),
        (["serve", "--dataset-name", "sonnet"], 2, "--dataset-name sonnet, a flag of vllm", "--workload random"),
        (["serve", "--backend", "tgi"], 2, "--backend tgi", "vllm, openai"),
        (
            ["serve", "--backend", "openai", "--endpoint", "/v1/chat/completions"],
            2,
            "--endpoint /v1/chat/completions does not go with --endpoint completions",
            "Give --endpoint alone",
        ),
        (["serve", "--endpoint", "/v1/embeddings"], 2, "--endpoint /v1/embeddings", "/v1/completions"),
        (
            ["serve", "--max-concurrency", "4", "--request-rate", "2"],
            2,
            "--max-concurrency does not go with",
            "Leave out",
        ),
        (["serve", "--max_concurrency=0"], 2, "--concurrency: 0 is out of range", "--help"),
        (["serve", "--base-url", "http://a", "--host", "b"], 2, "named 2 times: http://b:8000, http://a", "Keep one"),
        (["serve", "--base-url", "a:8000"], 2, "a:8000 is not the address", "Write http://a:8000"),
        (["serve", "--percentile-metrics", "ttft,x"], 2, "--percentile-metrics ttft,x", "ttft, tpot, itl, e2el"),
        (["serve", "--metric-percentiles", "99.9"], 2, "--metric-percentiles 99.9", "50, 90, 99"),
        (["serve", "--backend"], 2, "--backend needs a value", "after"),
        (["serve", "--header", "A: secret"], 2, "error: --header, a flag of vllm bench", "OPENAI_API_KEY"),
        (["serve", "--result-dir", "d"], 2, "--result-dir", "--save-result"),
        (["serve", "--save-result", "--result-dir", "/dev/null/x"], 2, "--result-dir /dev/null/x", "another folder"),
        (["serve", "--ramp-up-strategy", "exponential"], 2, "exponential", "--ramp R1:R2"),
        (["serve", "--ramp-up-strategy", "linear"], 2, "--ramp :: ", "--ramp 1:10"),
        (["serve", "--plot-timeline"], 2, "--plot-timeline, a flag of vllm bench", "--html"),
        (["serve", "--temperature", "warm"], 2, "--temperature is 'warm'", "number"),
        (["serve", "--lora-assignment", "random"], 2, "--lora-assignment needs adapters", "--lora-modules"),
        (["serve", "--num-prompts"], 2, "--num-prompts needs a value", "after"),
        (["throughput", "a", "b"], 2, "Unexpected argument: b", "only one MODEL"),
        (["throughput", "--num-request", "5"], 2, "--num-request", "--num-requests"),
        (["throughput", "--port", "5"], 2, "--port", "--help"),
        (["latency", "--batch-size", "0"], 2, "--batch-size: 0 is out of range", "--help"),
        (
            ["latency", "./no/such/dir/model"],
            3,
            "neither a directory, nor a GGUF file, nor a hub id",
            "no/such/dir does not exist",
        ),
        (["compare", "/no/a.json"], 2, "B.json", "--help"),
        (["compare", "/no/a.json", "/no/b.json"], 3, "/no/a.json cannot be read", "--output"),
        (["compare", "/no/a.json", "/no/b.json", "--confidence", "1"], 2, "--confidence: 1 is out of range", "--help"),
        (["compare", "/no/a.json", "/no/b.json", "--confidence", "0"], 2, "--confidence 0", "0.95"),
    ],
)
def test_a_mistake_is_one_line_of_cause_and_one_of_fix(capsys, arguments, code, cause, fix):
    assert main(["bench", *arguments]) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2, lines
    assert lines[0].startswith("error: ") and cause in lines[0]
    assert lines[1].startswith("fix: ") and fix in lines[1]


def plan_of(*arguments):
    parser = Parser()
    serve.add_arguments(parser)
    return serve.make_plan(parser.parse_args([URL, *arguments]))


def test_flags_become_a_plan():
    plan = plan_of("--request-rate", "5", "--burstiness", "inf", "--goodput", "ttft:500", "tpot:50.5", "--seed", "3")
    assert (plan.request_rate, plan.burstiness, plan.seed) == (5, math.inf, 3)
    assert plan.goodput == {"ttft": 500, "tpot": 50.5}
    plan = plan_of("--ramp", "1:2.5", "--duration", "9", "--extra-body", '{"top_k": 2}', "--no-ignore-eos")
    assert (plan.ramp, plan.duration, plan.extra_body, plan.ignore_eos) == ((1, 2.5), 9, {"top_k": 2}, False)
    plan = plan_of("--workload", "shared-prefix", "--num-prefixes", "3", "--concurrency", "7")
    assert (plan.workload, plan.num_prefixes, plan.prefix_tokens, plan.concurrency) == ("shared-prefix", 3, 256, 7)


def test_conversations_use_the_adapters_in_turn_or_at_random():
    def models(*how):
        plan = plan_of("--lora-modules", "a", "b", "--lora-modules", "c", "--seed", "3", *how)
        form = RequestForm("base", adapters=plan.adapters)
        assert json.loads(form.body("x", 1))["model"] == "base"
        return [json.loads(form.body("x", 1, number))["model"] for number in range(90)]

    assert models("--lora-assignment", "round-robin") == ["a", "b", "c"] * 30
    assert models() == models("--lora-assignment", "random") and min(map(models().count, "abc")) > 15
    assert plan_of().adapters is None


def plan_of_vllm(*arguments):
    parser = Parser()
    serve.add_arguments(parser)
    words, notes = vllm_names.take_out(arguments)
    parsed = parser.parse_args(words)
    return serve.make_plan(parsed), notes, parsed.output


def test_flags_of_vllm_bench_become_a_plan(tmp_path):
    line = (
        "--backend vllm --model Qwen/Qwen3-0.6B --base-url http://h:9 --endpoint /v1/completions --dataset-name random "
        "--random-input-len 1024 --random-output-len 128 --random-range-ratio 0.2 --num-prompts 200 --request-rate inf "
        "--max-concurrency 16 --burstiness 1.0 --ignore-eos --seed 7 --percentile-metrics ttft,tpot,itl,e2el "
        "--metric-percentiles 50,99 --num-warmups 3 --temperature 0.5 --top-k 5 --goodput ttft:500 "
        f"--extra-body {{}} --tokenizer x --trust-remote-code --disable-tqdm --save-result --result-dir {tmp_path}/a"
    )
    plan, notes, output = plan_of_vllm(*line.split())
    assert (plan.url, plan.model, plan.endpoint) == ("http://h:9", "Qwen/Qwen3-0.6B", "completions")
    assert (plan.input_tokens, plan.output_tokens, plan.length_spread, plan.num_requests) == (1024, 128, 0.2, 200)
    assert (plan.concurrency, plan.request_rate, plan.seed, plan.warmup, plan.ignore_eos) == (16, None, 7, 3, True)
    assert (plan.extra_body, plan.goodput) == ({"temperature": 0.5, "top_k": 5}, {"ttft": 500})
    assert output.parent == tmp_path / "a" and output.parent.is_dir()
    assert output.name.startswith("vllm-infqps-concurrency16-Qwen3-0.6B-")
    assert [note.split(":")[0] for note in notes] == [
        "--percentile-metrics", "--metric-percentiles", "--tokenizer", "--trust-remote-code", "--burstiness",
        "--save-result",
    ]  # fmt: skip


def test_flags_of_vllm_bench_become_flags_of_ours():
    parser = Parser()
    serve.add_arguments(parser)
    for name, rows in parse(vllm_names.TABLE).items():
        for row in rows:
            assert row.ours in ("not needed", "no equivalent", "into URL") or row.ours.startswith(("--", "into --"))
            assert row.note.endswith(".") or row.ours != "no equivalent" or row.note.endswith("/health"), name
            for flag in re.findall("--[a-z-]+", row.ours):
                assert flag in parser._option_string_actions, (name, flag)


def test_other_forms_of_vllm_bench_become_a_plan():
    plan, notes, _ = plan_of_vllm("--host", "::1", "--port=81", "--backend", "openai-chat", "--request_rate", "4")
    assert (plan.url, plan.endpoint, plan.request_rate, notes) == ("http://[::1]:81", "chat", 4, [])
    plan, _, output = plan_of_vllm("--random-prefix-len", "32", "--served-model-name", "s", "--model", "m")
    assert (plan.url, plan.workload, plan.prefix_tokens, plan.model, output) == (
        "http://127.0.0.1:8000", "shared-prefix", 32, "s", None,
    )  # fmt: skip
    line = "--dataset-name prefix_repetition --prefix-repetition-num-prefixes 5 --prefix-repetition-suffix-len 9"
    plan, _, _ = plan_of_vllm(*line.split())
    assert (plan.workload, plan.num_prefixes, plan.input_tokens) == ("shared-prefix", 5, 9)
    plan, _, _ = plan_of_vllm(*["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "9"])
    assert plan.ramp == (1, 9)
    plan, _, _ = plan_of_vllm("--endpoint", "chat", "--logprobs", "2", "--extra-body", '{"top_k": 1}', "--top-k", "3")
    assert plan.extra_body == {"logprobs": True, "top_logprobs": 2, "top_k": 1}
    _, _, output = plan_of_vllm("--save-result", "--result-filename", "r.json")
    assert str(output) == "r.json"


def test_the_choices_of_the_command_line_match_the_code():
    from oarlock.server.bench.client import FORMS
    from oarlock.server.bench.metrics import LATENCIES, PERCENTILES, SLO_METRICS
    from oarlock.server.bench.workload import NAMES

    rows = parse(vllm_names.TABLE)
    assert rows["--percentile-metrics"][0].value == "|".join(LATENCIES) + ",…"
    for percentile in PERCENTILES:
        assert vllm_names.take_out(["--metric-percentiles", str(percentile)])[0] == []
    assert (serve._WORKLOADS, serve._FORMS, serve._SLO) == (NAMES, FORMS, SLO_METRICS)


@pytest.mark.parametrize("name", ["serve", "throughput", "latency", "compare"])
def test_every_measure_has_help(capsys, name):
    with pytest.raises(SystemExit) as end:
        main(["bench", name, "--help"])
    assert not end.value.code and f"oarlock bench {name}" in capsys.readouterr().out
