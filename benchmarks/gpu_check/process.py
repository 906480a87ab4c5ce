"""The process of one part: a row of its results is written as soon as it is there.

python -m benchmarks.gpu_check.process NAME --device cuda --rows FILE      # by benchmarks/gpu_check/__main__.py
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu_check.part import NotHere, Part, Where
from benchmarks.gpu_check.parts import PARTS

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
