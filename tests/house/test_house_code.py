"""Rules for every source file that no linter has: places of names, sizes, and imports that stay light."""

import ast
import re
import subprocess
import sys

import pytest

from tests.house.rules import PACKAGES, ROOT, place, python_files

SOURCES = {place(path): path.read_text("utf-8") for path in python_files(*PACKAGES)}
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 70
OTHERS = ("tests", "models", "benchmarks", "tools", "integrations")

# Wording, a line that has it, and the only files and folders of the packages that may have it.
ONLY_IN: list[tuple[str, str, tuple[str, ...]]] = [
    (r"\.(?:expanduser|getuser|HF_HUB_CACHE|HF_HOME)\b|\bPath\.home\(", "Path('~').expanduser()", ("base/paths.py",)),
    (r"\bsys\.executable\b", "Popen([sys.executable])", ("base/python_child.py",)),
    (
        r"\btrust_remote_code=(?!False\b)",
        "from_pretrained(path, trust_remote_code=flag)",
        ("server/config/settings.py", "workers/transformers_backend/"),
    ),
    (
        r"\bimport torch\.distributed\b|\bfrom torch\.distributed\b|\bfrom torch import distributed\b",
        "import torch.distributed as dist",
        ("workers/distributed/", "workers/ranks/"),
    ),
]


@pytest.mark.parametrize(("wording", "line", "allowed"), ONLY_IN)
def test_only_these_files_have(wording, line, allowed):
    pattern = re.compile(wording, re.MULTILINE)
    assert pattern.search(line)
    assert [file for file, text in SOURCES.items() if not file.startswith(allowed) and pattern.search(text)] == []


@pytest.mark.slow
def test_files_and_functions_are_short():
    """Ruff counts statements, not lines."""
    others = [*python_files(*OTHERS), *(ROOT / "oarlock").glob("*.py")]
    sources = SOURCES | {place(path): path.read_text("utf-8") for path in others}
    long = [file for file, text in sources.items() if text.count("\n") >= MAX_FILE_LINES]
    for file, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno + 1 >= MAX_FUNCTION_LINES:
                    long.append(f"{file}: {node.name}")
    assert long == []


def modules_after(code: str) -> set[str]:
    """The modules a fresh interpreter holds after running `code`."""
    script = f"{code}\nimport sys\nprint('MODULES', *sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    return set(result.stdout.rsplit("MODULES ", 1)[1].split())


@pytest.mark.slow
def test_help_is_quick_because_it_imports_nothing_heavy():
    calls = "".join(
        f"\ntry:\n    main({arguments!r})\nexcept SystemExit as end:\n    assert not end.code"
        for arguments in (["--help"], ["serve", "--help"], ["--version"])
    )
    assert modules_after(f"from oarlock.server.cli.main import main{calls}").isdisjoint(
        {"torch", "transformers", "fastapi"}
    )


@pytest.mark.slow
def test_the_engine_imports_no_torch():
    names = [
        "oarlock." + place(path)[:-3].replace("/", ".") for path in python_files("engine") if path.stem != "__init__"
    ]
    loaded = modules_after("\n".join(f"import {name}" for name in names))
    assert set(names) <= loaded
    assert "torch" not in loaded
