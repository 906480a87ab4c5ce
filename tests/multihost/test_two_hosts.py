"""One model on two hosts answers as on one: the same text, the same bits, whatever the link between them is like."""

import contextlib
import socket

import pytest

from tests.e2e.running import DEMO, RunningServer, eventually
from tests.multihost.group import Group
from tests.multihost.hosts import TwoHosts, why_not

PROMPTS = ["Q: What does os.path.join do?\nA:", "import os\nimport sys\n\n", "for line in file:\n"]
FLAGS = ("--dtype", "float32", "--block-size", 16, "--served-model-name", "demo")
SIZES = {
    "TP 2": ("-tp", 2),
    "TP 4": ("-tp", 4),
    "PP 2": ("-pp", 2),
    "TP 2 x PP 2": ("-tp", 2, "-pp", 2),
}


def answers(server):
    """Greedy text and the log-probabilities of what was chosen, for each prompt alone and for all at once."""
    ask = {"max_tokens": 12, "temperature": 0, "logprobs": 1}
    alone = [server.complete(prompt, **ask)["choices"][0] for prompt in PROMPTS]
    together = server.complete(PROMPTS, **ask)["choices"]
    return [(choice["text"], choice["logprobs"]["token_logprobs"]) for choice in (*alone, *together)]


def two_hosts(kind):
    if reason := why_not(kind):
        pytest.skip(reason)
    return TwoHosts(kind)


@pytest.fixture(scope="module")
def expected():
    """What one rank on this host answers."""
    with RunningServer(DEMO, *FLAGS) as server:
        return answers(server)


@pytest.mark.parametrize(
    ("size", "kind"),
    [("TP 2", "loopback"), *(pytest.param(size, "veth", marks=pytest.mark.soak) for size in SIZES)],
)
def test_the_answers_are_those_of_one_host(expected, size, kind):
    with two_hosts(kind) as hosts, Group(hosts, DEMO, *FLAGS, *SIZES[size]) as group:
        assert answers(group.head) == expected
        assert "c10d" not in group.logs, "torch warns of hosts without a name, which nobody needs"


@pytest.mark.soak
@pytest.mark.parametrize("size", ["TP 2", "PP 2"])
def test_a_slow_or_lossy_link_changes_no_answer(expected, size):
    with two_hosts("relay") as hosts, Group(hosts, DEMO, *FLAGS, *SIZES[size]) as group:
        for link in ({"delay_s": 0.005}, {"bytes_per_s": 1.25e6}, {"loss": 0.01}):
            hosts.emulate(**link)
            assert answers(group.head) == expected, link


@pytest.mark.soak
def test_strangers_keep_nobody_from_joining_and_later_nobody_listens():
    with two_hosts("veth") as hosts, contextlib.ExitStack() as opened:
        group = Group(hosts, DEMO, *FLAGS, *SIZES["TP 2"])
        opened.callback(group.kill_all)
        group.start_head()
        address = (hosts.head.address, group.port)
        with hosts.node.inside():
            eventually(lambda: connected(address), 60, f"the head listens\n{group.logs}").close()
            for number in range(300):
                words = (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 1000, b"OARNODE1" + bytes(48))[number % 4]
                opened.enter_context(socket.create_connection(address, 5)).sendall(words)
        group.start_node()
        group.wait_ready()
        assert group.head.text("import ", max_tokens=4)
        assert "event=connection_turned_away" in group.head.log
        for host in hosts.hosts:
            with host.inside():
                assert not connected(address)


def connected(address):
    """A connection, or None where nobody listens."""
    try:
        return socket.create_connection(address, 5)
    except ConnectionRefusedError:
        return None
