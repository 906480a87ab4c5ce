"""Each of two hosts can be told to stop at any time, and both end in order."""

import signal

import pytest

from tests.e2e.running import DEMO, eventually
from tests.multihost.group import Group
from tests.multihost.hosts import Hosts

pytestmark = pytest.mark.soak
END_WITHIN_S = 60.0
TWO_RANKS = ("--tensor-parallel-size", 2)


@pytest.fixture(scope="module")
def hosts():
    with Hosts("loopback") as hosts:
        yield hosts


@pytest.mark.parametrize(("who", "number"), [("head", signal.SIGTERM), ("node", signal.SIGINT)])
def test_a_signal_to_either_host_ends_both_in_order(hosts, who, number):
    with Group(hosts, DEMO, *TWO_RANKS) as group:
        getattr(group, who).process.send_signal(number)
        assert group.statuses(END_WITHIN_S) == [0, 0]
        assert "level=ERROR" not in group.logs, group.logs


def test_sigterm_to_every_process_of_a_node_ends_both_in_order(hosts):
    """systemd sends it to all processes: ranks leave the end to their parent."""
    with Group(hosts, DEMO, *TWO_RANKS) as group:
        for process in reversed(group.node.processes()):
            process.send_signal(signal.SIGTERM)
        assert group.statuses(END_WITHIN_S) == [0, 0], group.logs
        assert "level=ERROR" not in group.logs, group.logs


@pytest.mark.parametrize("who", ["head", "node"])
def test_a_host_that_waits_for_the_other_can_be_stopped(hosts, who):
    group = Group(hosts, DEMO, *TWO_RANKS)
    try:
        server = group.start_head() if who == "head" else group.start_node()
        said = "waiting for node 1 of 2" if who == "head" else "looking for node 0"
        eventually(lambda: said in server.log, 60, "it waits")
        if who == "head":
            detail = server.client.get("/health").json()["detail"]
            assert f"at {hosts.head.address}, port {group.port}" in detail and "s left" in detail
        server.process.send_signal(signal.SIGTERM)
        assert group.statuses(END_WITHIN_S) == [0]
    finally:
        group.kill_all()
