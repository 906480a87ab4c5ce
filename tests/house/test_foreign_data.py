"""SECURITY.md lists every route, file reader and parser of data from outside, with a bound and a test for each.

A place is written as the code names it: `server.llm.tokenizer._read_backend`. A row for a class, a file or a folder
covers everything in it.
"""

import ast
import re
from collections.abc import Iterator

from tests.house.rules import PACKAGES, ROOT, place, python_files
from tests.house.test_house_documents import routes

# Calls that open a file or make values of a text, and methods named `open` that open no file.
TAKES = re.compile(
    r"(?:^|\.)(?:open|read_text|read_bytes|from_file|fromfile|memmap|safe_open|preadv?|model_validate_json|raw_decode)$"
    r"|^(?:json|tomllib)\.loads$"
)
OTHER_OPENS = re.compile(
    r"(?:admission_queue|body_memory|requests|Adapter|Checkpoint|GGUFModel|StructuredOutputManager)\.open$"
)
# Libraries that process the text or the bytes they are given.
PROCESSORS = re.compile(
    r"^\s*(?:import|from) (?:httptools|huggingface_hub|jinja2|llguidance|regex|safetensors|tokenizers|transformers)\b",
    re.MULTILINE,
)
SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
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

_, _, LIST = (ROOT / "SECURITY.md").read_text("utf-8").partition("## Every place that takes data from outside\n")
ROWS = [line.strip("| ").split(" | ") for line in LIST.partition("\n## ")[0].splitlines() if line.startswith("| `")]
LISTED = {name for row in ROWS for name in re.findall(r"`([^`]+)`", row[0])}


def calls(tree: ast.AST, scope: str) -> Iterator[tuple[str, str]]:
    """Yield the innermost class or function of each call, and the dotted name of the call."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield scope, ast.unparse(node.func)
        yield from calls(node, f"{scope}.{node.name}" if isinstance(node, SCOPES) else scope)


def readers(source: str, file: str) -> set[str]:
    """Return the places in a file that take data; the file itself if it only imports a library that does."""
    module = file.removesuffix(".py").replace("/", ".")
    found = {
        scope for scope, name in calls(ast.parse(source), module) if TAKES.search(name) and not OTHER_OPENS.search(name)
    }
    return found or ({module} if PROCESSORS.search(source) else set())


def exists(name: str) -> bool:
    """Return whether the code has a folder, file, class or function of this dotted name."""
    parts = name.split(".")
    for number in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:number])
        if path.is_dir():
            return number == len(parts)
        if (file := path.with_suffix(".py")).is_file():
            source = file.read_text("utf-8")
            return all(re.search(rf"^\s*(?:async )?(?:class|def) {part}\b", source, re.M) for part in parts[number:])
    return False


def test_every_route_has_its_row():
    assert {name for name in LISTED if name.startswith("/")} == {path.replace(":path", "") for path in routes()}


def test_every_reader_of_foreign_data_has_its_row():
    assert readers("class A:\n    def b(self):\n        with self.path.open('rb'): ...", "engine/new.py") == {
        "engine.new.A.b"
    }
    found = set()
    for path in python_files(*PACKAGES):
        found |= readers(path.read_text("utf-8"), place(path))
    assert len(found) > 60
    covered = tuple(f"{name}." for name in (*LISTED, *OWN))
    assert sorted(name for name in found if not f"{name}.".startswith(covered)) == []


def test_every_row_has_bounds_and_tests_that_exist():
    for row in ROWS:
        names, _, size, time, tests = row  # five cells
        assert re.search(r"\d|^as ", size) and re.search(r"\d|^as ", time), f"no bound: {names}"
        assert re.search(r"`test_\w+\.py`", tests), f"no test: {names}"
    files = {path.name for path in (ROOT / "tests").rglob("test_*.py")}
    assert [name for name in re.findall(r"`(test_\w+\.py)`", LIST) if name not in files] == []
    assert [name for name in (*LISTED, *OWN) if not name.startswith("/") and not exists(name)] == []
