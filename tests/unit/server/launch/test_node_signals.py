"""A host that only runs ranks: a signal asks it to end the group, a second one ends it at once."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
# `serve_node` with ranks that wait until they are asked to stop, and then for the process to be ended.
_NODE = """
import os, select, sys, time
from oarlock.engine.config import NodesConfig
from oarlock.server.config.settings import Settings
from oarlock.server.launch import node

def run_node(config, nodes, on_phase, *, stop_fd):
    assert config.nnodes == 1 and config.model_path.endswith("oarlock-demo")
    os.write(1, b"running ")
    select.select([stop_fd], [], [])
    os.write(1, b"asked ")
    time.sleep(0 if sys.argv[1] == "orderly" else 60)
    return 0

node.run_node = run_node
sys.exit(node.serve_node(Settings(), NodesConfig(1, 2, "127.0.0.1", 29550, None)))
"""


@pytest.fixture
def node(request: pytest.FixtureRequest):
    process = subprocess.Popen(
        [sys.executable, "-c", _NODE, request.param], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.read(8) == b"running "
        yield process
        process.kill()


@pytest.mark.parametrize("node", ["orderly"], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_the_first_signal_asks_for_an_orderly_end(node, number):
    node.send_signal(number)
    out, err = node.communicate(timeout=30)
    assert (node.returncode, out) == (0, b"asked ")
    assert b"event=stopped node=1" in err


@pytest.mark.parametrize("node", ["stuck"], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.slow
def test_a_second_signal_ends_it_at_once(node, number):
    node.send_signal(number)
    assert node.stdout.read(6) == b"asked "
    node.send_signal(number)
    assert node.wait(timeout=30) == 128 + number
