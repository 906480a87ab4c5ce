"""The results of all classes as files: measurements, the packaged table of verdicts, and the documentation's table.

Torch-free: the documentation is made from `results.json`, without another measurement.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.model_classes.outcome import OURS, THEIRS, Row
from tests.house.rules import ROOT

RESULTS = Path(__file__).with_name("results.json")
VERDICTS = ROOT / "workers/transformers_backend/tested_classes.json"
PAGE, MARKER, COUNTS_MARKER = "docs/models.md", "models-classes", "models-classes-counts"
_CODES = {OURS: "a description", THEIRS: "transformers' code"}


def read(path: Path = RESULTS) -> tuple[str, list[Row]]:
    """Return the version of transformers that was measured, and the rows."""
    found = json.loads(path.read_text("utf-8"))
    return found["transformers"], [Row.decoded(row) for row in found["classes"]]


def written(version: str, rows: Iterable[Row], path: Path = RESULTS) -> None:
    """Write the rows, sorted by name."""
    ordered = sorted(rows, key=lambda row: row.name)
    lines = ",\n".join(json.dumps(row.encoded()) for row in ordered)
    path.write_text(f'{{"transformers": {json.dumps(version)}, "classes": [\n{lines}\n]}}\n', "utf-8")


def verdicts(version: str, rows: Sequence[Row]) -> str:
    """Return the text of the packaged table, which decides what transformers' code may serve."""
    lines = ",\n".join(f"  {json.dumps(row.name)}: {json.dumps(row.verdict)}" for row in rows)
    return f'{{"transformers": {json.dumps(version)}, "classes": {{\n{lines}\n}}}}\n'


def merged(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Return `old` with the rows of `new` in place of rows of the same classes."""
    by_name = {row.name: row for row in (*old, *new)}
    return [by_name[name] for name in sorted(by_name)]


def changes(old: Sequence[Row], new: Sequence[Row]) -> list[str]:
    """Return a line for each class whose verdict or server differs between `old` and `new`."""
    known = {row.name: row for row in old}
    lines = []
    for row in new:
        before = known.get(row.name)
        if before is None:
            lines.append(f"{row.name}: not in the table, now {_served(row)}")
        elif _served(before) != _served(row):
            lines.append(f"{row.name}: {_served(before)} in the table, now {_served(row)}")
    return lines


def _served(row: Row) -> str:
    parts = []
    for name in (OURS, THEIRS):
        code = row.codes.get(name)
        if code is not None:
            parts.append(f"{name} TP {code.ranks}" if code.reason is None else f"{name} refused")
    return ", ".join(parts) or "refused"


def counts(rows: Sequence[Row]) -> dict[str, Any]:
    """Return how many classes are served, by which code, and with two ranks."""
    servers = Counter(row.server for row in rows)
    served = [row for row in rows if row.server is not None]
    by_theirs = [row.codes[THEIRS] for row in rows if THEIRS in row.codes and row.codes[THEIRS].reason is None]
    return {
        "classes": len(rows),
        "served": len(served),
        "described": servers[OURS],
        "transformers": servers[THEIRS],
        "two ranks": sum(row.codes[str(row.server)].ranks > 1 for row in served),
        "transformers' code can": len(by_theirs),
        "refused": servers[None],
    }


def counts_as_markdown() -> str:
    """Return one sentence with the numbers of classes."""
    version, rows = read()
    found = counts(rows)
    return "\n".join(
        [
            f"Of {found['classes']} classes of transformers {version}, {found['served']} are served: "
            f"{found['described']} by a description and",
            f"{found['transformers']} by transformers' code. {found['two ranks']} of them are right on two ranks. "
            f"{found['refused']} are refused.",
        ]
    )


def as_markdown() -> str:
    """Return the table of all classes."""
    _, rows = read()
    head = ["class", "served by", "ranks", "error", "equal bits", "remarks"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    lines += [f"| {' | '.join(_cells(row))} |" for row in rows]
    return "\n".join(lines)


def _cells(row: Row) -> list[str]:
    served = row.server
    theirs = row.codes.get(THEIRS)
    if served is None:
        return [f"`{row.name}`", "refused", "", "", "", _text(_why_not(row))]
    code = row.codes[served]
    other = ""
    if served == OURS and theirs is not None:
        other = f"transformers' code: {f'right on {theirs.ranks}' if theirs.reason is None else theirs.reason}"
    elif code.ranks == 1:
        other = f"two ranks: {code.runs[2].fault}"
    right = [run for size, run in code.runs.items() if size <= code.ranks]
    same = "yes" if all(run.same_bits for run in right) else "no"
    error = max(run.error or 0.0 for run in right)
    return [f"`{row.name}`", _CODES[served], str(code.ranks), f"{error:.1f}", same, _text(other)]


def _why_not(row: Row) -> str:
    reasons = [row.fault, *(row.codes[name].reason for name in (OURS, THEIRS) if name in row.codes)]
    return "; ".join(reason for reason in reasons if reason)


def _text(words: str) -> str:
    return words.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_")
