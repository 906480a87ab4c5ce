"""`oarlock bench`: measure a server over HTTP, measure the engine without it, and compare results."""

from __future__ import annotations

import argparse

from oarlock.server.cli.arguments import Command, Parser, UsageError, add_command
from oarlock.server.cli.bench import compare, engine, serve

HELP = "measure a server or the engine, and compare results"
EXAMPLE = "oarlock bench serve http://127.0.0.1:8000 --concurrency 8"
MEASURES: dict[str, Command] = {
    "serve": serve, "throughput": engine.THROUGHPUT, "latency": engine.LATENCY, "compare": compare,
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    assert isinstance(parser, Parser)
    subparsers = parser.add_subparsers(dest="measure", metavar="MEASURE", parser_class=Parser)
    for name, measure in MEASURES.items():
        parser.children[name] = add_command(subparsers, name, measure)


def run(arguments: argparse.Namespace) -> int:
    if arguments.measure is None:
        raise UsageError("oarlock bench needs a measure.", f"The measures are: {', '.join(MEASURES)}.")
    return MEASURES[arguments.measure].run(arguments)
