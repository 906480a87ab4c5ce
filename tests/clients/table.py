"""The outcome of a run as a table: for the terminal, and between the markers of docs/clients.md."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import Protocol

from tests.clients.matrix import Client
from tests.e2e.running import ROOT
from tools.made_parts import filled

PAGE, MARKER = ROOT / "docs" / "clients.md", "clients"


class Row(Protocol):
    """Row of the table: the outcome of one client."""

    client: Client
    version: str
    exercised: list[str]
    problems: list[str]
    seconds: float
    skipped: str


def as_text(rows: Sequence[Row]) -> str:
    """Format the table for a terminal: one line per client, its problems below it."""
    lines = [f"{'client':18} {'version':10} {'exercised':>9} {'failed':>6} {'seconds':>8}  result"]
    for row in rows:
        result = "FAILED" if row.problems else f"skipped: {row.skipped}" if row.skipped else "ok"
        counts = f"{len(row.exercised):9} {len(row.problems):6} {row.seconds:8.1f}"
        lines.append(f"{row.client.name:18} {row.version:10} {counts}  {result}")
        lines += [f"    {problem}" for problem in row.problems]
    return "\n".join(lines)


def as_markdown(rows: Sequence[Row]) -> str:
    """Format the table for the page, with the number of exercises."""
    lines = ["| client | version | exercises | result |", "|---|---|---|---|"]
    for row in rows:
        result = f"{len(row.problems)} failed" if row.problems else row.skipped or "all passed"
        lines.append(f"| `{row.client.name}` | {row.version} | {len(row.exercised)} | {result} |")
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    return "\n".join([*lines, "", f"Run on {day}."])


def write_docs(rows: Sequence[Row]) -> None:
    """Put the table into the page."""
    PAGE.write_text(filled(PAGE.read_text(), MARKER, as_markdown(rows)))
    print(f"wrote the table in {PAGE.relative_to(ROOT)}")
