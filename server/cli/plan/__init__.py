"""`oarlock plan`: estimates which layouts of a model fit a machine and how fast they are, without a server.

Reads the model's description and the headers of its weights; loads nothing.
"""

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.server.cli.arguments import add_settings, loaded_settings
from oarlock.server.hub.local_model import check_names

HELP = "estimate how a model fits a machine and how fast it would be"
EXAMPLE = "oarlock plan Qwen/Qwen2.5-7B-Instruct --gpus 2x24GB"
_EXIT_CODES = """exit codes:
  0  it fits            2  wrong command line or model
  1  it does not fit    3  a setting that no machine could serve"""
EXIT_MODEL = 2  # a wrong model


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say whether a model fits, how its ranks can be laid out, how many users there is memory for, how fast it "
        "would be, and the command that serves it so. Takes the flags of `serve`. Loads nothing."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXIT_CODES
    _add_machine(parser)
    parser.add_argument("--json", action="store_true", help="for programs")
    add_settings(parser, positional=True)


def _add_machine(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the machine")
    group.add_argument("--gpus", metavar="NxKIND", help="such as 2xH100, 2x4090 or, of a size alone, 2x24GB")
    group.add_argument("--cpu", action="store_true", help="this host without a GPU (default where --gpus is not given)")
    group.add_argument("--memory", metavar="SIZE", help="of each GPU, or of the host (default: what is free now)")
    group.add_argument(
        "--bandwidth", metavar="SIZE", help="of memory, bytes a second, such as 1008GB (default: known, or measured)"
    )
    group.add_argument("--tflops", metavar="N", help="of dense 16-bit products (default: known, or estimated)")


def run(arguments: argparse.Namespace) -> int:
    loaded = loaded_settings(arguments)
    try:
        check_names(replace(loaded.settings, tokenizer=None))  # no value of a plan depends on it
    except StartupError as error:
        raise StartupError(error.cause, error.fix, EXIT_MODEL) from None
    import asyncio

    from oarlock.server.cli.plan import layouts, report  # slow to import
    from oarlock.server.cli.plan.machine import machine_of
    from oarlock.server.hub.adapter_path import find_local_adapters

    for note in arguments.notes:
        sys.stderr.write(f"note: {note}\n")
    if loaded.settings.tokenizer is not None:
        sys.stderr.write(
            "note: --tokenizer is not looked at: a plan reads config.json and the headers of weights, and no number "
            "of it depends on the tokenizer; `oarlock serve` opens it\n"
        )
    adapters, notes = asyncio.run(find_local_adapters(loaded.settings))
    sys.stderr.writelines(f"note: {note}\n" for note in notes)
    model, has_weights = layouts.find_model(loaded.settings, adapters)
    machine = machine_of(arguments, has_vectors=layouts.has_vectors(loaded.settings, model))
    if not has_weights:
        sys.stderr.write("note: the weights are not on this machine, so sizes are those that config.json says\n")
    given = {name: getattr(loaded.settings, name) for name in layouts.SIZES if loaded.origins[name] != "default"}
    found = layouts.layouts(model, machine, given)
    best = found[0]
    chosen: dict[str, Any] = {"device": machine.memory.device}
    chosen |= {name: size for name, size in zip(layouts.SIZES, best.sizes, strict=True) if name in given or size > 1}
    command = report.serve_command(arguments, chosen) if best.fits else None
    helps = [] if best.fits else layouts.remedies(model, machine, best)
    if arguments.json:
        print(json.dumps(report.as_json(model, machine, found, command, helps), indent=1))
    else:
        print(report.as_text(model, machine, found, command, helps))
    return 0 if best.fits else 1
