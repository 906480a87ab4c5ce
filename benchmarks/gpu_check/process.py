"""Parts of the check in the order in which they run, and the process of one: it writes each row of results at once.

What settles most comes first: one family with graphs and without, every kernel on a few shapes, how fast each part of a
step is; then what takes more packages, more devices or more time.

python -m benchmarks.gpu_check.process NAME --device cuda --rows FILE      # by benchmarks/gpu_check/__main__.py
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu_check import correctness, graphs, latent, recurrent, roofline, wheels
from benchmarks.gpu_check.part import NotHere, Part, Row, Where, missing_package

ROOT = correctness.ROOT
LONG = 480.0  # seconds


def _serving(name: str, where: Where, **options: int) -> Iterator[Row]:
    """Rows of a part that asks servers: its client is imported here, as the other parts do without it."""
    if absent := wheels.absent():
        raise NotHere(f"servers need {', '.join(absent)}: install them, or name a folder of wheels: --wheels DIR")
    from benchmarks.gpu_check import serving

    yield from getattr(serving, name)(where, **options)


def _answers(name: str, where: Where) -> Iterator[Row]:
    """Rows of a part that reads text: its tokenizer is imported here, as the other parts do without it."""
    from benchmarks.gpu_check import demo_answers

    yield from getattr(demo_answers, name)(where)


# Families with other layers than `qwen3`, and fields of their configs. All experts are chosen, because rounding may
# choose others than float64 does.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {},
    "falcon_h1": {},
    "youtu": {},  # latent attention
    "kimi_linear": {"num_experts_per_tok": 8, "topk_group": 4},  # the same with Kimi delta attention
}
PARTS_IN_ORDER = [
    Part("float64", graphs.beside_float64, 90.0),
    Part("kernels", correctness.kernels, 240.0),
    Part("ceilings", roofline.ceilings, 60.0),
    Part("attention", roofline.attention),
    Part("decode 0.6b", partial(roofline.decode, "0.6b")),
    Part("decode 8b", partial(roofline.decode, "8b")),
    Part("prefill 8b", partial(roofline.prefill, "8b")),
    Part("quantised products", roofline.products),
    Part("sampling", roofline.sampling),
    Part("recurrent", recurrent.recurrent),
    Part("latent attention", latent.latent_attention),
    *(
        Part(f"float64, {family}", partial(graphs.beside_float64, family=family, **overrides), 90.0)
        for family, overrides in FAMILIES.items()
    ),
    *(
        Part(f"{step} {shape}", partial(of_steps, shape))
        for shape in ("hybrid 0.8b", "latent 2b", "kimi, 8 layers")
        for step, of_steps in (("decode", roofline.decode), ("prefill", roofline.prefill))
    ),
    Part("prefill 0.6b", partial(roofline.prefill, "0.6b")),
    Part("sanitizer", correctness.sanitizer, 180.0),
    Part("load", partial(_serving, "load"), 240.0),
    Part("sums, 2 devices", correctness.sums, 60.0, needs_devices=2),
    Part("demo model, 2 devices", partial(_answers, "two_devices"), needs_devices=2),
    Part("load, 2 devices", partial(_serving, "load", ranks=2), 240.0, needs_devices=2),
    # What a short run need not settle.
    Part("graphs", graphs.graphs, 240.0),
    *(
        Part(f"{title} {dtype}", partial(correctness.families, dtype, kinds=kinds), LONG)
        for dtype in ("bfloat16", "float32", "float16")
        for title, kinds in (("families", ("FAMILIES", "RECURRENT")), ("other families", ("MIXTURES", "LATENT")))
    ),
    Part("demo model", correctness.demo, LONG),
    Part("demo model, quantised", correctness.quantised, LONG),
    Part("demo model, 2 ranks", partial(correctness.demo, ranks=2), LONG),
    Part("demo model, KV of 8 bits", partial(_answers, "rounded_pages"), LONG),
    Part("demo model, batch-invariant", partial(_answers, "batch_invariant"), LONG),
    Part("memory", partial(_serving, "memory"), LONG),
    Part("decode 0.6b, eager", partial(roofline.decode, "0.6b", enforce_eager=True)),
    Part("one step ahead", partial(_serving, "ahead"), LONG),
    Part("transformers", partial(_serving, "beside_transformers"), LONG),
    *(
        Part(f"all kernels {file.stem.removeprefix('test_')}", partial(correctness.all_kernels, file), LONG)
        for file in correctness.tests_of_kernels()
    ),
]
PARTS = {part.name: part for part in PARTS_IN_ORDER}


def run(part: Part, where: Where, rows: Path) -> int:
    """Exit status 0, or 3 where the machine lacks something, a library for one. What a part raises otherwise ends the
    process."""
    with rows.open("w") as file:
        try:
            for row in part.run(where):
                file.write(json.dumps(asdict(row)) + "\n")
                file.flush()
        except (NotHere, ModuleNotFoundError) as reason:
            is_import = isinstance(reason, ModuleNotFoundError)
            why = missing_package("".join(traceback.format_exception(reason))) if is_import else str(reason)
            if why is None:
                raise
            file.write(json.dumps({"left_out": why}) + "\n")
            return 3
    return 0


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check.process")
    parser.add_argument("name", choices=PARTS)
    parser.add_argument("--device", required=True)
    parser.add_argument("--rows", type=Path, required=True)
    arguments = parser.parse_args(argv)
    return run(PARTS[arguments.name], Where(arguments.device), arguments.rows)


if __name__ == "__main__":
    sys.exit(main())
