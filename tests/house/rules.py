"""Names and limits that the rules for the source code share, and the imports of a file."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("server", "engine", "workers", "base")
_IN_PACKAGES = tuple(f"oarlock.{name}" for name in PACKAGES)
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 70

# Libraries that only some packages import.
ALLOWED_IN = {
    "torch": {"workers"},
    "safetensors": {"workers"},
    "transformers": {"server", "workers"},
    "tokenizers": {"server"},
    "fastapi": {"server"},
    "starlette": {"server"},
    "sse_starlette": {"server"},
    "uvicorn": {"server"},
    "pydantic": {"server"},
    "prometheus_client": {"server"},
    "shtab": {"server"},
    "opentelemetry": {"server"},
    "zmq": {"engine"},
    "msgspec": {"engine"},
}
# Starts every Python process of the server, without the caller's folder on the import path.
INTERPRETER_FILE = "base/python_child.py"
# Expands `~` and finds the home directory and the caches: a user without a home ends any other code in a traceback.
PATHS_FILE = "base/paths.py"


@dataclass(frozen=True)
class Import:
    """One imported module. `from a import b` gives both `a` and `a.b`: b may be a module."""

    line: int
    module: str


def python_files(*folders: str) -> list[Path]:
    """Return every Python file of these folders of the repository, sorted."""
    return sorted(
        path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts
    )


def place(path: Path) -> str:
    """Return a path as the repository names it."""
    return path.relative_to(ROOT).as_posix()


@cache
def imports(source: str, file: str) -> tuple[Import, ...]:
    """Return every import at any depth, written as absolute names; `import_module("x")` counts.

    Modules of the packages have the names of their files: `oarlock.engine.types` is engine.types.
    """
    return tuple(
        Import(line, name.removeprefix("oarlock.") if name.startswith(_IN_PACKAGES) else name)
        for line, name in _imports_of(source, file)
    )


def _imports_of(source: str, file: str) -> Iterator[tuple[int, str]]:
    package = file.split("/")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield node.lineno, module
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from ((node.lineno, str(name.value)) for name in node.args if isinstance(name, ast.Constant))
