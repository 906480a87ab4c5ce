"""`oarlock bench`: measure a server over HTTP, measure the engine without it, and compare results."""

from __future__ import annotations

import argparse
import importlib
from typing import cast

from oarlock.server.cli.arguments import Command, Parser, UsageError

HELP = "measure a server or the engine, and compare results"
MEASURES = ("serve", "throughput", "latency", "compare")  # one file each, beside this one


def add_arguments(parser: argparse.ArgumentParser) -> None:
    assert isinstance(parser, Parser)
    subparsers = parser.add_subparsers(dest="measure", metavar="MEASURE", parser_class=Parser)
    for name in MEASURES:
        measure = _load(name)
        child = subparsers.add_parser(name, help=measure.HELP, description=measure.HELP, allow_abbrev=False)
        measure.add_arguments(child)
        parser.children[name] = child


def run(arguments: argparse.Namespace) -> int:
    if arguments.measure is None:
        raise UsageError("oarlock bench needs a measure.", f"The measures are: {', '.join(MEASURES)}.")
    return _load(arguments.measure).run(arguments)


def _load(name: str) -> Command:
    return cast(Command, importlib.import_module(f"{__name__}.{name}"))
