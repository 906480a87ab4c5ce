"""Two hosts on one machine's loopback: the secret is shown nowhere, and each host can be told to stop at any time."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.running import DEMO, alive, eventually
from tests.multihost.group import Group
from tests.multihost.hosts import TwoHosts

pytestmark = pytest.mark.soak
END_WITHIN_S = 60.0
SHOWN = ("/health", "/version", "/v1/models", "/v1/capabilities", "/load", "/metrics", "/openapi.json")


@pytest.fixture(scope="module")
def hosts():
    with TwoHosts("loopback") as hosts:
        yield hosts


def _environment(process: psutil.Process) -> bytes:
    return Path(f"/proc/{process.pid}/environ").read_bytes()


@pytest.mark.parametrize("way", ["environment", "file"])
def test_the_secret_is_in_no_log_recording_answer_or_other_process(hosts, tmp_path, way):
    recording = tmp_path / "steps.rec"
    flags = ["--tensor-parallel-size", 2, "--log-level", "debug", "--enable-log-requests"]
    group = Group(hosts, DEMO, *flags, head_flags=("--record", recording))
    secret = group.secret.encode()
    if way == "file":
        path = tmp_path / "secret"
        path.write_text(f"{group.secret}\n")
        path.chmod(0o600)
        env = {"OARLOCK_NODE_SECRET": None}
        given = ("--node-secret-file", path)
        group = Group(hosts, DEMO, *flags, *given, head_flags=("--record", recording), head_env=env, node_env=env)
    with group:
        assert group.head.text("import ", max_tokens=4)
        own = {server.process.pid for server in group.servers}
        processes = [process for server in group.servers for process in server.processes() if alive(process)]
        assert len(processes) >= 5, "two servers, an engine and two ranks"
        for process in processes:
            assert group.secret not in " ".join(process.cmdline())
            if process.pid not in own or way == "file":
                assert secret not in _environment(process)
        for path in SHOWN:
            assert group.secret not in group.head.client.get(path).text
        group.head.process.send_signal(signal.SIGTERM)
        assert group.statuses(END_WITHIN_S) == [0, 0]
        assert "event=node_joined" in group.head.log and group.secret not in group.logs
    assert recording.stat().st_size > 1000 and secret not in recording.read_bytes()


@pytest.mark.parametrize("who", ["head", "node"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_either_host_ends_both_in_order(hosts, who, number):
    with Group(hosts, DEMO, "--tensor-parallel-size", 2) as group:
        getattr(group, who).process.send_signal(number)
        assert group.statuses(END_WITHIN_S) == [0, 0]


def test_sigterm_to_every_process_of_a_node_ends_both_in_order(hosts):
    """torchrun and systemd send it to the whole group of processes: ranks must leave the end to their parent."""
    with Group(hosts, DEMO, "--tensor-parallel-size", 2) as group:
        for process in reversed(group.node.processes()):
            process.send_signal(signal.SIGTERM)
        assert group.statuses(END_WITHIN_S) == [0, 0]


@pytest.mark.parametrize("who", ["head", "node"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_host_that_waits_for_the_other_can_be_stopped(hosts, who, number):
    group = Group(hosts, DEMO, "--tensor-parallel-size", 2)
    try:
        server = group.start_head() if who == "head" else group.start_node()
        said = "waiting for node 1 of 2" if who == "head" else "looking for node 0"
        eventually(lambda: said in server.log, 60, "it waits")
        if who == "head":
            detail = server.client.get("/health").json()["detail"]
            assert f"at {hosts.head.address}, port {group.port}" in detail and "s left" in detail
        start = time.monotonic()
        server.process.send_signal(number)
        assert group.statuses(END_WITHIN_S) == [0], time.monotonic() - start
    finally:
        group.kill_all()
