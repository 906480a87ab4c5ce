"""Parts of the check in the order in which they run, and the process of one: it writes each row of results at once.

Whether the device is right comes first, then how fast it is.

python -m benchmarks.gpu_check.process NAME --device cuda --rows FILE      # by benchmarks/gpu_check/__main__.py
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks.gpu_check import correctness, graphs, roofline
from benchmarks.gpu_check.part import NotHere, Part, Row, Where


def _serving(name: str, where: Where, **options: int) -> Iterator[Row]:
    """Rows of a part that asks servers: its client is imported here, as the other parts do without it."""
    from benchmarks.gpu_check import serving

    yield from getattr(serving, name)(where, **options)


def _answers(name: str, where: Where) -> Iterator[Row]:
    """Rows of a part that reads text: its tokenizer is imported here, as the other parts do without it."""
    from benchmarks.gpu_check import demo_answers

    yield from getattr(demo_answers, name)(where)


_KERNELS = [
    Part(f"kernels {file.stem.removeprefix('test_')}", partial(correctness.kernels, file), is_check=True)
    for file in correctness.tests_of_kernels()
]
_ALL = [
    *_KERNELS,
    *(
        Part(f"families {dtype}", partial(correctness.families, dtype), is_check=True)
        for dtype in ("float32", "bfloat16", "float16")
    ),
    Part("graphs", graphs.graphs, is_check=True),
    Part("demo model", correctness.demo, is_check=True),
    Part("demo model, quantised", correctness.quantised, is_check=True),
    Part("demo model, KV of 8 bits", partial(_answers, "rounded_pages"), is_check=True),
    Part("demo model, batch-invariant", partial(_answers, "batch_invariant"), is_check=True),
    Part("demo model, 2 ranks", partial(correctness.demo, ranks=2), is_check=True),
    Part("memory", partial(_serving, "memory"), is_check=True),
    Part("ceilings", roofline.ceilings, is_check=False),
    Part("attention", roofline.attention, is_check=False),
    Part("quantised products", roofline.products, is_check=False),
    Part("sampling", roofline.sampling, is_check=False),
    Part("decode 0.6b", partial(roofline.decode, "0.6b"), is_check=False),
    Part("decode 0.6b, eager", partial(roofline.decode, "0.6b", enforce_eager=True), is_check=False),
    Part("decode 8b", partial(roofline.decode, "8b"), is_check=False),
    Part("prefill 0.6b", partial(roofline.prefill, "0.6b"), is_check=False),
    Part("prefill 8b", partial(roofline.prefill, "8b"), is_check=False),
    Part("load", partial(_serving, "load"), is_check=False),
    Part("load, 2 ranks", partial(_serving, "load", ranks=2), is_check=False, needs_devices=2),
    Part("one step ahead", partial(_serving, "ahead"), is_check=False),
    Part("transformers", partial(_serving, "beside_transformers"), is_check=False),
]
PARTS = {part.name: part for part in _ALL}


OURS = ("benchmarks", "oarlock", "tests")


def run(part: Part, where: Where, rows: Path) -> int:
    """Exit status 0, or 3 where the machine lacks something, a library for one. What a part raises otherwise ends the
    process."""
    with rows.open("w") as file:
        try:
            for row in part.run(where):
                file.write(json.dumps(asdict(row)) + "\n")
                file.flush()
        except (NotHere, ModuleNotFoundError) as reason:
            if isinstance(reason, ModuleNotFoundError) and (reason.name or "").split(".")[0] in OURS:
                raise
            file.write(json.dumps({"left_out": str(reason)}) + "\n")
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
