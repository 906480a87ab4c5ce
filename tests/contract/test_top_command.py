"""`oarlock top` against the real server: at a terminal, once, and as JSON."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.e2e.running import command, environment
from tests.e2e.terminal import Terminal

pytestmark = pytest.mark.slow


def top(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command("top", *arguments), env=environment(), capture_output=True, text=True, timeout=120)


def test_at_a_terminal_until_q(make_server):
    server = make_server("Hello.")
    with Terminal(command("top", server.url, "--interval", "0.2"), environment()) as terminal:
        terminal.expect(f"demo +{server.url} +ok")
        terminal.expect("0 running, 0 waiting")
        terminal.expect("q leaves")
        server.stage.engine.die()
        terminal.expect("dead")
        terminal.type("q")
        assert terminal.wait() == 0
        assert "\x1b[?1049l" in terminal.raw  # what was on the terminal before is there again


def test_once_as_a_page_and_as_json(make_server):
    server = make_server("Hello.")
    page = top(server.url, "--once")
    assert page.returncode == 0, page.stderr
    assert page.stdout.startswith(f"demo  {server.url}  ok")
    found = top(server.url + "/v1", "--once", "--json")
    assert found.returncode == 0, found.stderr
    state = json.loads(found.stdout)
    assert state["model"] == "demo" and state["status"] == "ok"
    assert state["latencies"]["preemptions"] == 0


def test_a_server_that_is_not_there(capsys):
    gone = top("http://127.0.0.1:1", "--once")
    assert gone.returncode == 3
    assert gone.stderr.startswith("error: No server answers at http://127.0.0.1:1")
