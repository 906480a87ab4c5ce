"""Rules for every source file: where libraries may be imported, nothing that runs received bytes, small files.

Each rule is shown to fail on a planted mistake.
"""

import subprocess
import sys
from functools import cache

import pytest

from tests.house import package_order, rules

PACKAGE_FILES = rules.python_files(*rules.PACKAGES)
FACE_FILES = sorted((rules.ROOT / "oarlock").glob("*.py"))
ALL_FILES = [*PACKAGE_FILES, *rules.python_files("tests", "models", "benchmarks"), *FACE_FILES]
WRITTEN = ("*.md", "*.toml", "*.yml", "*.txt", "Makefile", "Dockerfile", "docs/*.md", "configs/*.toml", ".ci/run")
OF_PACKAGES = (rules.misplaced_libraries, rules.unsafe_code, rules.direct_spawns)
OF_PYTHON = (
    rules.imports_past_the_package,
    rules.home_directories,
    rules.unsearchable_docstrings,
    rules.sizes,
    rules.docstrings_and_handlers,
    rules.unfinished,
)
SOURCES = {rules.place(path): path.read_text("utf-8") for path in PACKAGE_FILES}


def findings(check, files) -> list[str]:
    return [finding for path in files for finding in check(path.read_text("utf-8"), rules.place(path))]


def test_the_packages_are_there():
    assert {rules.place(path).split("/")[0] for path in PACKAGE_FILES} == set(rules.PACKAGES)
    assert len(PACKAGE_FILES) > 30


@cache
def findings_of_every_rule() -> dict[str, list[str]]:
    """Findings by the name of the rule, looked for file by file, so that each file is parsed once."""
    found = {check.__name__: [] for check in (*OF_PACKAGES, *OF_PYTHON)}
    packages = set(PACKAGE_FILES)
    for path in ALL_FILES:
        for check in (*OF_PACKAGES, *OF_PYTHON) if path in packages else OF_PYTHON:
            found[check.__name__] += findings(check, [path])
    return found


@pytest.mark.parametrize("check", OF_PACKAGES, ids=lambda f: f.__name__)
@pytest.mark.slow
def test_every_file_of_the_packages(check):
    assert findings_of_every_rule()[check.__name__] == []


@pytest.mark.parametrize("check", OF_PYTHON, ids=lambda f: f.__name__)
@pytest.mark.slow
def test_every_python_file(check):
    assert findings_of_every_rule()[check.__name__] == []


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


def test_nothing_is_left_undone_in_the_prose_either():
    written = sorted({path for pattern in WRITTEN for path in rules.ROOT.glob(pattern)})
    assert rules.ROOT / "README.md" in written
    assert findings(rules.unfinished, written) == []


@pytest.mark.parametrize(
    ("check", "file", "source"),
    [
        (rules.misplaced_libraries, "engine/core/event_loop.py", "import torch"),
        (rules.misplaced_libraries, "engine/core/event_loop.py", "import pydantic"),
        (rules.misplaced_libraries, "workers/runner/worker_process.py", "import torch.distributed as dist"),
        (rules.imports_past_the_package, "engine/core/event_loop.py", "from engine.types import X"),
        (rules.unsafe_code, "engine/ipc/frames.py", "import pickle"),
        (rules.unsafe_code, "workers/executor.py", "from multiprocessing import Queue"),
        (rules.unsafe_code, "server/endpoints/app.py", "eval('1')"),
        (rules.unsafe_code, "workers/runner/model_runner.py", "import torch\ntorch.load('x')"),
        (rules.unsafe_code, "workers/executor.py", "import subprocess\nsubprocess.run('ls', shell=True)"),
        (
            rules.unsafe_code,
            "server/llm/tokenizer.py",
            "AutoTokenizer.from_pretrained(p, trust_remote_code=flag)",
        ),
        (rules.direct_spawns, "engine/client.py", "import sys, subprocess\nsubprocess.Popen([sys.executable])"),
        (rules.home_directories, "server/cli/models.py", "from pathlib import Path\nPath.home()"),
        (rules.home_directories, "server/cli/models.py", "pathlib.Path.home()"),
        (rules.home_directories, "benchmarks/checkpoint.py", "import os\nos.path.expanduser('~')"),
        (rules.home_directories, "tests/ray/environment.py", "Path('~/x').expanduser()"),
        (rules.home_directories, "server/hub/fetch.py", "cache = constants.HF_HUB_CACHE"),
        (rules.unsearchable_docstrings, "engine/core/event_loop.py", 'def f():\n    """Of a request."""'),
        (rules.sizes, "engine/core/event_loop.py", "x = 1\n" * rules.MAX_FILE_LINES),
        (rules.sizes, "tests/sim/test_fairness.py", "x = 1\n" * rules.MAX_TEST_FILE_LINES),
        (rules.sizes, "engine/core/event_loop.py", "def f():\n" + "    x = 1\n" * rules.MAX_FUNCTION_LINES),
        (rules.docstrings_and_handlers, "engine/core/event_loop.py", "x = 1"),
        (
            rules.docstrings_and_handlers,
            "engine/core/event_loop.py",
            '"""Doc."""\ntry:\n    x = 1\nexcept Exception:\n    pass',
        ),
        (rules.docstrings_and_handlers, "engine/core/event_loop.py", '"""Doc."""\ntry:\n    x = 1\nexcept:\n    ...'),
        (rules.unfinished, "engine/core/event_loop.py", "x = 1  # TO" + "DO later"),
    ],
)
def test_each_rule_can_fail(check, file, source):
    assert len(check(source, file)) >= 1


@pytest.mark.parametrize(
    ("check", "file", "source"),
    [
        (rules.misplaced_libraries, "workers/distributed/parallel_state.py", "import torch.distributed as dist"),
        (
            rules.unsafe_code,
            "workers/distributed/shm_ring.py",
            "from multiprocessing import shared_memory, resource_tracker",
        ),
        (rules.imports_past_the_package, "engine/core/event_loop.py", "from ..types import X"),
        (rules.imports_past_the_package, "engine/core/event_loop.py", "from oarlock import engine"),
        (rules.unsearchable_docstrings, "engine/core/event_loop.py", '"""Queue of open requests."""'),
        (rules.unsafe_code, "workers/runner/model_runner.py", "model.eval()"),
        (rules.home_directories, rules.PATHS_FILE, "import os\nos.path.expanduser('~')"),
        (rules.home_directories, "server/cli/models.py", "from oarlock.base.paths import home\nhome()"),
        (
            rules.docstrings_and_handlers,
            "engine/core/event_loop.py",
            '"""Doc."""\ntry:\n    x = 1\nexcept ProcessLookupError:\n    pass',
        ),
    ],
)
def test_and_what_is_allowed_passes(check, file, source):
    assert check(source, file) == []


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
