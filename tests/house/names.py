"""Finds names in a page's backticks that the repository lacks: files, modules, classes and functions."""

import ast
import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import oarlock
from tests.house.documents import hand_written
from tests.house.rules import PACKAGES, ROOT, python_files

CODE_SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
PATH = re.compile(r"[\w.*{},/-]+")
MODULE = re.compile(r"\w+(\.\w+)+")
# Spans that name a class or a function: `Scheduler`, `Scheduler.schedule`, `main()`, `EngineClient.submit()`.
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?")
NAME = re.compile(r"(?:[A-Z][a-z]\w*|[A-Z]+[a-z]\w*)(?:\.\w+)?(?:\(\))?|\w+\(\)")


def spans(page: str) -> list[str]:
    """The text of every code span, without fenced blocks and what is made from the code."""
    return CODE_SPAN.findall(FENCED.sub("", hand_written(page)))


def missing_files(page: str) -> list[str]:
    """Paths from the root of the repository, names of Python files and modules that do not exist."""
    top = {path.name for path in ROOT.iterdir() if path.is_dir()}
    missing = []
    for span in spans(page):
        first = re.split(r"[/.]", span)[0]
        if PATH.fullmatch(span) and "/" in span and span.split("/")[0] in top:
            if not any(True for _ in ROOT.glob(span.rstrip("/").replace("NAME", "*"))):
                missing.append(span)
        elif re.fullmatch(r"\w+\.(py|cpp)", span):
            if not any(span in names for names in _file_names()):
                missing.append(span)
        elif MODULE.fullmatch(span) and first in ("oarlock", "tests", "benchmarks") and not _module_exists(span):
            missing.append(span)
    return missing


def broken_links(path: Path, page: str) -> list[str]:
    """Links of a page at `path` to files and headings of the repository that do not exist."""
    broken = []
    for target in LINK.findall(FENCED.sub("", page)):
        file, _, heading = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not there.exists():
            broken.append(target)
        elif heading and there.suffix == ".md":
            text = page if there == path else there.read_text("utf-8")
            if heading not in {_anchor(title) for title in HEADING.findall(FENCED.sub("", text))}:
                broken.append(target)
    return broken


def _anchor(title: str) -> str:
    """A heading as GitHub names it in a link."""
    return re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()).replace(" ", "-")


def missing_names(page: str) -> list[str]:
    """Classes, functions and methods that nothing in the repository defines."""
    known = defined_names()
    missing = []
    for span in spans(page):
        if NAME.fullmatch(span) and not (ROOT / span).exists():
            owner, _, member = span.removesuffix("()").partition(".")
            if hasattr(builtins, owner):
                continue
            if owner not in known or (member and member not in known[owner]):
                missing.append(span)
    return missing


def foreign_names(page: str, elsewhere: str) -> list[str]:
    """Identifiers that occur neither in a file that their section (###) names nor in `elsewhere`."""
    missing = []
    for section in re.split(r"^###? ", page, flags=re.MULTILINE):
        found = spans(section)
        files = [ROOT / span for span in found if "/" in span and (ROOT / span).is_file()]
        words = {*dir(builtins)} | set(
            re.findall(r"\w+", " ".join([elsewhere, *(path.read_text("utf-8") for path in files)]))
        )
        for span in found:
            if IDENTIFIER.fullmatch(span) and not words.issuperset(span.removesuffix("()").split(".")):
                missing.append(span)
    return missing


@cache
def defined_names() -> dict[str, set[str]]:
    """Every class and function of the packages and tests, and for classes the names of their methods and fields."""
    known: dict[str, set[str]] = {}
    for path in python_files(*PACKAGES, "tests", "benchmarks"):
        for node in _definitions(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef):
                members = known.setdefault(node.name, set())
                members |= {part.name for part in node.body if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef)}
                members |= {
                    part.target.id
                    for part in node.body
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
                }
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                known.setdefault(node.name, set())
    return known


def _definitions(node: ast.AST) -> Iterator[ast.AST]:
    """Classes and functions at any depth: they stand among statements, so no expression is looked at."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):
            yield child
            yield from _definitions(child)


@cache
def _file_names() -> list[set[str]]:
    folders = (*PACKAGES, "tests", "models", "benchmarks")
    return [{path.name for path in (ROOT / folder).rglob("*.*")} for folder in folders]


def _module_exists(name: str) -> bool:
    """Whether a dotted name is a module, or a name in a module."""
    path = Path(ROOT, *name.split("."))
    if path.parent.name == "oarlock":
        return path.is_dir() or hasattr(oarlock, path.name)
    return path.with_suffix(".py").is_file() or path.is_dir() or path.parent.with_suffix(".py").is_file()
