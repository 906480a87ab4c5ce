"""Clients that are here anyway, over a socket: the official Python client and curl. The others are `make clients`."""

import json
import shutil
import subprocess
import sys

import pytest

from tests.clients.matrix import CLIENTS
from tests.clients.run import HERE, MARK, environment
from tests.e2e.running import DEMO


@pytest.mark.parametrize(("name", "at_least"), [pytest.param("openai-3", 19, marks=pytest.mark.soak), ("curl", 7)])
def test_a_client_that_needs_no_environment(tp1, name, at_least):
    if shutil.which("curl") is None and name == "curl":
        pytest.skip("curl is not installed")
    client = next(client for client in CLIENTS if client.name == name)
    command = [sys.executable, str(HERE / "scripts" / client.script), "--url", tp1.url, "--model", "demo"]
    done = subprocess.run(
        [*command, "--tokenizer", str(DEMO)], env=environment(client), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line.removeprefix(MARK)) for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines[-1] == {"end": len(lines) - 1}
    assert len(lines) - 1 >= at_least
