"""Whatever goes wrong on one of two hosts, both end in time, name the cause, and leave nothing behind; the open request
gets an error.
"""

import re
import time

import pytest

from tests.e2e.long_context import LONG, long_context_demo
from tests.e2e.open_stream import OpenStream
from tests.e2e.running import RunningServer, eventually
from tests.multihost.faults import FAULTS, WITHIN_S, Fault
from tests.multihost.group import Group
from tests.multihost.hosts import hosts_for_test
from tests.multihost.test_two_hosts import FLAGS, answers

# Under torchrun, which ends what it started itself, only two in which one of its processes ends.
FEW = 4  # tokens of an answer
UNDER_TORCHRUN = ("a rank on a node is killed", "the head's frontend is killed")
# A cut in one direction and a host without power stand for this one; a rank on the node, for one on the head.
ALIKE = ("a rank on the head is killed", "the network between the hosts is cut")
ROWS = [
    pytest.param(row, launcher, id=f"{row.what}, {launcher}", marks=[pytest.mark.every] * (row.what in ALIKE))
    for launcher in ("flags", "torchrun")
    for row in FAULTS
    if launcher == "flags" or row.what in UNDER_TORCHRUN
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return long_context_demo(tmp_path_factory.mktemp("long-context"))


@pytest.fixture(scope="module")
def expected(model):
    """Answers of one rank on this host."""
    with RunningServer(model, *FLAGS) as server:
        return answers(server, FEW)


@pytest.fixture
def hosts():
    with hosts_for_test("relay") as hosts:
        yield hosts


def test_the_causes_that_readers_are_shown_are_those_that_are_looked_for():
    assert [row.what for row in FAULTS if not re.search(row.cause, row.shown)] == []


@pytest.mark.soak
@pytest.mark.parametrize(("row", "launcher"), ROWS)
def test_both_hosts_end_and_name_the_cause(request, hosts, model, row: Fault, launcher):
    """Where one is enough, two hosts first answer as one."""
    flags = ("-tp", 2, "--step-timeout", row.step_timeout_s)
    with Group(hosts, model, *FLAGS, *flags, launcher=launcher) as group:
        if row.answers_first and launcher == "flags":
            assert answers(group.head, FEW) == request.getfixturevalue("expected")
            assert "c10d" not in group.logs, "torch warns of hosts without a name, which nobody needs"
        with group.head.host.inside():
            stream = OpenStream(group.head, LONG)
        assert stream.flowing.wait(60), group.logs
        begun_s = time.monotonic()
        row.do(group)
        if row.goes_on:
            eventually(lambda: group.head.process.poll() is not None, WITHIN_S, f"the head ends\n{group.logs}")
            row.goes_on(group)
        head, node = group.statuses(WITHIN_S)
        print(f"{row.what}, {launcher}: {time.monotonic() - begun_s:.1f} s")
        if launcher == "flags":
            assert head in row.head and node in row.node, f"{head}, {node}\n{group.logs}"
        assert 0 not in (head, node) and "event=node_shutdown_requested" not in group.logs, (
            group.logs
        )  # nobody has asked for an end
        stream.join(60)
        assert not stream.is_alive()
        if "frontend" not in row.what:
            assert stream.done and stream.last["error"]["type"] == "server_error", stream.last
        for server in group.servers:
            if server.host.name in row.says:
                assert re.search(row.cause, server.log), group.logs
            assert launcher == "torchrun" or "Traceback" not in server.log, group.logs  # torchrun writes its own
        eventually(lambda: not any(server.left_behind() for server in group.servers), 60, "nothing is left")
