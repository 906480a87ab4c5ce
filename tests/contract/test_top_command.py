"""`oarlock top` against the real server: at a terminal, once, and as JSON."""

from __future__ import annotations

import json
import shlex
import subprocess

import psutil
import pytest

from tests.contract import batch_server
from tests.e2e.running import command, environment
from tests.e2e.terminal import CTRL_Z, Terminal

pytestmark = pytest.mark.slow


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command("top", *arguments), env=environment(), capture_output=True, text=True, timeout=120)


def test_at_a_terminal_until_q(make_server):
    server = make_server("Hello.")
    with Terminal(command("top", server.url, "--interval", "0.2"), environment()) as terminal:
        terminal.expect(f"demo +{server.url} +ok")
        terminal.expect("0 running, 0 waiting")
        terminal.expect("q quits")
        server.stage.engine.die()
        terminal.expect("dead")
        terminal.type("q")
        assert terminal.wait() == 0
        assert "\x1b[?1049l" in terminal.raw  # what was on the terminal before is there again


def test_ctrl_z_and_a_signal_give_the_terminal_back(make_server):
    server = make_server("Hello.")
    with Terminal(["sh", "-i"], environment(PS1="shell: ")) as terminal:
        terminal.expect("shell: ")
        terminal.type(shlex.join(command("top", server.url, "--interval", "0.2")) + "\n")
        for again in (False, True):
            terminal.expect("q quits")
            assert not terminal.is_echoing
            terminal.type(CTRL_Z)
            terminal.expect("(?s)Stopped.*shell: ")
            assert terminal.is_echoing
            assert terminal.raw.rindex("\x1b[?1049l") > terminal.raw.rindex("\x1b[?1049h")
            assert terminal.raw.rindex("\x1b[?25h") > terminal.raw.rindex("\x1b[?25l"), "the cursor is shown"
            terminal.type(f"echo typed {again}\nfg\n")
            terminal.expect(f"\ntyped {again}\n")
        terminal.expect("q quits")
        psutil.Process(terminal.process.pid).children()[0].terminate()
        terminal.expect("shell: ")
        assert terminal.is_echoing
        assert terminal.raw.rindex("\x1b[?1049l") > terminal.raw.rindex("\x1b[?1049h")
        terminal.type("exit\n")
        terminal.wait()


def test_once_as_a_page_and_as_json(make_server):
    server = make_server("Hello.")
    page = top(server.url, "--once")
    assert page.returncode == 0, page.stderr
    assert page.stdout.startswith(f"demo  {server.url}  ok")
    found = top(server.url + "/v1", "--once", "--json")
    assert found.returncode == 0, found.stderr
    state = json.loads(found.stdout)
    assert state["model"] == "demo" and state["status"] == "ok"
    assert state["latencies"]["preemptions"] == 0 and state["batches"] is None


def test_batches_of_a_server_that_keeps_them(make_stage, tmp_path):
    with batch_server.serving(make_stage, tmp_path) as serve:
        server = serve()
        batch = server.ended(server.batch([batch_server.request_line("a")]))
        state = json.loads(top(server.url, "--once", "--json").stdout)
        assert [one["id"] for one in state["batches"]] == [batch.id]
        assert state["batches"][0]["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        assert f"{batch.id}  completed" in top(server.url, "--once").stdout


def test_a_server_that_is_not_there(capsys):
    gone = top("http://127.0.0.1:1", "--once")
    assert gone.returncode == 3
    assert gone.stderr.startswith("error: No server responds at http://127.0.0.1:1")
