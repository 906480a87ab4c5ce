"""The made parts of docs/performance.md: one section per kind of processor, from the files in `benchmarks/results`.

python -m benchmarks.page result.json scaling.json    # take these in, then write the page
python -m benchmarks.page                             # write the page from what is there
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks import machine, tables
from benchmarks.environments import HERE, ROOT

RESULTS = HERE / "results"
SECTIONS = {"peers": tables.peers, "scaling": tables.scaling}


def take_in(path: Path) -> Path:
    """Store a result under its kind of processor, figures rounded to four digits; it replaces the one before."""
    result = json.loads(path.read_text())
    out = RESULTS / f"{result['what']}-{result['machine']['kind']}.json"
    RESULTS.mkdir(exist_ok=True)
    out.write_text(json.dumps(rounded(result), indent=1) + "\n")
    return out


def rounded(value: Any) -> Any:
    """Round every float in `value` to four significant digits."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    return [rounded(inner) for inner in value] if isinstance(value, list) else value


def sections(what: str, folder: Path = RESULTS) -> str:
    """One section per kind of processor that a result is there from."""
    parts = []
    for kind, title in machine.TITLES.items():
        path = folder / f"{what}-{kind}.json"
        if path.is_file():
            result = json.loads(path.read_text())
            parts += [f"### {title}", f"```text\n{result['command']}\n```", SECTIONS[what](result)]
    return "\n\n".join(parts) or "Not measured yet."


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.page", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="results to store first")
    for path in parser.parse_args(argv).files:
        print(f"wrote {take_in(path).relative_to(ROOT)}")
    from tests.house.documents import filled  # which imports this file

    page = ROOT / "docs" / "performance.md"
    for what in SECTIONS:
        page.write_text(filled(page.read_text(), f"benchmarks-{what}", sections(what)))
    print(f"wrote {page.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
