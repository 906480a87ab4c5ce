"""The list in SECURITY.md of every place that processes data from outside, beside the places found in the code.

A place is written as the code names it: `server.llm.tokenizer._read_backend`. A row for a class, a file or a folder
covers everything in it.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.house.rules import PACKAGES, ROOT, called, nodes, place, python_files

HEADING = "## Every place that takes data from outside"
COLUMNS = ("place", "data", "size", "time", "test")
TESTS = ROOT / "tests"

# Calls that open a file, by the last part of the name.
_OPENS = frozenset(
    {"open", "read_text", "read_bytes", "from_file", "fromfile", "memmap", "safe_open", "pread", "preadv"}
)
# Calls that make values of a text.
_PARSES = frozenset({"json.loads", "tomllib.loads", "model_validate_json", "raw_decode"})
# Libraries that process the text or the bytes they are given.
_PROCESSORS = frozenset(
    {"httptools", "huggingface_hub", "jinja2", "llguidance", "regex", "safetensors", "tokenizers", "transformers"}
)
# Methods named `open` that open no file.
_OTHER_OPENS = re.compile(r"(admission_queue|body_memory|requests|Checkpoint|GGUFModel|StructuredOutputManager)\.open$")

# Places whose data comes from the operator, from this package or from another process of the same server.
OWN = {
    "base.host_memory": "files of the kernel",
    "base.python_child": "the null device",
    "server.bench": "files and servers that the operator names",
    "server.cli": "files, answers and lines that the operator names or types",
    "server.config": "the configuration of the operator",
    "server.http.api_keys": "the key file of the operator",
    "server.http.tls": "the certificates of the operator",
    "server.http.docs_page": "files of this package",
    "server.http.pages": "files of this package",
    "server.hub.model_path": "the answer of the download process",
    "server.launch": "messages between processes of the server",
    "engine.config": "a message of the frontend",
    "engine.core": "a message of the frontend",
    "engine.ipc": "frames between processes of the server",
    "engine.replay": "a recording of the operator",
    "workers.config": "a message of the engine",
    "workers.distributed": "memory that the ranks share",
    "workers.doctor": "the command line of the operator",
    "workers.kernels": "files of this package and its compiler",
    "workers.platform": "files of the kernel",
    "workers.ranks": "messages between ranks",
}


@dataclass(frozen=True)
class Row:
    """One row of the list: the places, and the five cells as they are written."""

    places: tuple[str, ...]
    cells: tuple[str, ...]

    def covers(self, found: str) -> bool:
        """Whether `found` is one of the places or is inside of it."""
        return any(found == name or found.startswith(f"{name}.") for name in self.places)


def rows(page: str) -> list[Row]:
    """Return the rows of all tables below `HEADING`. Raises `ValueError` if the page has no such heading."""
    _, heading, rest = page.partition(f"{HEADING}\n")
    if not heading:
        raise ValueError(f"there is no heading {HEADING!r}")
    lines = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
    return [Row(tuple(re.findall(r"`([^`]+)`", one[0])), one) for one in cells]


def faults(found: Row) -> list[str]:
    """Return the faults of one row: cells that are missing, bounds without a number, tests that do not exist."""
    if len(found.cells) != len(COLUMNS):
        return [f"{found.cells[0]}: {len(found.cells)} cells instead of {len(COLUMNS)}"]
    named = dict(zip(COLUMNS, found.cells, strict=True))
    empty = [f"{named['place']}: no {column}" for column in COLUMNS if not named[column]]
    vague = [
        f"{named['place']}: no number in {named[column]!r}"
        for column in ("size", "time")
        if not re.search(r"\d|^as ", named[column])
    ]
    tests = re.findall(r"`(test_\w+\.py)`", named["test"])
    missing = [f"{named['place']}: {name} does not exist" for name in tests if not list(TESTS.rglob(name))]
    untested = [] if tests else [f"{named['place']}: no test"]
    unknown = [f"{name} does not exist" for name in found.places if not name.startswith("/") and not exists(name)]
    return [*empty, *vague, *missing, *untested, *unknown]


def exists(name: str) -> bool:
    """Whether the code has a folder, file, class or function of this dotted name."""
    parts = name.split(".")
    for number in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:number])
        if path.is_dir():
            return number == len(parts)
        if (file := path.with_suffix(".py")).is_file():
            inside = ".".join(parts[number:])
            return not inside or inside in {scope for scope, _ in _scopes(ast.parse(file.read_text("utf-8")))}
    return False


def _scopes(tree: ast.AST, above: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Every function and class with its dotted name inside the module."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{above}{node.name}"
            yield name, node
            yield from _scopes(node, f"{name}.")
        else:
            yield from _scopes(node, above)


def takers(source: str, file: str) -> list[str]:
    """Return the places in one file that open a file, parse a text or import a library that does, sorted."""
    module = Path(file).with_suffix("").as_posix().replace("/", ".")
    found = set()
    for scope, tree in [("", ast.parse(source)), *_scopes(ast.parse(source))]:
        if any(_takes(node) for node in _own_nodes(tree)):
            found.add(f"{module}.{scope}".strip("."))
    imported = {name.split(".")[0] for node in nodes(source) for name in _imported(node)}
    return sorted(found or ({module} if imported & _PROCESSORS else set()))


def _own_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a scope without the functions and classes in it."""
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
            yield from _own_nodes(node)


def _takes(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = called(node) or (node.func.attr if isinstance(node.func, ast.Attribute) else "")
    last = name.rpartition(".")[2]
    return name in _PARSES or last in _PARSES or (last in _OPENS and not _OTHER_OPENS.search(name))


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


def found_in_the_code() -> list[str]:
    """Return every place of the product that takes data, without those of `OWN`."""
    files = python_files(*PACKAGES)
    found = [name for path in files for name in takers(path.read_text("utf-8"), place(path))]
    return [name for name in found if not any(name == own or name.startswith(f"{own}.") for own in OWN)]
