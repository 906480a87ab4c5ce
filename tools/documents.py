"""Write the parts of docs/ that are made from the code: tables of options, parameters, faults, folders; pictures.

The tests compare. A part is between two markers of its page; charts are files.

    python -m tools.documents
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from oarlock.server.chat import message_parser
from oarlock.server.chat.tool_parsers import registry as tool_formats
from oarlock.server.cli.bench import vllm_names
from oarlock.server.cli.migrate import dialects, rows
from oarlock.server.config import vllm_flags
from oarlock.server.config.settings import as_markdown
from oarlock.workers import catalogue
from tests.house.rules import PACKAGES, ROOT
from tools import architecture
from tools import parameter_table as api_table
from tools.made_parts import filled


def golden_faults() -> str:
    """Imported late, like the next functions: torch takes seconds."""
    from tests.golden import faults

    return faults.table()


def node_faults() -> str:
    from tests.multihost import faults

    return faults.table()


def measured(what: str) -> str:
    """Imported late as well: the tables of results that were measured on several kinds of processor."""
    from benchmarks import page

    return page.forms() if what == "forms" else page.sections(what)


def model_classes(*, counts: bool) -> str:
    """Imported late as well, with the results of every class of transformers."""
    from benchmarks.model_classes import table

    return table.counts_as_markdown() if counts else table.as_markdown()


def charts() -> dict[Path, str]:
    """Charts of these results, and what `tools/pictures.py` draws, by their files."""
    from benchmarks import page
    from tools import pictures

    return {ROOT / "docs" / name: svg for name, svg in page.pictures().items()} | pictures.pictures()


# (page, name of its marker, what belongs between the markers)
MADE: list[tuple[str, str, Callable[[], str]]] = [
    ("docs/configuration.md", "options", as_markdown),
    ("docs/configuration.md", "vllm-flags", vllm_flags.as_markdown),
    *(
        ("docs/terminal.md", f"migrate-{each.title.lower().replace(' ', '-')}", partial(rows.as_markdown, each.table))
        for each in dialects.DIALECTS
    ),
    ("docs/benchmarking.md", "vllm-bench", partial(rows.as_markdown, vllm_names.TABLE)),
    ("docs/chat.md", "tool-formats", tool_formats.as_markdown),
    ("docs/chat.md", "reasoning-formats", message_parser.formats_as_markdown),
    *(("docs/architecture.md", f"{package}-picture", partial(architecture.picture, package)) for package in PACKAGES),
    ("docs/api.md", "parameters", api_table.as_markdown),
    ("docs/models.md", "models-text", partial(catalogue.as_markdown, encoders=False)),
    ("docs/models.md", "models-encoders", partial(catalogue.as_markdown, encoders=True)),
    ("docs/models.md", "models-classes-counts", partial(model_classes, counts=True)),
    ("docs/models.md", "models-classes", partial(model_classes, counts=False)),
    ("docs/accuracy.md", "golden-faults", golden_faults),
    ("docs/scaling.md", "node-faults", node_faults),
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
