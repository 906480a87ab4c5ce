"""`oarlock chat MODEL` starts a server for itself, and leaves none behind, however it ends."""

from __future__ import annotations

import signal
import subprocess

import psutil
import pytest

from tests.e2e.running import DEMO, command, environment, eventually
from tests.e2e.terminal import Terminal

pytestmark = pytest.mark.slow
QUESTION = "What does os.path.join do?"


def below(process: subprocess.Popen) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


@pytest.mark.soak
def test_it_answers_and_ends_with_a_chat_that_is_killed(tmp_path):
    env = environment(XDG_STATE_HOME=str(tmp_path))
    with Terminal(command("chat", DEMO, "--temperature", "0"), env) as terminal:
        terminal.expect("oarlock-demo at http://127.0.0.1:[0-9]+")
        terminal.type(f"{QUESTION}\n")
        terminal.expect("Join two or more pathname components")
        terminal.expect("\n> ")
        processes = below(terminal.process)
        assert len(processes) >= 3  # the server, its engine, a rank
        terminal.process.send_signal(signal.SIGKILL)
        eventually(lambda: not any(map(psutil.Process.is_running, processes)), 60, "the server is gone")


def test_why_it_did_not_start_is_said():
    result = subprocess.run(
        command("chat", "--serve-flags", "--max-model-len 0"),
        input=QUESTION,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: --max-model-len is 0, but it must be at least 2.\nfix: ")


@pytest.mark.soak
def test_a_question_in_a_pipe_and_a_signal():
    chat = subprocess.run(
        command("chat", DEMO, "--temperature", "0"),
        input=QUESTION,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert (chat.returncode, chat.stderr) == (0, "")
    assert chat.stdout.startswith("Join two or more pathname components")
    process = subprocess.Popen(command("chat", DEMO), stdin=subprocess.PIPE, env=environment())
    assert process.stdin is not None
    process.stdin.write(b"Hello?")
    process.stdin.close()
    processes = eventually(lambda: below(process), 60, "the server has begun")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 128 + signal.SIGTERM
    eventually(lambda: not any(map(psutil.Process.is_running, processes)), 60, "the server is gone")
