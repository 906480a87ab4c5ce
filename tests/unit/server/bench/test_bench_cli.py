"""`oarlock bench` on the command line: every mistake is one line that names the field and one that says what to do."""

from __future__ import annotations

import math

import pytest

from server.entrypoints.arguments import Parser
from server.entrypoints.cli import main
from server.entrypoints.commands.bench import serve

URL = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("arguments", "code", "cause", "fix"),
    [
        ([], 2, "needs a measure", "serve, throughput, latency, compare"),
        (["serv"], 2, "oarlock bench serv", "oarlock bench serve"),
        (["xyz"], 2, "oarlock bench xyz", "throughput"),
        (["serve"], 2, "URL", "--help"),
        (["serve", URL, "--concurency", "4"], 2, "--concurency", "--concurrency"),
        (["serve", URL, "--concurrency", "0"], 2, "--concurrency: 0 is out of range: it has to be from 1", "--help"),
        (["serve", URL, "--concurrency", "x"], 2, "--concurrency: 'x' is not a whole number", "--help"),
        (["serve", URL, "--request-rate", "-1"], 2, "--request-rate: -1 is out of range: it has to be above 0", "--"),
        (["serve", URL, "--timeout", "inf"], 2, "--timeout: inf is out of range", "--help"),
        (["serve", URL, "--length-spread", "1"], 2, "--length-spread: 1 is out of range", "--help"),
        (["serve", URL, "--burstiness", "nan", "--request-rate", "1"], 2, "--burstiness: nan", "--help"),
        (["serve", URL, "--concurrency", "2", "--request-rate", "1"], 2, "--concurrency and --request-rate", "one of"),
        (["serve", URL, "--request-rate", "2", "--ramp", "1:2"], 2, "--request-rate and --ramp", "one of them"),
        (["serve", URL, "--burstiness", "2"], 2, "--burstiness is of the open loop", "--request-rate"),
        (["serve", URL, "--request-rate", "inf", "--duration", "3"], 2, "--duration", "--num-requests"),
        (["serve", URL, "--request-rate", "2", "--duration", "3", "--num-requests", "3"], 2, "--num-requests", "one"),
        (["serve", URL, "--ramp", "1"], 2, "--ramp 1: ", "--ramp 1:10"),
        (["serve", URL, "--ramp", "0:5"], 2, "above 0", "--ramp 1:10"),
        (["serve", URL, "--turns", "3"], 2, "--turns is of --workload multi-turn", "--workload multi-turn"),
        (["serve", URL, "--prefix-tokens", "3"], 2, "--prefix-tokens", "--workload shared-prefix"),
        (["serve", URL, "--workload", "trace"], 2, "needs a file", "--trace FILE"),
        (["serve", URL, "--workload", "trace", "--trace", "/no", "--ramp", "1:2"], 2, "--ramp", "--trace-speed"),
        (["serve", URL, "--workload", "trace", "--trace", "/no", "--duration", "2"], 2, "--duration", "--num-requests"),
        (["serve", URL, "--workload", "trace", "--trace", "/no"], 3, "/no cannot be read", "JSON lines"),
        (["serve", URL, "--workload", "multi-turn", "--prompt-form", "ids"], 2, "--prompt-form ids", "Leave it out"),
        (["serve", URL, "--endpoint", "chat", "--prompt-form", "ids"], 2, "--endpoint chat", "Leave it out"),
        (["serve", URL, "--goodput", "itl:5"], 2, "--goodput itl:5", "ttft, tpot, e2el"),
        (["serve", URL, "--goodput", "ttft:0"], 2, "above 0", "ttft:500"),
        (["serve", URL, "--goodput", "ttft"], 2, "--goodput ttft", "ttft:500"),
        (["serve", URL, "--extra-body", "{"], 2, "--extra-body is not JSON", '{"top_k": 5}'),
        (["serve", URL, "--extra-body", "[1]"], 2, "not a JSON object", '{"top_k": 5}'),
        (["serve", "127.0.0.1:8000"], 2, "URL is '127.0.0.1:8000'", "http://127.0.0.1:8000"),
        (["serve", URL, "--vocab-size", "3"], 2, "--vocab-size: 3 is out of range", "--help"),
        (["throughput", "a", "b"], 2, "Unexpected argument: b", "One MODEL"),
        (["throughput", "--num-request", "5"], 2, "--num-request", "--num-requests"),
        (["throughput", "--port", "5"], 2, "--port", "--help"),
        (["latency", "--batch-size", "0"], 2, "--batch-size: 0 is out of range", "--help"),
        (
            ["latency", "./no/such/dir/model"],
            3,
            "neither a directory, nor a GGUF file, nor a hub id",
            "hub ids look like",
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


def test_the_choices_of_the_command_line_are_those_of_the_code():
    from server.bench.client.server_probe import FORMS
    from server.bench.metrics import SLO_METRICS
    from server.bench.workload.workload import NAMES

    assert (serve._WORKLOADS, serve._FORMS, serve._SLO) == (NAMES, FORMS, SLO_METRICS)


@pytest.mark.parametrize("name", ["serve", "throughput", "latency", "compare"])
def test_every_measure_has_help(capsys, name):
    with pytest.raises(SystemExit) as end:
        main(["bench", name, "--help"])
    assert not end.value.code and f"oarlock bench {name}" in capsys.readouterr().out
