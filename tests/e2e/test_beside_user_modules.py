"""Oarlock in a folder with the user's own `server.py`, `engine.py` and `workers/`, the commonest names there are: none
of them is imported in place of ours."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.running import DEMO, RunningServer, environment

COMMAND = Path(sys.executable).with_name("oarlock")
LAUNCHER = f"""#!/bin/sh
shift 3  # -P -m oarlock
exec {sys.executable} -m oarlock "$@"
"""
SCRIPT = f"""
from oarlock import LLM, SamplingParams
if __name__ == "__main__":
    with LLM({str(DEMO)!r}, num_threads=1) as llm:
        print(llm.generate("Once upon", SamplingParams(max_tokens=4))[0].outputs[0].text)
"""


@pytest.fixture
def folder(tmp_path):
    for file in ("server.py", "engine.py", "workers/__init__.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("raise SystemExit('the module of the user was imported')\n")
    return tmp_path


def test_the_command_runs_there(folder):
    words = [COMMAND, "serve", folder / "no-such-model"]
    done = subprocess.run(words, cwd=folder, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 3 and "error: " in done.stderr and "no-such-model" in done.stderr, done.stderr


@pytest.mark.soak  # its processes start as those of the script below
def test_a_server_starts_there(folder, tmp_path_factory):
    launcher = tmp_path_factory.mktemp("launcher") / "start"
    launcher.write_text(LAUNCHER)
    launcher.chmod(0o755)
    with RunningServer(DEMO, cwd=folder, python=launcher) as server:
        assert server.text("Once upon", max_tokens=4)


@pytest.mark.soak
def test_a_script_there_uses_the_python_interface(folder):
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stdout + done.stderr
