"""How the cost of our server grows: with the batch, with the length of prompt and context, with ranks, model and type.

    python -m benchmarks.scaling --json scaling.json
    python -m benchmarks.scaling --shapes 0.5b --dtypes bfloat16 --batch 1 8 --length 128 1024 --ranks 1 --rounds 1

One prompt of each length gives two figures: its first token's time, and the time of a token at that context. All
numbers of ranks are up at once and asked in turn; the threads are divided among the ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from benchmarks import checkpoint, machine, tables
from benchmarks.peers import FORMAT, SLACK, progress
from benchmarks.systems import registry
from benchmarks.systems.system import Plan
from oarlock.workers.platform.processor import features

DECODED = 16  # tokens out of each prompt of the length sweep


def grown(args: argparse.Namespace, shape: str, dtype: str) -> dict[str, Any]:
    """All points of one model and type: rounds of {point: {ranks: figures}}."""
    lengths = [
        length for length in args.length if length + DECODED <= checkpoint.SHAPES[shape]["max_position_embeddings"]
    ]
    work = {f"batch {b}": (b, args.input_tokens, args.output_tokens) for b in args.batch}
    work |= {f"length {length}": (1, length, DECODED) for length in lengths}
    longest = max(input_tokens + output_tokens for _, input_tokens, output_tokens in work.values())
    plan = Plan(checkpoint.ensure(shape), dtype, args.threads, max([1, *args.batch]), longest + SLACK)
    ceilings = machine.Ceilings(args.threads, *((0.05, (24, 64, 64)) if shape == "quick" else ()))
    vocab_size = checkpoint.SHAPES[shape]["vocab_size"]
    rounds = []
    with contextlib.ExitStack() as stack:
        systems = {}
        for ranks in args.ranks:
            progress(f"starting {shape}, {dtype}, {ranks} ranks …")
            systems[ranks] = registry.start_oarlock(plan, ranks=ranks)
            stack.callback(systems[ranks].close)
        for turn in range(1, args.rounds + 1):
            found: dict[str, Any] = {}
            for name, (c, input_tokens, output_tokens) in work.items():
                prompts = checkpoint.prompts(c, input_tokens, vocab_size, seed=10_000 * turn + 100 * c + input_tokens)
                found[name] = {str(r): system.measure(prompts, c, output_tokens) for r, system in systems.items()}
                progress(f"{shape}, {dtype}, round {turn}, {name}")
            rounds.append({"ceilings": [ceilings.measure()], "points": found})
    return {"shape": shape, "dtype": dtype, "rounds": rounds}


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=checkpoint.SHAPES, default=["0.5b", "1.5b"])
    parser.add_argument(
        "--dtypes", nargs="+", choices=["bfloat16", "float16", "float32"], default=["bfloat16", "float32"]
    )
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--length", type=int, nargs="*", default=[128, 512, 2048, 8192, 16_000])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--input-tokens", type=int, default=128, help="of the batch sweep")
    parser.add_argument("--output-tokens", type=int, default=32, help="of the batch sweep")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="divided among the ranks")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    result = {
        "format": FORMAT,
        "what": "scaling",
        "measured": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks.scaling", *args.argv]),
        "machine": machine.about(features()),
        "models": [grown(args, shape, dtype) for shape in args.shapes for dtype in args.dtypes],
    }
    print(tables.scaling(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        progress(f"wrote {args.json}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
