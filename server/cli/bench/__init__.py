"""`oarlock bench`: measure a server over HTTP, measure the engine without it, and compare results."""

import argparse
import json

from oarlock.base.paths import expand
from oarlock.server.cli.arguments import Command, OneCommand, Parser, UsageError, add_command, below_one
from oarlock.server.cli.bench import engine, serve

HELP = "measure a server or the engine, and compare results"
EXAMPLE = "oarlock bench serve http://127.0.0.1:8000 --concurrency 8"


def _add_compare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A.json", type=expand, help="a result of `bench serve`, `throughput` or `latency`")
    parser.add_argument("b", metavar="B.json", type=expand, help="another result of the same command; ratios are B / A")
    parser.add_argument(
        "--confidence",
        type=below_one,
        default=0.95,
        metavar="X",
        help="confidence level of the intervals (default 0.95)",
    )
    parser.add_argument("--output", type=expand, metavar="FILE.json", help="also write the rows to this file")


def _compare(arguments: argparse.Namespace) -> int:
    if not arguments.confidence:
        raise UsageError("--confidence 0 gives no interval.", "Give a number above 0 and below 1, such as 0.95.")
    from oarlock.server.bench.compare import as_text, compare
    from oarlock.server.bench.metrics import read, write_text

    comparison = compare(read(arguments.a), read(arguments.b), arguments.confidence)
    print(as_text(comparison))
    if arguments.output is not None:
        write_text(arguments.output, json.dumps(comparison.as_json(), indent=1) + "\n", "--output")
    return 0


COMPARE = OneCommand(
    "compare two results: ratios with confidence intervals",
    "oarlock bench compare before.json after.json",
    _add_compare,
    _compare,
)
MEASURES: dict[str, Command] = {
    "serve": serve, "throughput": engine.THROUGHPUT, "latency": engine.LATENCY, "compare": COMPARE,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    assert isinstance(parser, Parser)
    subparsers = parser.add_subparsers(dest="measure", metavar="MEASURE", parser_class=Parser)
    for name, measure in MEASURES.items():
        parser.children[name] = add_command(subparsers, name, measure)


def run(arguments: argparse.Namespace) -> int:
    if arguments.measure is None:
        raise UsageError("oarlock bench needs a benchmark.", f"The benchmarks are: {', '.join(MEASURES)}.")
    return MEASURES[arguments.measure].run(arguments)
