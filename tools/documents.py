"""Write the parts of docs/ that are made from the code: tables of options, parameters, faults, folders; pictures.

The tests compare. A part is between two markers of its page; charts are files.

    python -m tools.documents
"""

import ast
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

from oarlock.server.chat import message_parser
from oarlock.server.chat.tool_parsers import registry as tool_formats
from oarlock.server.config import vllm_flags
from oarlock.server.config.settings import as_markdown
from tests.house.package_order import ORDER, entry_graph, transitive_reduction
from tests.house.rules import PACKAGES, ROOT, place, python_files
from tools import parameter_table as api_table
from tools.made_parts import filled


def room_table(package: str) -> str:
    """Folders of a package and its public files, each with the first sentence of its docstring."""
    lines = ["| | |", "|---|---|"]
    for path in python_files(package):
        file = place(path)
        inside = file.removeprefix(f"{package}/").split("/")
        if inside[-1] == "__init__.py" and len(inside) == 2:
            name = f"{inside[0]}/"
        elif inside[-1] != "__init__.py" and len(inside) == 1:
            name = inside[0]
        else:
            continue
        purpose = first_sentence(ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "")
        lines.append(f"| `{name}` | {purpose} |")
    return "\n".join(lines)


def picture(package: str) -> str:
    """The imports between the folders of a package as a Mermaid graph, without arrows that a longer way implies."""
    sources = {place(path): path.read_text("utf-8") for path in python_files(package)}
    order, found = ORDER[package], entry_graph(sources, package)
    used = {name: set(order[name] & found.get(name, set())) for name in order}
    lines = ["```mermaid", "flowchart TD"]
    for name in order:
        lines.append(f'  {_node(name)}(["{name}"])' if name.endswith(".py") else f'  {_node(name)}["{name}/"]')
    for name, below in transitive_reduction(used).items():
        if below:
            lines.append(f"  {_node(name)} --> {' & '.join(_node(other) for other in order if other in below)}")
    return "\n".join([*lines, "```"])


def _node(name: str) -> str:
    return "n_" + re.sub(r"\W", "_", name)


def first_sentence(docstring: str) -> str:
    """Up to the first full stop that ends a sentence of the first paragraph."""
    paragraph = " ".join(docstring.split("\n\n")[0].split())
    return re.split(r"(?<=[.])\s", paragraph)[0].replace("|", "\\|")


def golden_faults() -> str:
    """Imported late, like the next: torch takes seconds."""
    from tests.golden import faults

    return faults.table()


def verify_faults() -> str:
    from tests.unit.workers.verify import faults as verify_faults

    return verify_faults.table()


def node_faults() -> str:
    from tests.multihost import faults

    return faults.table()


def measured(what: str) -> str:
    """Imported late as well: the tables of results that were measured on several kinds of processor."""
    from benchmarks import page

    return page.forms() if what == "forms" else page.sections(what)


def kernel_costs() -> str:
    from benchmarks import kernel_costs

    return kernel_costs.as_markdown()


def charts() -> dict[Path, str]:
    """Charts of these results, and what `tools/pictures.py` draws, by their files."""
    from benchmarks import page
    from tools import pictures

    return {ROOT / "docs" / name: svg for name, svg in page.pictures().items()} | pictures.pictures()


# (page, name of its marker, what belongs between the markers)
MADE: list[tuple[str, str, Callable[[], str]]] = [
    ("docs/configuration.md", "options", as_markdown),
    ("docs/configuration.md", "vllm-flags", vllm_flags.as_markdown),
    ("docs/chat.md", "tool-formats", tool_formats.as_markdown),
    ("docs/chat.md", "reasoning-formats", message_parser.formats_as_markdown),
    *(("docs/architecture.md", f"{package}-picture", partial(picture, package)) for package in PACKAGES),
    *(("docs/architecture.md", f"{package}-rooms", partial(room_table, package)) for package in PACKAGES),
    ("docs/api.md", "parameters", api_table.as_markdown),
    ("docs/accuracy.md", "golden-faults", golden_faults),
    ("docs/accuracy.md", "verify-faults", verify_faults),
    ("docs/scaling.md", "node-faults", node_faults),
    ("docs/gpu.md", "kernel-costs", kernel_costs),
    *(("docs/performance.md", f"benchmarks-{what}", partial(measured, what)) for what in ("peers", "forms", "scaling")),
]


def main() -> int:
    for name, marker, make in MADE:
        path = ROOT / name
        path.write_text(filled(path.read_text(), marker, make()))
        print(f"wrote {marker} in {name}")
    for path, svg in charts().items():
        path.write_text(svg)
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
