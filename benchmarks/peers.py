"""Our server beside every peer that is installed, in alternation on one machine, and what the machine allows.

    python -m benchmarks.peers --json result.json              # or: make bench-peers
    python -m benchmarks.peers --systems oarlock transformers --concurrency 1 --rounds 1

Only ratios of one run count: the machine may be shared. All systems are up at once, idle but for the one that is asked.
`--json` writes everything that was measured; `python -m benchmarks.page result.json` puts it into docs/performance.md.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import checkpoint, machine, tables
from benchmarks.systems import registry
from benchmarks.systems.system import Plan, System
from oarlock.workers.platform.processor import features

FORMAT = 1
WARM_REQUESTS = 8
SLACK = 16  # positions of a sequence beyond prompt and answer


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def points(args: argparse.Namespace) -> dict[str, tuple[int, int, int, int]]:
    """Name of a measure -> (requests, concurrency, input tokens, output tokens)."""
    found = {}
    for c in args.concurrency:
        requests = max(args.min_requests, args.waves * c)
        found[f"c={c}"] = (requests, c, args.input_tokens, args.output_tokens)
    for length in args.first_token:
        found[f"first token, {length}"] = (1, 1, length, 2)
    return found


def starts(args: argparse.Namespace) -> dict[str, Callable[[Plan], System]]:
    """The systems that are asked for, in that order. `oarlock@NAME` is another checkout's."""
    chosen: dict[str, Callable[[Plan], System]] = {}
    able = [name for name in registry.ROUNDING[args.quantization] if name in registry.LEVELS.get(args.level, (name,))]
    usual = [name for name in registry.available() if name in able and name not in registry.OURS[1:]]
    for name in args.systems or usual:
        if name not in registry.available():
            raise SystemExit(f"error: {name} is not installed\nfix: python -m benchmarks.setup_peers {name}")
        if name not in able:
            what = args.quantization if args.level is None else f"{args.quantization} at {args.level}"
            raise SystemExit(f"error: {name} has no {what} here\nfix: use --systems {' '.join(able)}")
        chosen[name] = registry.STARTS[name]
    for given in args.checkout:
        name, _, path = given.rpartition("=")
        place = Path(path).resolve()
        label = f"oarlock@{name or place.name}"
        chosen[label] = partial(registry.start_oarlock, name=label, checkout=place)
    if args.beside is not None:
        label = f"oarlock@{args.beside}"
        chosen[label] = partial(_start_with_shape, label, args.beside)
    return chosen


def _start_with_shape(name: str, shape: str, plan: Plan) -> System:
    """Start our server with another model of the same vocabulary."""
    return registry.start_oarlock(replace(plan, model=checkpoint.ensure(shape)), name=name)


def start_all(chosen: dict[str, Callable[[Plan], System]], plan: Plan, stack: contextlib.ExitStack) -> list[System]:
    """Start one after another; one that cannot start is reported and left out."""
    systems = []
    for name, start in chosen.items():
        progress(f"starting {name} …")
        try:
            system = start(plan)
        except RuntimeError as error:
            progress(f"{name} is left out: {error}")
            continue
        stack.callback(system.close)
        systems.append(system)
        progress(f"{name} is ready after {system.about['start_s']} s")
    return systems


def note_idle_use(systems: list[System], seconds: float = 2.0) -> None:
    """Note the cores that each system keeps busy while it is idle: one that spins slows the others down."""
    before = [system.process.seconds_of_processor() for system in systems]
    time.sleep(seconds)
    for system, earlier in zip(systems, before, strict=True):
        system.about["idle_cores"] = round((system.process.seconds_of_processor() - earlier) / seconds, 2)


def one_round(
    systems: list[System], wanted: dict[str, tuple[int, int, int, int]], turn: int, vocab_size: int
) -> dict[str, dict[str, Any]]:
    """Measure -> system -> its figures. Who begins changes with every round; all get the same prompts."""
    found: dict[str, dict[str, Any]] = {}
    for number, (measure, (requests, c, input_tokens, output_tokens)) in enumerate(wanted.items()):
        # No prompt comes twice: a server may keep what it computed.
        work = checkpoint.prompts(requests, input_tokens, vocab_size, seed=1_000 * turn + number)
        begin = turn % len(systems)
        found[measure] = {}
        for system in systems[begin:] + systems[:begin]:
            figures = system.measure(work, c, output_tokens)
            found[measure][system.name] = figures
            progress(
                f"round {turn}, {measure}: {system.name} {figures['output_tokens_per_s']:.1f} tok/s, "
                f"TTFT {figures['ttft_ms']['p50']:.0f} ms, TPOT {figures['tpot_ms']['p50']:.1f} ms"
            )
    return found


def warm_up(systems: list[System], wanted: dict[str, tuple[int, int, int, int]], vocab_size: int) -> None:
    """Some requests of each measure, with few tokens out: compilers and allocators have their first time here."""
    for number, (requests, c, input_tokens, _) in enumerate(wanted.values()):
        work = checkpoint.prompts(min(requests, c, WARM_REQUESTS), input_tokens, vocab_size, seed=9_000_000 + number)
        for system in systems:
            system.measure(work, len(work), 2)


def compare(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as it is written to JSON."""
    wanted = points(args)
    longest = max(input_tokens + output_tokens for _, _, input_tokens, output_tokens in wanted.values())
    vocab_size = checkpoint.vocab_size(args.shape)
    most = max(c for _, c, _, _ in wanted.values())
    if args.beside is not None and checkpoint.vocab_size(args.beside) != vocab_size:
        raise SystemExit(f"error: --beside {args.beside} has another vocabulary\nfix: choose one with {vocab_size} ids")
    model = checkpoint.ensure(args.shape)
    plan = Plan(model, args.dtype, args.threads, most, longest + SLACK, args.quantization, args.level)
    ceilings = machine.Ceilings(args.threads, *((0.05, (24, 64, 64)) if args.shape == "quick" else ()))
    with contextlib.ExitStack() as stack:
        systems = start_all(starts(args), plan, stack)
        note_idle_use(systems)
        warm_up(systems, wanted, vocab_size)
        rounds = []
        for turn in range(1, args.rounds + 1):
            before = ceilings.measure()
            measures = one_round(systems, wanted, turn, vocab_size)
            rounds.append({"ceilings": [before, ceilings.measure()], "measures": measures})
    parameters, inner = checkpoint.parameters(args.shape)
    return {
        "format": FORMAT,
        "what": "peers",
        "measured": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks.peers", *args.argv]),
        "machine": machine.about(features()),
        "model": {
            "shape": args.shape,
            "dtype": args.dtype,
            "quantization": args.quantization,
            "level": args.level,
            "parameters": parameters,
            "inner_parameters": inner,
        },
        "load": {
            "threads": args.threads,
            "input_tokens": args.input_tokens,
            "output_tokens": args.output_tokens,
            "requests": {name: requests for name, (requests, *_) in wanted.items()},
        },
        "systems": {system.name: {"title": system.title, **system.about} for system in systems},
        "rounds": rounds,
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--systems",
        nargs="+",
        choices=registry.STARTS,
        help="default: all that are installed, and ours once",
    )
    parser.add_argument(
        "--checkout", action="append", default=[], metavar="[NAME=]DIRECTORY", help="another checkout's server as well"
    )
    parser.add_argument("--shape", choices=checkpoint.ALL, default="0.5b")
    parser.add_argument(
        "--beside", choices=checkpoint.ALL, metavar="SHAPE", help="our server with another shape as well"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--quantization", default="none", choices=registry.ROUNDING, help="of every system's weights")
    parser.add_argument("--level", choices=registry.LEVELS, help="every system keeps to its instructions")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--first-token", type=int, nargs="*", default=[128, 2048], help="lengths of prompts, alone")
    parser.add_argument("--waves", type=int, default=1, help="requests per client")
    parser.add_argument("--min-requests", type=int, default=2, help="of a measure, in all")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each system, in all")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    result = compare(args)
    print(tables.peers(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        progress(f"wrote {args.json}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
