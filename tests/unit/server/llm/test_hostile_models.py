"""Hostile and damaged model directories: each ends as one line of cause, with the file's name, and one line of fix.

All are tried by the checks of a start in this process, in the order of the server's, and of the ranks' before weights
are read; some by each command in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from oarlock.base.errors import StartupError
from oarlock.server.config.settings import make_settings
from oarlock.server.llm.generation_config import GenerationConfig
from oarlock.server.llm.pooler_config import PoolerConfig
from oarlock.server.llm.tokenizer import find_files
from oarlock.workers.preflight import preflight
from tests.e2e.running import command, environment, free_port
from tests.unit.server.llm import checkpoint_faults
from tests.unit.server.llm.hostile_models import FAULTS, HEAVY

MOST_SHOWN = 1000  # characters of an error
WITHIN_S = 100  # for a process on a loaded machine; none ends by itself that reads a pipe or an endless device


def faulty(tmp_path: Path, name: str) -> Path:
    folder = checkpoint_faults.copy(tmp_path / "model")
    FAULTS[name].make(folder)
    return folder


def start(folder: Path) -> None:
    """Runs the checks of `oarlock serve` before weights are read."""
    settings = make_settings({"model": str(folder)})
    files = asyncio.run(find_files(settings, lambda *progress: None))
    config = settings.engine_config(files.model, None, files.tokenizer)
    GenerationConfig.load(files.model, settings.generation_config)
    pooler = PoolerConfig.load(files.model, settings.runner, settings.classifier_from_token)
    tokenizer = files.load_tokenizer()
    try:
        pooler.loaded(tokenizer)
    finally:
        tokenizer.close()
    preflight(config.worker)


def test_the_model_without_a_fault_is_served(tmp_path):
    start(checkpoint_faults.copy(tmp_path / "model"))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(tmp_path, monkeypatch, name):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # where descriptions of GGUF files are written
    with pytest.raises(StartupError) as caught:
        start(faulty(tmp_path, name))
    cause, fix = caught.value.cause, caught.value.fix
    assert caught.value.exit_code == 3
    assert all(text in cause for text in FAULTS[name].named), cause
    assert fix and len(cause) + len(fix) < MOST_SHOWN and (cause + fix).isprintable()


MEASURED = """
import json, sys, time
from pathlib import Path
from oarlock.base.errors import StartupError
from tests.unit.server.llm.test_hostile_models import start
cause = None
begun = time.process_time()
try:
    start(Path(sys.argv[1]))
except StartupError as error:
    cause = error.cause
peak_kib = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"cause": cause, "seconds": time.process_time() - begun, "peak_mib": int(peak_kib) >> 10}))
"""


@pytest.mark.soak
@pytest.mark.slow
@pytest.mark.parametrize("name", HEAVY)
def test_the_largest_files_take_neither_long_nor_all_memory(tmp_path, name):
    """Each is served or refused within 10 s of processor time and 800 MiB."""
    folder = checkpoint_faults.copy(tmp_path / "model")
    HEAVY[name](folder)
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, str(folder)],
        env=environment(),
        cwd=Path(__file__).resolve().parents[4],
        capture_output=True,
        text=True,
        timeout=3 * WITHIN_S,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["seconds"] < 10 and found["peak_mib"] < 800, found


SERVE, PLAN, DOCTOR, VERIFY = "serve", "plan", "doctor", "verify"
COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    SERVE: lambda folder: command("serve", folder, "--port", free_port()),
    PLAN: lambda folder: command("plan", folder),
    DOCTOR: lambda folder: command("doctor", folder, "--port", free_port()),
    VERIFY: lambda folder: command("verify", folder),
    "LLM": lambda folder: [
        sys.executable,
        "-c",
        "import sys\nfrom oarlock import LLM\nfrom oarlock.base.errors import StartupError\n"
        "try:\n    LLM(sys.argv[1])\nexcept StartupError as error:\n"
        "    print('error:', error.cause, '\\nfix:', error.fix)\n    sys.exit(error.exit_code)",
        str(folder),
    ],
}


STATUS = {SERVE: 3, PLAN: 3, DOCTOR: 1, VERIFY: 3, "LLM": 3}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "name"),
    [
        (SERVE, "the weights are a device"),
        *(
            pytest.param(SERVE, name, marks=pytest.mark.soak)
            for name in ("config is a pipe", "the template nests", "the shape is astronomical")
        ),
        (PLAN, "config is an endless device"),
        pytest.param(PLAN, "rope_theta is infinite", marks=pytest.mark.soak),
        pytest.param(DOCTOR, "chat_template is a number", marks=pytest.mark.soak),
        pytest.param(VERIFY, "quantize_config is a pipe", marks=pytest.mark.soak),
        ("LLM", "the tokenizer is a device"),
    ],
)
def test_every_command_says_so(tmp_path, program, name):
    done = subprocess.run(
        COMMANDS[program](faulty(tmp_path, name)),
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
    )
    output = done.stdout + done.stderr
    assert "Traceback" not in output, output
    assert all(text in output for text in FAULTS[name].named), output
    assert re.search("^ *fix", output, re.M), output
    assert done.returncode == STATUS[program], output
