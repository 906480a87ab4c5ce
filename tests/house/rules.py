"""Rules for the source code: functions from source text to findings, so that a planted mistake can show that they work.

They read the syntax tree and import nothing of what they check.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("server", "engine", "workers", "base")
MAX_FILE_LINES = 600
MAX_TEST_FILE_LINES = 600
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
DISTRIBUTED_FOLDERS = ("workers/distributed/", "workers/ranks/")
# Starts every Python process of the server, without the caller's folder on the import path.
INTERPRETER_FILE = "base/python_child.py"
# Expands `~` and finds the home directory and the caches: a user without a home ends any other code in a traceback.
PATHS_FILE = "base/paths.py"
HOME_NAMES = {"expanduser", "getuser", "HF_HUB_CACHE", "HF_HOME"}
# Whatever can turn bytes into code. `multiprocessing` pickles what it sends, apart from its shared memory.
DANGEROUS_MODULES = {"pickle", "cPickle", "cloudpickle", "marshal", "dill", "shelve", "joblib", "multiprocessing"}
HARMLESS_SUBMODULES = ("multiprocessing.shared_memory", "multiprocessing.resource_tracker")
DANGEROUS_CALLS = {"eval", "exec", "__import__"}
UNSEARCHABLE = re.compile(r"(What|Those|The same|Of|Whoever|How many)\b")
UNFINISHED = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX", "HA" + "CK")) + r")\b")


@dataclass(frozen=True)
class Import:
    """One imported module. `from a import b` gives both `a` and `a.b`: b may be a module."""

    line: int
    module: str
    is_attribute_or_module: bool = False  # the `a.b` of `from a import b`
    is_relative: bool = False


def python_files(*folders: str) -> list[Path]:
    """Every Python file of these folders of the repository, sorted."""
    return sorted(
        path for folder in folders for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts
    )


def place(path: Path) -> str:
    """A path as the repository names it."""
    return path.relative_to(ROOT).as_posix()


def imports(source: str, file: str) -> Iterator[Import]:
    """Every import at any depth, written as absolute names; `import_module("x")` counts.

    Modules of the packages have the names of their files: `oarlock.engine.types` is engine.types.
    """
    for item in _written_imports(source, file):
        package = item.module.removeprefix("oarlock.")
        yield replace(item, module=package) if package.split(".")[0] in PACKAGES else item


def imports_past_the_package(source: str, file: str) -> list[str]:
    """Imports of `server`, `engine` or `workers`, names that a user's own folder may have: `oarlock.…` is right.

    A relative import becomes a name of the packages without being written so, and passes.
    """
    return [
        f"{file}:{item.line}: imports {item.module}; import oarlock.{item.module} instead"
        for item in _written_imports(source, file)
        if item.module.split(".")[0] in PACKAGES and not item.is_relative
    ]


@lru_cache(maxsize=2)
def nodes(source: str) -> list[ast.AST]:
    """Every node of the syntax tree, the module first; kept for the next rule for the same file."""
    return list(ast.walk(ast.parse(source)))


@cache
def _written_imports(source: str, file: str) -> tuple[Import, ...]:
    """Kept for all rules and tables of imports, unlike the trees, which are large."""
    return tuple(_imports_of(source, file))


def _imports_of(source: str, file: str) -> Iterator[Import]:
    package = file.split("/")[:-1]
    for node in nodes(source):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(node.lineno, alias.name)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield Import(node.lineno, module, is_relative=bool(node.level))
            for alias in node.names:
                name = f"{module}.{alias.name}"
                yield Import(node.lineno, name, is_attribute_or_module=True, is_relative=bool(node.level))
        elif isinstance(node, ast.Call) and called(node).endswith("import_module") and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield Import(node.lineno, name.value)


def called(node: ast.Call) -> str:
    """The dotted name of what is called, or an empty string."""
    parts: list[str] = []
    target: ast.expr = node.func
    while isinstance(target, ast.Attribute):
        parts.append(target.attr)
        target = target.value
    return ".".join([target.id, *reversed(parts)]) if isinstance(target, ast.Name) else ""


def misplaced_libraries(source: str, file: str) -> list[str]:
    """Libraries imported outside the packages that may import them."""
    package = file.split("/")[0]
    findings = []
    for item in imports(source, file):
        top = item.module.split(".")[0]
        if top in ALLOWED_IN and package not in ALLOWED_IN[top]:
            findings.append(f"{file}:{item.line}: {top} may be imported in {', '.join(sorted(ALLOWED_IN[top]))}")
        if item.module.startswith("torch.distributed") and not file.startswith(DISTRIBUTED_FOLDERS):
            findings.append(f"{file}:{item.line}: torch.distributed may be imported in {DISTRIBUTED_FOLDERS}")
    return findings


def unsafe_code(source: str, file: str) -> list[str]:
    """Anything that can turn received bytes into running code."""
    findings = []
    for item in imports(source, file):
        if item.module.split(".")[0] not in DANGEROUS_MODULES or item.module.startswith(HARMLESS_SUBMODULES):
            continue
        siblings = [other.module for other in imports(source, file) if other.line == item.line]
        if any(name.startswith(HARMLESS_SUBMODULES) for name in siblings):
            continue  # `from multiprocessing import shared_memory`
        findings.append(f"{file}:{item.line}: imports {item.module}")
    for node in nodes(source):
        if not isinstance(node, ast.Call):
            continue
        name = called(node)
        if name in DANGEROUS_CALLS or name in ("torch.load", "yaml.load", "os.system", "numpy.load", "np.load"):
            findings.append(f"{file}:{node.lineno}: calls {name}")
        if any(keyword.arg == "shell" for keyword in node.keywords):
            findings.append(f"{file}:{node.lineno}: runs a shell")
        trusted = [keyword.value for keyword in node.keywords if keyword.arg == "trust_remote_code"]
        if any(not (isinstance(value, ast.Constant) and value.value is False) for value in trusted):
            findings.append(f"{file}:{node.lineno}: trusts remote code")
    return findings


def direct_spawns(source: str, file: str) -> list[str]:
    """Python processes that are not started by `INTERPRETER_FILE`."""
    if file == INTERPRETER_FILE:
        return []
    return [
        f"{file}:{node.lineno}: starts Python by itself instead of through {INTERPRETER_FILE}"
        for node in nodes(source)
        if isinstance(node, ast.Attribute) and node.attr == "executable"
    ]


def home_directories(source: str, file: str) -> list[str]:
    """Code that looks for a home directory or a cache by itself: `~` means nothing to a user without a home."""
    if file == PATHS_FILE:
        return []
    return [
        f"{file}:{node.lineno}: {node.attr}; take it from {PATHS_FILE}"
        for node in nodes(source)
        if isinstance(node, ast.Attribute)
        and (node.attr in HOME_NAMES or (node.attr == "home" and "Path" in ast.unparse(node.value)))
    ]


def unsearchable_docstrings(source: str, file: str) -> list[str]:
    """Docstrings whose first words hide their subject: no search for the thing finds them."""
    if file.startswith("tests/clients/scripts/"):
        return []  # libraries send docstrings of models there to the server, as descriptions
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    findings = []
    for node in nodes(source):
        if isinstance(node, documented) and UNSEARCHABLE.match(ast.get_docstring(node) or ""):
            findings.append(f"{file}:{getattr(node, 'lineno', 1)}: name the thing first: a noun and a verb")
    return findings


def sizes(source: str, file: str) -> list[str]:
    """Files and functions that are too long."""
    findings = []
    lines = len(source.splitlines())
    limit = MAX_TEST_FILE_LINES if file.startswith("tests/") else MAX_FILE_LINES
    if lines >= limit:
        findings.append(f"{file}: {lines} lines, the limit is {limit}")
    for node in nodes(source):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length >= MAX_FUNCTION_LINES:
                findings.append(f"{file}:{node.lineno}: {node.name} has {length} lines, limit {MAX_FUNCTION_LINES}")
    return findings


def docstrings_and_handlers(source: str, file: str) -> list[str]:
    """Modules without an opening docstring, and broad handlers that swallow what they catch."""
    module, *others = nodes(source)
    assert isinstance(module, ast.Module)
    findings = [] if ast.get_docstring(module) else [f"{file}: opens without a docstring"]
    for node in others:
        if not isinstance(node, ast.ExceptHandler):
            continue
        broad = node.type is None or (
            isinstance(node.type, ast.Name) and node.type.id in ("Exception", "BaseException")
        )
        empty = all(isinstance(step, ast.Pass | ast.Continue) or _is_ellipsis(step) for step in node.body)
        if broad and empty:
            findings.append(f"{file}:{node.lineno}: swallows every exception")
    return findings


def _is_ellipsis(step: ast.stmt) -> bool:
    return isinstance(step, ast.Expr) and isinstance(step.value, ast.Constant) and step.value.value is ...


def unfinished(source: str, file: str) -> list[str]:
    """Words that mark work left undone."""
    return [
        f"{file}:{number}: {match.group()}"
        for number, line in enumerate(source.splitlines(), 1)
        if (match := UNFINISHED.search(line))
    ]
