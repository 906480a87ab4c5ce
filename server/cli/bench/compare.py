"""`oarlock bench compare A.json B.json`: the ratio of every figure, with an interval and a verdict."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from oarlock.server.cli.arguments import UsageError, below_one

HELP = "compare two results: ratios with confidence intervals"
EXAMPLE = "oarlock bench compare before.json after.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A.json", type=Path, help="a result of `bench serve`, `throughput` or `latency`")
    parser.add_argument("b", metavar="B.json", type=Path, help="another of the same command; ratios are B / A")
    parser.add_argument(
        "--confidence", type=below_one, default=0.95, metavar="X", help="of the intervals (default 0.95)"
    )
    parser.add_argument("--output", type=Path, metavar="FILE.json", help="write the rows there as well")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.confidence:
        raise UsageError("--confidence 0 gives no interval.", "Give a number above 0 and below 1, such as 0.95.")
    from oarlock.server.bench.compare import as_text, compare
    from oarlock.server.bench.result import read, write_text

    comparison = compare(read(arguments.a), read(arguments.b), arguments.confidence)
    print(as_text(comparison))
    if arguments.output is not None:
        write_text(arguments.output, json.dumps(comparison.as_json(), indent=1) + "\n", "--output")
    return 0
