"""`oarlock plan`: estimates which layouts of a model fit a machine and how fast they are, without a server.

Reads the model's description and the headers of its weights; loads nothing.
"""

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from oarlock.base.errors import StartupError
from oarlock.base.paths import expand
from oarlock.server.cli.arguments import UsageError, add_settings, loaded_settings
from oarlock.server.hub.local_model import check_names

HELP = "say what a machine would hold of a model, and how many replicas a load takes"
EXAMPLE = "oarlock plan Qwen/Qwen2.5-7B-Instruct --gpus 2x24GB"
_EXIT_CODES = """exit codes:
  0  it fits, or a number of replicas holds --slo      2  wrong command line, model or trace
  1  it does not fit, or no number of replicas does    3  a setting that no machine could serve"""
EXIT_MODEL = 2  # a wrong model or trace
_ROUTING = ("prefix", "least-loaded", "random")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say whether a model fits, how its ranks can be laid out, how many users there is memory for, how fast it "
        "would be, and the command that serves it so. Takes the flags of `serve`. Loads nothing."
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EXIT_CODES
    _add_machine(parser)
    _add_simulation(parser)
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


def _add_simulation(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("simulation: a trace through replicas of the plan, in virtual time")
    group.add_argument(
        "--simulate", type=expand, metavar="TRACE", help="JSON lines, ours or Mooncake's, or a result of `bench serve`"
    )
    group.add_argument("--replicas", metavar="A..B", help="how many: 4, 1,2,8 or 1..64 (default 1..8)")
    group.add_argument("--slo", metavar="LIMITS", help="such as ttft_p99=1s,itl_p99=50ms: the fewest that hold them")
    group.add_argument("--routing", choices=_ROUTING, default=_ROUTING[0], help="to replicas (default prefix)")
    group.add_argument(
        "--calibrate", type=expand, nargs="+", action="extend", metavar="RESULT",
        help="`bench serve --output` files: their seconds a step",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    if arguments.simulate is None:
        for flag in ("replicas", "slo", "calibrate"):
            if getattr(arguments, flag) is not None:
                raise UsageError(f"--{flag} is of a simulation.", "Add --simulate TRACE.jsonl, or leave it out.")
    loaded = loaded_settings(arguments)
    try:
        check_names(replace(loaded.settings, tokenizer=None))  # no value of a plan depends on it
    except StartupError as error:
        raise StartupError(error.cause, error.fix, EXIT_MODEL) from None
    from oarlock.server.cli.plan import layouts, report, simulate  # slow to import
    from oarlock.server.cli.plan.machine import machine_of

    simulate.parse_replicas(arguments.replicas)  # a mistake is reported before files are read
    simulate.parse_slo(arguments.slo)
    for note in arguments.notes:
        sys.stderr.write(f"note: {note}\n")
    if loaded.settings.tokenizer is not None:
        sys.stderr.write(
            "note: --tokenizer is not looked at: a plan reads config.json and the headers of weights, and no number "
            "of it depends on the tokenizer; `oarlock serve` opens it\n"
        )
    trace = None if arguments.simulate is None else simulate.read_trace(arguments.simulate)
    model, has_weights = layouts.find_model(loaded.settings)
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
    found_json = report.as_json(model, machine, found, command, helps)
    if not arguments.json:
        print(report.as_text(model, machine, found, command, helps))
    status = 0 if best.fits else 1
    if trace is not None and best.fits:
        print(end="" if arguments.json else "\n", flush=True)
        config = loaded.settings.engine_config(model.config.model_path)
        text, found_json["simulation"], status = simulate.run(arguments, trace, config, model, machine, best)
        print(end="" if arguments.json else f"{text}\n")
    if arguments.json:
        print(json.dumps(found_json, indent=1))
    return status
