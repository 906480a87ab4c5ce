"""Which of transformers' classes are right, by which code, on one and two ranks.

    python -m benchmarks.model_classes                    # every class, compared with the recorded table
    python -m benchmarks.model_classes --shard 2/4        # the second quarter of them
    python -m benchmarks.model_classes ZayaForCausalLM    # some classes
    python -m benchmarks.model_classes --write            # records the results, for the package and docs/models.md

Builds a tiny random model of each class, serves it, and compares its logits with the class's own in float64. Exits with
1 if a class differs from the table.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.model_classes import table
from benchmarks.model_classes.outcome import Row
from benchmarks.model_classes.processes import judged, prepare


def shard(text: str) -> tuple[int, int]:
    """Parse `K/N`, or `today/N`: another of N shards each day. Return (index from 0, N)."""
    number, _, total = text.partition("/")
    count = int(total)
    index = datetime.now(UTC).timetuple().tm_yday % count if number == "today" else int(number) - 1
    if not 0 <= index < count:
        raise ValueError(f"{text}: not a shard")
    return index, count


def chosen(names: Sequence[str], part: tuple[int, int]) -> list[tuple[str, str]]:
    """Return the classes with these names, or all, of one shard."""
    from benchmarks.model_classes.tiny import model_classes

    index, count = part
    everything = [tuple(one) for one in model_classes()]
    unknown = set(names) - {name for name, _ in everything}
    if unknown:
        raise SystemExit(f"error: transformers has no such class: {', '.join(sorted(unknown))}")
    return [one for one in everything if not names or one[0] in names][index::count]


def main() -> int:
    """Judge the chosen classes, print and write the results, and compare them with the table."""
    arguments = _parser().parse_args()
    prepare()
    classes = chosen(arguments.classes, arguments.shard)
    started, rows = time.monotonic(), []
    for row in judged(classes, arguments.workers):
        rows.append(row)
        passed = time.monotonic() - started
        print(f"[{len(rows)}/{len(classes)} {passed:4.0f} s] {line(row)}", flush=True)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps([row.encoded() for row in rows]), "utf-8")
    version, old = table.read() if table.RESULTS.exists() else ("", [])
    print("; ".join(f"{name} {count}" for name, count in table.counts(rows).items()))
    if arguments.write:
        is_part = bool(arguments.classes) or arguments.shard[1] > 1
        if is_part and version != _transformers():
            raise SystemExit(f"error: the table is of transformers {version}\nfix: write all classes")
        _write(table.merged(old, rows) if is_part else rows)
        return 0
    differences = table.changes(old, rows)
    if version != _transformers():
        print(f"the table is of transformers {version}, this is {_transformers()}")
    print("\n".join(differences) or "as in the table")
    return 1 if differences else 0


def line(row: Row) -> str:
    """Return the result of one class for the terminal."""
    words = [row.name]
    for name, code in row.codes.items():
        if code.refusal is not None:
            words.append(f"{name}: refused, {code.refusal}")
            continue
        sizes = (f"TP {size} {run.fault or f'{run.error:.2f}'}" for size, run in code.runs.items())
        words.append(f"{name}: {', '.join(sizes)}")
    return " | ".join([*words, row.fault] if row.fault else words)


def _write(rows: Sequence[Row]) -> None:
    from tests.house.rules import ROOT
    from tools.made_parts import filled

    table.written(_transformers(), rows)
    table.VERDICTS.write_text(table.verdicts(_transformers(), rows), "utf-8")
    page = ROOT / table.PAGE
    content = filled(page.read_text("utf-8"), table.MARKER, table.as_markdown())
    page.write_text(filled(content, table.COUNTS_MARKER, table.counts_as_markdown()), "utf-8")
    print(f"wrote {table.RESULTS.name}, {table.VERDICTS.name} and {table.PAGE}")


def _transformers() -> str:
    from importlib.metadata import version

    return version("transformers")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.model_classes", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("classes", nargs="*", metavar="CLASS", help="names of classes; default: all")
    parser.add_argument("--shard", type=shard, default=(0, 1), metavar="K/N",
                        help="the K-th of N shards; today/N: another one each day")  # fmt: skip
    parser.add_argument("--workers", type=int, default=2, help="classes at the same time (default: 2)")
    parser.add_argument("--json", metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--write", action="store_true", help="record the results")
    return parser


if __name__ == "__main__":
    sys.exit(main())
