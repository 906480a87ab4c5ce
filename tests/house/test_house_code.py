"""Rules for every source file that no linter has: places of libraries and names, sizes, and imports that stay light."""

import ast
import re
import subprocess
import sys

import pytest

from tests.house import package_order, rules

SOURCES = {rules.place(path): path.read_text("utf-8") for path in rules.python_files(*rules.PACKAGES)}
OTHERS = ("tests", "models", "benchmarks", "tools", "integrations")

# Wording, a line that has it, and the only files and folders of the packages that may have it.
ONLY_IN: list[tuple[str, str, tuple[str, ...]]] = [
    (r"\.(?:expanduser|getuser|HF_HUB_CACHE|HF_HOME)\b|\bPath\.home\(", "Path('~').expanduser()", (rules.PATHS_FILE,)),
    (r"\bsys\.executable\b", "Popen([sys.executable])", (rules.INTERPRETER_FILE,)),
    (r"\btrust_remote_code=(?!False\b)", "from_pretrained(path, trust_remote_code=flag)", ()),
    (
        r"\bimport torch\.distributed\b|\bfrom torch\.distributed\b|\bfrom torch import distributed\b",
        "import torch.distributed as dist",
        ("workers/distributed/", "workers/ranks/"),
    ),
    *(
        (rf"^\s*(?:import|from) {library}\b", f"import {library}", tuple(f"{package}/" for package in packages))
        for library, packages in rules.ALLOWED_IN.items()
    ),
]


@pytest.mark.parametrize(("wording", "line", "allowed"), ONLY_IN)
def test_only_these_files_have(wording, line, allowed):
    pattern = re.compile(wording, re.MULTILINE)
    assert pattern.search(line)
    assert [file for file, text in SOURCES.items() if not file.startswith(allowed) and pattern.search(text)] == []


@pytest.mark.slow
def test_files_have_at_most_600_lines_and_functions_70():
    """Ruff counts statements, not lines."""
    others = [*rules.python_files(*OTHERS), *(rules.ROOT / "oarlock").glob("*.py")]
    sources = SOURCES | {rules.place(path): path.read_text("utf-8") for path in others}
    long = [file for file, text in sources.items() if text.count("\n") >= rules.MAX_FILE_LINES]
    for file, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno + 1 >= rules.MAX_FUNCTION_LINES:
                    long.append(f"{file}: {node.name}")
    assert long == []


@pytest.mark.parametrize("package", rules.PACKAGES)
def test_only_public_files_of_the_packages_below_are_imported(package):
    assert package_order.package_faults(SOURCES, package) == []
    assert package_order.public_faults(SOURCES, package) == []


@pytest.mark.parametrize("package", rules.PACKAGES)
def test_the_order_of_folders_has_no_circle(package):
    assert package_order.order_faults(package_order.ORDER[package]) == []


@pytest.mark.parametrize("package", rules.PACKAGES)
def test_imports_follow_the_order_of_folders(package):
    assert package_order.import_faults(SOURCES, package, package_order.ORDER[package]) == []


@pytest.mark.parametrize("package", rules.PACKAGES)
def test_the_order_names_what_is_there(package):
    assert package_order.table_faults(SOURCES, package, package_order.ORDER[package]) == []


def modules_after(code: str) -> set[str]:
    """The modules a fresh interpreter holds after running `code`."""
    script = f"{code}\nimport sys\nprint('MODULES', *sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], cwd=rules.ROOT, capture_output=True, text=True, timeout=60)
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
        "oarlock." + rules.place(path)[:-3].replace("/", ".")
        for path in rules.python_files("engine")
        if path.stem != "__init__"
    ]
    loaded = modules_after("\n".join(f"import {name}" for name in names))
    assert set(names) <= loaded
    assert "torch" not in loaded
