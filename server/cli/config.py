"""`oarlock config`: every setting, its value and its origin."""

import argparse
import sys

from oarlock.server.cli.arguments import add_settings, given_settings, loaded_settings
from oarlock.server.config.settings import as_markdown
from oarlock.server.config.sources import as_table

HELP = "show the settings and the source of each"
EXAMPLE = "oarlock config show --config configs/cpu.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("show",), default="show", help="action (default show)")
    parser.add_argument("--markdown", action="store_true", help="print the table of the documentation instead")
    add_settings(parser, positional=False)


def run(arguments: argparse.Namespace) -> int:
    if arguments.markdown:
        given_settings(arguments)
        sys.stdout.write(as_markdown())
        return 0
    rows = as_table(loaded_settings(arguments))
    for note in arguments.notes:
        sys.stderr.write(f"note: {note}\n")
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for name, value, origin in rows:
        print(f"{name:<{widths[0]}}  {value:<{widths[1]}}  {origin}")
    return 0
