"""Times the products of a model's layers alone: our kernels, `F.linear` and oneDNN's packed product, in turn.

    python -m benchmarks.products [--shape 0.5b] [--rows 1 8 128] [--rounds 3] [--level avx2 ...] [--json FILE]

The weights of all layers are walked through in the order of a step, so no cache holds them from one use to the next.
What the machine allows is measured before and after every round. `--checkout DIRECTORY` adds the kernels of another
checkout, called by this one's Python, `--quantization int8 int4` products with rounded weights. Each `--level` is
measured in a process of its own, where torch and oneDNN keep to the same instructions.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks import checkpoint, machine
from benchmarks.tables import Result, Spread, best_gemm, ceilings, cell, number, read_rate, spread, table
from oarlock.workers.kernels.cpu import build, library
from oarlock.workers.kernels.cpu.gemm import CppGatedMatmul, CppMatmul
from oarlock.workers.platform.huge_pages import huge_page_empty
from oarlock.workers.platform.processor import features
from oarlock.workers.quantization import int4
from oarlock.workers.quantization.fp8 import Fp8Weight
from oarlock.workers.quantization.int8 import Int8Weight, round_rows
from oarlock.workers.quantization.matmul import PackedGatedMatmul, PackedMatmul, PlainGatedMatmul, PlainMatmul, can_pack
from oarlock.workers.quantization.method import LinearWeight

BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
STEP = "step"  # all products of all layers and the head


def size(level: dict[str, Any], part: str) -> int:
    """Elements of all weights of a product, or of the whole step."""
    return sum(p["outputs"] * p["inputs"] * p["count"] for p in level["products"] if part in (STEP, p["name"]))


def parts(level: dict[str, Any], rows: str) -> list[str]:
    """The products that were measured at this number of rows, and the step."""
    return list(next(iter(level["rounds"][0]["seconds"][rows].values())))


def measured(turn: dict[str, Any], rows: str, system: str, part: str) -> float | None:
    """Seconds, or None where a system was too slow to be asked."""
    return turn["seconds"][rows].get(system, {}).get(part)


def ratio(level: dict[str, Any], rows: str, part: str, ours: str, other: str) -> Spread | None:
    """Speed of ours as a multiple of the other's, round by round."""
    pairs = [(measured(t, rows, ours, part), measured(t, rows, other, part)) for t in level["rounds"]]
    return spread(b / a if a and b else None for a, b in pairs)


def line(result: Result, level: dict[str, Any], rows: str, part: str) -> list[str]:
    ours, *others = level["systems"]
    dtype, elements = result["model"]["dtype"], size(level, part)
    if part == STEP and "head" not in parts(level, rows):
        elements -= size(level, "head")
    turns = [(seconds, t) for t in level["rounds"] if (seconds := measured(t, rows, ours, part)) is not None]
    if len(turns) < len(level["rounds"]):
        return [part, rows, *["-"] * (5 + len(others))]
    gigabytes, flops = elements * BYTES[dtype] / 1e9, 2e-9 * elements * int(rows)
    read = spread(gigabytes / seconds / read_rate(turn) for seconds, turn in turns)
    gemm = spread(flops / seconds / best_gemm(turn, dtype) for seconds, turn in turns)
    middle = statistics.median(seconds for seconds, _ in turns)
    rates = [number(1e3 * middle), number(gigabytes / middle), cell(read)]
    ratios = [cell(ratio(level, rows, part, ours, other)) for other in others]
    return [part, rows, *rates, number(flops / middle), cell(gemm), *ratios]


def of_level(result: Result, level: dict[str, Any]) -> str:
    ours, *others = level["systems"]
    head = ["product", "rows", "ms", "GB/s", "of streaming read", "GFLOP/s", "of the fastest product"]
    head += [f"times as fast as {other}" for other in others]
    every = level["rounds"][0]["seconds"]
    lines = [line(result, level, rows, part) for rows in every for part in parts(level, rows)]
    said = f"Level {level['level']}, {ours}: milliseconds are of all layers together. Median (range) of the rounds."
    return "\n\n".join([said, table(head, lines), ceilings(level)])


def products(result: Result) -> str:
    """Everything about one run, as Markdown."""
    here, model = result["machine"], result["model"]
    about = (
        f"{here['processor']}, {here['cores']} cores, torch {here['torch']}, {result['measured']}. The products of "
        f"{model['shape']}, {model['dtype']}, {result['threads']} threads."
    )
    return "\n\n".join([about, *(of_level(result, level) for level in result["levels"])])


FORMAT = 1
ROWS = [1, 2, 4, 8, 12, 16, 32, 64, 128, 512]
MOST_HEAD_ROWS = 64  # a step computes the logits of one row of each sequence
LEAST_SECONDS = 0.15  # of one system at one number of rows in a round, in whole walks
MOST_SECONDS = 10.0  # of one walk; a system that takes longer is not asked for more rows
ACTIVATION = "silu"
# Instructions that oneDNN and torch may use at each level that can be named.
PEER_LIMITS = {
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx512"},
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
}


def in_fp8(weight: Tensor) -> LinearWeight:
    """Round a weight to float8, with one scale for each output."""
    return Fp8Weight(weight.to(torch.float8_e4m3fn), torch.ones(len(weight), 1), weight.shape[1], weight.dtype)


ROUNDED: dict[str, Callable[[Tensor], LinearWeight]] = {
    "int8": lambda weight: Int8Weight(*round_rows(weight), weight.dtype),
    "int4": int4.rounded,
    "fp8": in_fp8,
}

Product = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """One product of a layer, or the output head."""

    name: str
    outputs: int
    inputs: int
    is_gated: bool = False


def shapes_of(model: str) -> tuple[list[Shape], Shape, int]:
    """Returns (the products of a layer in order, the output head, the number of layers)."""
    s = checkpoint.SHAPES[model]
    hidden, between = s["hidden_size"], s["intermediate_size"]
    qkv = hidden + 2 * s["num_key_value_heads"] * (hidden // s["num_attention_heads"])
    layer = [
        Shape("q, k, v", qkv, hidden),
        Shape("attention out", hidden, hidden),
        Shape("gate, up", 2 * between, hidden, is_gated=True),
        Shape("down", hidden, between),
    ]
    return layer, Shape("head", s["vocab_size"], hidden), s["num_hidden_layers"]


def kinds(args: argparse.Namespace) -> dict[str, tuple[Any, Any]]:
    """Plain and gated product of each system that this processor and this build of torch have."""
    dtype = getattr(torch, args.dtype)
    found: dict[str, tuple[Any, Any]] = {}
    if library.why_not() is None:
        found["oarlock"] = (CppMatmul, CppGatedMatmul)
    for place in args.checkout:
        name = f"oarlock@{Path(place).resolve().name}"
        with other_kernels(Path(place)):
            found[name] = (in_other_kernels(place, CppMatmul), in_other_kernels(place, CppGatedMatmul))
    for name in args.quantization:
        found[f"oarlock {name}"] = in_form(ROUNDED[name])
    if not args.ours_only:
        if can_pack(dtype, "cpu"):
            found["onednn"] = (PackedMatmul, PackedGatedMatmul)
        found["torch"] = (PlainMatmul, PlainGatedMatmul)
    return found


def in_form(rounded: Callable[[Tensor], LinearWeight]) -> tuple[Any, Any]:
    """The plain and the gated product with weights that are rounded."""
    return (
        lambda weight, bias: rounded(weight).matmul(bias),
        lambda weight, bias, activation: rounded(weight).gated_matmul(bias, activation),
    )


@contextlib.contextmanager
def other_kernels(checkout: Path) -> Generator[None]:
    """Context in which products use the kernels of another checkout."""
    real, before = library.isa_level(), build.SOURCES
    build.SOURCES = checkout.resolve() / build.SOURCES.resolve().relative_to(Path(__file__).resolve().parents[1])
    try:
        with library.using(dataclasses.replace(real, name=f"{real.name}_{checkout.resolve().name}")):
            library.library()
            yield
    finally:
        build.SOURCES = before


def in_other_kernels(checkout: str, kind: Callable[..., Product]) -> Callable[..., Product]:
    def make(*arguments: Any) -> Product:
        with other_kernels(Path(checkout)):
            return kind(*arguments)

    return make


def weights(shape: Shape, dtype: torch.dtype) -> Tensor:
    """Random weights [outputs, inputs] in huge pages, as our packed weights are."""
    weight = huge_page_empty((shape.outputs, shape.inputs), dtype)
    return weight.copy_(torch.randn(64, shape.inputs).repeat(-(-shape.outputs // 64), 1)[: shape.outputs] / 32)


def steps_of(kind: tuple[Any, Any], args: argparse.Namespace) -> list[tuple[Shape, Product]]:
    """Every product of the model in the order of a step."""
    plain, gated = kind
    layer, head, layers = shapes_of(args.shape)
    dtype = getattr(torch, args.dtype)
    made: list[tuple[Shape, Product]] = []
    for shape in [*layer * layers, head]:
        weight = weights(shape, dtype)
        made.append((shape, gated(weight, None, ACTIVATION) if shape.is_gated else plain(weight, None)))
    return made


def walk(steps: list[tuple[Shape, Product]], inputs: dict[int, Tensor]) -> dict[str, float]:
    """Seconds of each product, over all layers."""
    spent: dict[str, float] = {}
    for shape, product in steps:
        x = inputs[shape.inputs]
        if shape.name == "head" and len(x) > MOST_HEAD_ROWS:
            continue
        start = time.perf_counter()
        product(x)
        spent[shape.name] = spent.get(shape.name, 0.0) + time.perf_counter() - start
    return spent


def one_round(systems: dict[str, list[tuple[Shape, Product]]], args: argparse.Namespace) -> dict[str, Any]:
    """Rows -> system -> product -> seconds of one walk, the median over walks; `step`: of all products together."""
    layer, _, _ = shapes_of(args.shape)
    dtype = getattr(torch, args.dtype)
    found: dict[str, Any] = {}
    too_slow: set[str] = set()
    for rows in args.rows:
        inputs = {n: torch.randn(rows, n).to(dtype) for n in {shape.inputs for shape in layer}}
        walks: dict[str, list[dict[str, float]]] = {name: [] for name in systems if name not in too_slow}
        begun = time.perf_counter()
        while walks and time.perf_counter() - begun < args.seconds * len(walks):
            for name in list(walks):  # one walk each, in turn
                spent = walk(systems[name], inputs)
                walks[name].append(spent | {"step": sum(spent.values())})
                if sum(spent.values()) > MOST_SECONDS:
                    too_slow.add(name)
        found[str(rows)] = {
            name: {part: statistics.median(one[part] for one in all_walks) for part in all_walks[0]}
            for name, all_walks in walks.items()
        }
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Everything that was measured, as it is written to JSON."""
    torch.set_num_threads(args.threads)
    ceilings = machine.Ceilings(args.threads, *((0.05, (24, 64, 64)) if args.shape == "quick" else ()))
    level = library.isa_level().name if library.why_not() is None else "none"
    systems = {name: steps_of(kind, args) for name, kind in kinds(args).items()}
    one_round(systems, argparse.Namespace(**{**vars(args), "rows": args.rows[:1], "seconds": 0.0001}))  # warm
    rounds = []
    for turn in range(1, args.rounds + 1):
        before = ceilings.measure()
        found = one_round(systems, args)
        rounds.append({"ceilings": [before, ceilings.measure()], "seconds": found})
        print(f"{level}, round {turn}", file=sys.stderr, flush=True)
    layer, head, layers = shapes_of(args.shape)
    described = [dataclasses.asdict(shape) | {"count": layers} for shape in layer]
    return {
        "level": level,
        "products": [*described, dataclasses.asdict(head) | {"count": 1}],
        "systems": list(systems),
        "rounds": rounds,
    }


def measure_at(level: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure in a process that is held to `level`; returns the entry of that level."""
    environment = os.environ | {build.ENVIRONMENT: level} | PEER_LIMITS.get(level, {})
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        flags = ["--shape", args.shape, "--dtype", args.dtype, "--rounds", args.rounds, "--seconds", args.seconds]
        flags += ["--threads", args.threads, "--rows", *args.rows, *(["--ours-only"] if args.ours_only else [])]
        flags += ["--quantization", *args.quantization]
        flags += [word for place in args.checkout for word in ("--checkout", place)]
        command = [sys.executable, "-m", "benchmarks.products", *map(str, flags), "--json", str(out)]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        return json.loads(out.read_text())["levels"][0]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.products", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shape", choices=checkpoint.SHAPES, default="0.5b")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=LEAST_SECONDS, help="per system and number of rows in a round")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--level", nargs="+", choices=[level.name for level in build.available()], default=[])
    parser.add_argument("--checkout", action="append", default=[], metavar="DIRECTORY", help="its kernels as well")
    parser.add_argument("--quantization", nargs="*", choices=list(ROUNDED), default=[], help="of our weights, as well")
    parser.add_argument("--ours-only", action="store_true", help="without torch and oneDNN")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    result = {
        "format": FORMAT,
        "what": "products",
        "measured": datetime.date.today().isoformat(),
        "command": shlex.join(["python", "-m", "benchmarks.products", *args.argv]),
        "machine": machine.about(features()),
        "model": {"shape": args.shape, "dtype": args.dtype},
        "threads": args.threads,
        "levels": [measure_at(level, args) for level in args.level] if args.level else [measure(args)],
    }
    print(products(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
