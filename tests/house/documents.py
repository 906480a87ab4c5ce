"""The parts of docs/ that are made from the code: tables of options, parameters and faults, the map of files.

Run as a program it writes them; the tests compare. Knows markers and docstrings, nothing of what they mean.

    python -m tests.house.documents
"""

import ast
import re
from collections.abc import Callable

from server.config import vllm_flags
from server.config.settings import as_markdown
from tests.house import parameter_table as api_table
from tests.house.rules import PACKAGES, ROOT, place, python_files


def file_map() -> str:
    """One table per package: each file and the first sentence of its docstring."""
    parts = []
    for package in PACKAGES:
        parts += [f"### `{package}/`", "", "| file | purpose |", "|---|---|"]
        for path in python_files(package):
            text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            name = place(path).removeprefix(f"{package}/")
            parts.append(f"| `{name}` | {first_sentence(text)} |")
        parts.append("")
    return "\n".join(parts)


def first_sentence(docstring: str) -> str:
    """Up to the first full stop that ends a sentence of the first paragraph."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[.])\s", paragraph)[0].replace("|", "\\|")


def golden_faults() -> str:
    """Imported late, like the next: torch takes seconds."""
    from tests.golden import faults

    return faults.table()


def verify_faults() -> str:
    from tests.unit.workers import verify_faults

    return verify_faults.table()


# (page, name of its marker, what belongs between the markers)
MADE: list[tuple[str, str, Callable[[], str]]] = [
    ("docs/configuration.md", "options", as_markdown),
    ("docs/configuration.md", "vllm-flags", vllm_flags.as_markdown),
    ("docs/architecture.md", "files", file_map),
    ("docs/api.md", "parameters", api_table.as_markdown),
    ("docs/accuracy.md", "golden-faults", golden_faults),
    ("docs/accuracy.md", "verify-faults", verify_faults),
]


def filled(page: str, marker: str, content: str) -> str:
    """`page` with `content` between its markers. A page without them is a mistake."""
    begin, end = f"<!-- made from the code: {marker} -->\n", f"<!-- end: {marker} -->"
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"the markers of {marker} are missing")
    return f"{before}{begin}\n{content.strip()}\n\n{end}{after}"


def main() -> int:
    for name, marker, make in MADE:
        path = ROOT / name
        path.write_text(filled(path.read_text(), marker, make()))
        print(f"wrote {marker} in {name}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
