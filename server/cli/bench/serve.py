"""`oarlock bench serve URL`: drive any OpenAI-compatible server and measure latencies and throughput of its clients."""

from __future__ import annotations

import argparse
import json
import math
import sys
from typing import TYPE_CHECKING, Any

from oarlock.base.paths import expand
from oarlock.server.cli.arguments import Parser, UsageError, below_one, finite, positive, whole
from oarlock.server.cli.bench.vllm_names import take_out

if TYPE_CHECKING:  # modules that measure are imported when they run, so that help is quick
    from oarlock.server.bench.client import AssignedAdapters
    from oarlock.server.bench.metrics import Sample
    from oarlock.server.bench.serve import ServePlan

HELP = "load an OpenAI-compatible server and measure it as its clients see it"
EXAMPLE = "oarlock bench serve http://127.0.0.1:8000 --concurrency 8 --num-requests 200 --html report.html"
_URL = "http://127.0.0.1:8000"
_WORKLOADS = ("random", "shared-prefix", "multi-turn", "trace")
_ENDPOINTS = ("completions", "chat")
_FORMS = ("auto", "ids", "text")
_ASSIGNMENTS = ("random", "round-robin")
_SLO = ("ttft", "tpot", "e2el")
# Flags that only one workload reads: (flag, attribute, workload).
_OF_WORKLOAD = (
    ("--prefix-tokens", "prefix_tokens", "shared-prefix"),
    ("--num-prefixes", "num_prefixes", "shared-prefix"),
    ("--turns", "turns", "multi-turn"),
    ("--trace", "trace", "trace"),
    ("--trace-speed", "trace_speed", "trace"),
)
_EXIT_CODES = """exit codes:
  0  every request completed           2  wrong command line
  1  some requests failed              3  the server cannot be measured
  130  stopped by Ctrl-C, after printing the figures up to then

If the server requires an API key, set OPENAI_API_KEY."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXIT_CODES
    assert isinstance(parser, Parser)
    parser.rewrite = take_out
    parser.add_argument("url", metavar="URL", nargs="?", default=_URL, help=f"base URL of the server (default {_URL})")
    parser.add_argument("--model", metavar="NAME", help="default: the first that the server lists")
    parser.add_argument("--endpoint", choices=_ENDPOINTS, default=_ENDPOINTS[0], help="default completions")
    parser.add_argument(
        "--lora-modules", nargs="+", action="extend", metavar="NAME",
        help="LoRA adapters of the server; each conversation uses one of them instead of the model",
    )  # fmt: skip
    parser.add_argument(
        "--lora-assignment", choices=_ASSIGNMENTS, help="how --lora-modules are assigned (default random)"
    )
    _add_load(parser)
    _add_prompts(parser)
    group = parser.add_argument_group("requests")
    group.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
        help="generate exactly the requested tokens (default); --no- lets completions end early and does "
        "not send the field",
    )  # fmt: skip
    group.add_argument("--extra-body", metavar="JSON", help="additional fields of every request, as a JSON object")
    group.add_argument(
        "--timeout", type=finite, default=600.0, metavar="S", help="time limit of one request in seconds (default 600)"
    )
    group.add_argument(
        "--warmup", type=whole(0), default=1, metavar="N",
        help="requests before the run, not counted (default 1)",
    )  # fmt: skip
    group = parser.add_argument_group("results")
    group.add_argument(
        "--goodput", nargs="+", action="extend", metavar="NAME:MS",
        help="limits in ms, such as ttft:500 tpot:50 e2el:4000; goodput counts the requests within all of them",
    )  # fmt: skip
    group.add_argument(
        "--output", type=expand, metavar="FILE.json", help="file for the figures and every request, for `bench compare`"
    )
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")
    group.add_argument(
        "--html", type=expand, metavar="FILE.html", help="file for a page with charts, which needs no network"
    )


def _add_load(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("load: a closed loop of users, or an open loop with a rate")
    group.add_argument("--concurrency", type=whole(1, 65_536), metavar="N", help="users of the closed loop (default 1)")
    group.add_argument(
        "--request-rate", type=positive, metavar="R", help="open loop: arrivals per second; inf: all at once"
    )
    group.add_argument("--ramp", metavar="R1:R2", help="open loop whose rate changes from R1 to R2")
    group.add_argument(
        "--burstiness", type=positive, metavar="B",
        help="shape of the gamma-distributed intervals: 1 (default) is Poisson, lower is burstier, inf is even",
    )  # fmt: skip
    group.add_argument(
        "--num-requests", type=whole(1), metavar="N",
        help="number of requests, for multi-turn of conversations (default 100, or until --duration)",
    )  # fmt: skip
    group.add_argument("--duration", type=finite, metavar="S", help="seconds after which no request is started")
    group.add_argument("--seed", type=whole(0), default=0, metavar="N", help="seed of prompts and arrivals (default 0)")


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prompts")
    group.add_argument("--workload", choices=_WORKLOADS, default="random", help="kind of prompts (default random)")
    group.add_argument(
        "--input-tokens", type=whole(1), default=128, metavar="N", help="tokens of a prompt (default 128)"
    )
    group.add_argument(
        "--output-tokens", type=whole(1), default=64, metavar="N", help="tokens of a completion (default 64)"
    )
    group.add_argument(
        "--length-spread", type=below_one, default=0.0, metavar="X",
        help="lengths are uniform within N * (1 - X) and N * (1 + X) (default 0)",
    )  # fmt: skip
    group.add_argument(
        "--prompt-form", choices=_FORMS, default="auto",
        help="token ids, or words that are measured with the server first (default auto: ids if the server "
        "accepts them)",
    )  # fmt: skip
    group.add_argument(
        "--vocab-size",
        type=whole(64),
        metavar="N",
        help="vocabulary size, for random ids (default: as the server reports)",
    )
    group.add_argument(
        "--prefix-tokens", type=whole(1), metavar="N", help="shared-prefix: tokens of a prefix (default 256)"
    )
    group.add_argument(
        "--num-prefixes", type=whole(1), metavar="N", help="shared-prefix: number of prefixes (default 1)"
    )
    group.add_argument("--turns", type=whole(1), metavar="N", help="multi-turn: turns in a conversation (default 4)")
    group.add_argument(
        "--trace", type=expand, metavar="FILE.jsonl", help="trace: lines with timestamp (ms) and lengths"
    )
    group.add_argument("--trace-speed", type=finite, metavar="X", help="trace: replay speed (default 1)")


def run(arguments: argparse.Namespace) -> int:
    plan = make_plan(arguments)
    for note in arguments.notes:
        sys.stderr.write(f"note: {note}\n")
    from oarlock.server.bench import report
    from oarlock.server.bench.metrics import write, write_text
    from oarlock.server.bench.report import as_html
    from oarlock.server.bench.serve import measure
    from oarlock.server.launch.banner import CountedProgress

    schedule = plan.make_schedule()
    count = schedule.count if schedule.times_s is None else len(schedule.times_s)
    with CountedProgress(
        "requests", count and count * plan.turns_each, is_shown=False if arguments.disable_tqdm else None
    ) as bar:
        failed = 0

        def add(sample: Sample) -> None:
            nonlocal failed
            failed += sample.failure is not None
            bar.add(note=f"{failed} failed" if failed else "")

        result = measure(plan, add)
    print(report.as_text(result))
    if arguments.output is not None:
        write(result, arguments.output)
    if arguments.html is not None:
        write_text(arguments.html, as_html(result), "--html")
    if result.is_interrupted:
        return 130
    return 1 if result.summary["failed"] else 0


def make_plan(arguments: argparse.Namespace) -> ServePlan:
    """Return the arguments, checked. Raises `UsageError`, and `StartupError` for a trace that cannot be read."""
    _check_load(arguments)
    _check_workload(arguments)
    names = ("url", "model", "endpoint", "concurrency", "request_rate", "num_requests", "duration", "workload")
    names += (
        "input_tokens",
        "output_tokens",
        "length_spread",
        "prompt_form",
        "vocab_size",
        "timeout",
        "warmup",
        "seed",
    )
    values = {name: getattr(arguments, name) for name in names}
    for name in ("burstiness", "prefix_tokens", "num_prefixes", "turns", "trace_speed"):
        if (value := getattr(arguments, name)) is not None:
            values[name] = value
    values |= {
        "ignore_eos": arguments.ignore_eos,
        "extra_body": _extra(arguments.extra_body),
        "goodput": _slo(arguments.goodput),
        "ramp": None if arguments.ramp is None else _ramp(arguments.ramp),
        "adapters": _adapters(arguments),
    }
    from oarlock.server.cli.remote import base_of

    base_of(arguments.url)  # refuses an invalid address
    from oarlock.server.bench.serve import ServePlan
    from oarlock.server.bench.workload import read_trace

    return ServePlan(**values, trace=() if arguments.trace is None else read_trace(arguments.trace))


# ---------------------------------------------------------------------- checks of the arguments
def _check_load(arguments: argparse.Namespace) -> None:
    """Refuse flags that exclude each other, or that lack a flag they need."""
    given = [name for name in ("concurrency", "request_rate", "ramp") if getattr(arguments, name) is not None]
    if len(given) > 1:
        flags = " and ".join(f"--{name.replace('_', '-')}" for name in given)
        raise UsageError(
            f"{flags} exclude one another: a closed loop has users, an open loop has a rate.", "Give only one of them."
        )
    is_open = given and given[0] != "concurrency"
    if arguments.burstiness is not None and not is_open:
        raise UsageError(
            "--burstiness applies to an open loop, and no rate is given.",
            "Add --request-rate or --ramp, or leave --burstiness out.",
        )
    if arguments.request_rate == math.inf and arguments.duration is not None:
        raise UsageError("--duration needs a finite --request-rate.", "Give --num-requests instead.")
    if arguments.workload == "trace" and arguments.concurrency is None and arguments.duration is not None:
        raise UsageError(
            "--duration cannot be combined with the timestamps of a trace.", "Give --num-requests instead."
        )
    if is_open and arguments.duration is not None and arguments.num_requests is not None:
        raise UsageError(
            "--num-requests and --duration exclude one another in an open loop: with the rate, each "
            "determines the other.",
            "Give only one of them.",
        )


def _check_workload(arguments: argparse.Namespace) -> None:
    for flag, attribute, workload in _OF_WORKLOAD:
        if getattr(arguments, attribute) is not None and arguments.workload != workload:
            raise UsageError(
                f"{flag} applies to --workload {workload}, and this one is {arguments.workload}.",
                f"Add --workload {workload}, or leave the flag out.",
            )
    if arguments.workload == "trace":
        if arguments.trace is None:
            raise UsageError("--workload trace needs a file.", "Give one: --trace FILE.jsonl.")
        for name in ("request_rate", "ramp"):
            if getattr(arguments, name) is not None:
                flag = f"--{name.replace('_', '-')}"
                raise UsageError(
                    f"{flag} cannot be combined with --workload trace, whose timestamps are in the file.",
                    "Leave the flag out; --trace-speed changes the pace, --concurrency replays in a closed loop.",
                )
    if arguments.workload == "multi-turn" and arguments.prompt_form == "ids":
        raise UsageError(
            "--prompt-form ids cannot be combined with --workload multi-turn, which sends text.",
            "Leave --prompt-form out.",
        )
    if arguments.endpoint == "chat" and arguments.prompt_form == "ids":
        raise UsageError(
            "--prompt-form ids cannot be combined with --endpoint chat, which sends text.", "Leave --prompt-form out."
        )


def _adapters(arguments: argparse.Namespace) -> AssignedAdapters | None:
    names, how = arguments.lora_modules, arguments.lora_assignment
    if names is None:
        if how is not None:
            raise UsageError("--lora-assignment needs adapters.", "Add --lora-modules NAME …, or leave it out.")
        return None
    from oarlock.server.bench.client import AssignedAdapters

    return AssignedAdapters(tuple(names), how != "round-robin", arguments.seed)


def _slo(limits: list[str] | None) -> dict[str, float]:
    found: dict[str, float] = {}
    for text in limits or ():
        name, colon, limit = text.partition(":")
        fix = f"Write NAME:MILLISECONDS, such as ttft:500; the names are {', '.join(_SLO)}."
        if name not in _SLO or not colon:
            raise UsageError(f"--goodput {text}: the measure is not known.", fix)
        try:
            found[name] = positive(limit)
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"--goodput {text}: {error}.", fix) from None
    return found


def _extra(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise UsageError(
            f"--extra-body is not JSON: {error}.", """Write an object: --extra-body '{"top_k": 5}'."""
        ) from None
    if not isinstance(found, dict):
        raise UsageError("--extra-body is not a JSON object.", """Write an object: --extra-body '{"top_k": 5}'.""")
    return found


def _ramp(text: str) -> tuple[float, float]:
    first, _, last = text.partition(":")
    try:
        return finite(first), finite(last)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--ramp {text}: {error}.", "Write two rates per second, such as --ramp 1:10.") from None
