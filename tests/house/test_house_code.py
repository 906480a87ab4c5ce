"""The house stands as drawn: imports point down, nothing dangerous travels, files stay small. Each rule can fail."""

import subprocess
import sys

import pytest

from tests.house import rules

ROOM_FILES = rules.python_files(*rules.ROOMS)
ALL_FILES = [*ROOM_FILES, rules.ROOT / "oarlock.py", *rules.python_files("tests", "models")]
WRITTEN = ("*.md", "*.toml", "*.yml", "*.txt", "Makefile", "Dockerfile", "docs/*.md", "configs/*.toml", ".ci/run")


def findings(check, files) -> list[str]:
    return [finding for path in files for finding in check(path.read_text("utf-8"), rules.place(path))]


def test_the_rooms_are_there():
    assert {rules.place(path).split("/")[0] for path in ROOM_FILES} == set(rules.ROOMS)
    assert len(ROOM_FILES) > 30


@pytest.mark.parametrize(
    "check", [rules.upward_imports, rules.strangers, rules.dangers, rules.spawns], ids=lambda f: f.__name__
)
def test_rooms(check):
    assert findings(check, ROOM_FILES) == []


@pytest.mark.parametrize("check", [rules.sizes, rules.silence, rules.unfinished], ids=lambda f: f.__name__)
def test_every_python_file(check):
    assert findings(check, ALL_FILES) == []


def test_nothing_is_left_undone_in_the_prose_either():
    written = sorted({path for pattern in WRITTEN for path in rules.ROOT.glob(pattern)})
    assert rules.ROOT / "README.md" in written
    assert findings(rules.unfinished, written) == []


@pytest.mark.parametrize(
    ("check", "file", "source"),
    [
        (rules.upward_imports, "workers/worker/model_runner.py", "import engine.types"),
        (rules.upward_imports, "workers/worker/model_runner.py", "from engine import types"),
        (
            rules.upward_imports,
            "engine/core/event_loop.py",
            "def f():\n    from server.config.settings import Settings",
        ),
        (rules.upward_imports, "engine/core/event_loop.py", "from workers.worker.model_runner import Runner"),
        (
            rules.upward_imports,
            "engine/core/event_loop.py",
            "import importlib\nimportlib.import_module('workers.worker.model_runner')",
        ),
        (rules.upward_imports, "server/api/app.py", "from engine.scheduler.scheduler import Scheduler"),
        (rules.upward_imports, "server/api/app.py", "from engine import scheduler"),
        (rules.upward_imports, "server/api/app.py", "from workers.config import WorkerConfig"),
        (
            rules.upward_imports,
            "server/api/routes/chat_completions.py",
            "from ....engine.scheduler.scheduler import Scheduler",
        ),
        (rules.strangers, "engine/core/event_loop.py", "import torch"),
        (rules.strangers, "server/api/app.py", "from torch import Tensor"),
        (rules.strangers, "engine/core/event_loop.py", "import pydantic"),
        (rules.strangers, "workers/worker/worker_process.py", "from starlette.responses import Response"),
        (rules.strangers, "workers/worker/worker_process.py", "import torch.distributed as dist"),
        (rules.strangers, "workers/worker/worker_process.py", "from torch import distributed"),
        (rules.dangers, "engine/ipc/frames.py", "import pickle"),
        (rules.dangers, "engine/ipc/frames.py", "from marshal import loads"),
        (rules.dangers, "workers/executor.py", "from multiprocessing import Queue"),
        (rules.dangers, "workers/executor.py", "import multiprocessing as mp"),
        (rules.dangers, "server/api/app.py", "eval('1')"),
        (rules.dangers, "workers/worker/model_runner.py", "import torch\ntorch.load('x')"),
        (rules.dangers, "workers/executor.py", "import subprocess\nsubprocess.run('ls', shell=True)"),
        (rules.dangers, "server/tokenizer/tokenizer.py", "AutoTokenizer.from_pretrained(p, trust_remote_code=flag)"),
        (rules.spawns, "engine/client.py", "import sys, subprocess\nsubprocess.Popen([sys.executable])"),
        (rules.sizes, "engine/core/event_loop.py", "x = 1\n" * rules.MAX_FILE_LINES),
        (rules.sizes, "engine/core/event_loop.py", "def f():\n" + "    x = 1\n" * rules.MAX_FUNCTION_LINES),
        (rules.silence, "engine/core/event_loop.py", "x = 1"),
        (rules.silence, "engine/core/event_loop.py", '"""Doc."""\ntry:\n    x = 1\nexcept Exception:\n    pass'),
        (rules.silence, "engine/core/event_loop.py", '"""Doc."""\ntry:\n    x = 1\nexcept:\n    ...'),
        (rules.unfinished, "engine/core/event_loop.py", "x = 1  # TO" + "DO later"),
    ],
)
def test_each_rule_can_fail(check, file, source):
    assert len(check(source, file)) >= 1


@pytest.mark.parametrize(
    ("check", "file", "source"),
    [
        (rules.upward_imports, "server/api/app.py", "from engine import types\nfrom engine.client import EngineClient"),
        (
            rules.upward_imports,
            "engine/core/event_loop.py",
            "from workers.executor import ProcessGroup\nimport workers.protocol",
        ),
        (
            rules.upward_imports,
            "workers/worker/model_runner.py",
            "from workers.layers import linear\nfrom .layers import norm",
        ),
        (rules.strangers, "workers/distributed/parallel_state.py", "import torch.distributed as dist"),
        (
            rules.dangers,
            "workers/distributed/shm_ring.py",
            "from multiprocessing import shared_memory, resource_tracker",
        ),
        (rules.dangers, "workers/worker/model_runner.py", "model.eval()"),
        (
            rules.silence,
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


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["--version"]])
def test_help_is_quick_because_it_imports_nothing_heavy(arguments):
    call = f"try:\n    main({arguments!r})\nexcept SystemExit as end:\n    assert not end.code"
    assert modules_after(f"from server.entrypoints.cli import main\n{call}").isdisjoint(
        {"torch", "transformers", "fastapi"}
    )


def test_the_engine_imports_no_torch():
    names = [
        rules.place(path)[:-3].replace("/", ".") for path in rules.python_files("engine") if path.stem != "__init__"
    ]
    loaded = modules_after("\n".join(f"import {name}" for name in names))
    assert set(names) <= loaded
    assert "torch" not in loaded
