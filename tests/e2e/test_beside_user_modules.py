"""Oarlock in a folder with the user's own `server.py`, `engine.py` and `workers/`, the commonest names there are: none
of them is imported in place of ours."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.running import DEMO, RunningServer, environment

STARTS = {
    "the command": f'exec {Path(sys.executable).with_name("oarlock")} "$@"',
    "python -m oarlock": f'exec {sys.executable} -m oarlock "$@"',
}
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


@pytest.mark.parametrize("start", STARTS)
def test_a_server_starts_there(folder, tmp_path_factory, start):
    launcher = tmp_path_factory.mktemp("launcher") / "start"
    launcher.write_text(f"#!/bin/sh\nshift 3  # -P -m oarlock\n{STARTS[start]}\n")
    launcher.chmod(0o755)
    with RunningServer(DEMO, cwd=folder, python=launcher) as server:
        assert server.text("Once upon", max_tokens=4)


def test_a_script_there_uses_the_python_interface(folder):
    (folder / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=environment(), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0 and done.stdout.strip(), done.stdout + done.stderr
