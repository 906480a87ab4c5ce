"""Nodes come together: each is admitted once, and what keeps them apart is named on both sides."""

import time
from dataclasses import replace

import pytest

from tests.unit.workers.nodes.groups import SECRET, Group, changed, hello
from workers.config import NodesConfig
from workers.distributed.nodes.greeting import GO, WAITING
from workers.distributed.nodes.interface import listen
from workers.distributed.nodes.link import LinkLostError
from workers.errors import StartupError


@pytest.mark.parametrize("nnodes", [2, 4])
def test_all_nodes_are_admitted_and_each_link_carries_messages(nnodes):
    group = Group(nnodes)
    nodes = {rank: group.node(rank) for rank in range(nnodes - 1, 0, -1)}
    links = group.admit()
    assert list(links) == list(range(1, nnodes))
    for rank, link in links.items():
        assert link.peer.node == rank
        link.send(rank, b"to node ", str(rank).encode())
        other = nodes[rank].link()
        message = other.receive(60)
        assert message is not None and (message.kind, message.payload) == (rank, b"to node %d" % rank)
        other.send(9, b"answer")
        answer = link.receive(60)
        assert answer is not None and answer.payload == b"answer"


@pytest.mark.parametrize(
    "group_name, name, ours, theirs",
    [
        ("version of", "torch", "2.13", "2.12"),
        ("setting", "max_model_len", "4096", "8192"),
        ("weights in", "model.safetensors", "0123456789abcdef", "another"),
    ],
)
def test_a_difference_is_named_with_both_values_and_hosts_on_every_node(group_name, name, ours, theirs):
    group = Group(3)
    value = int(theirs) if theirs.isdigit() else theirs
    alike = group.node(1)
    seen: list[str] = []

    def start_the_other(text: str) -> None:
        if "node 2" in text and "nodes" not in text and not seen:
            seen.append(text)
            other.append(group.node(2, changed(group_name, name, value)))

    other: list = []
    with pytest.raises(StartupError) as raised:
        group.admit(on_waiting=start_the_other)
    for error in (raised.value, alike.error(), other[0].error()):
        assert f"{group_name} {name}: {ours} on node 0 (" in error.cause
        assert f"{theirs} on node 2 (" in error.cause
        assert error.fix and error.exit_code == 3


def test_nodes_are_told_whom_they_wait_for():
    group = Group(3)
    first = group.node(1)
    later: list = []

    def meanwhile() -> None:
        while "waiting for node 2 of 3" not in first.phases:
            time.sleep(0.01)
        later.append(group.node(2))

    links = group.admitting(meanwhile)
    assert list(links) == [1, 2]
    assert "node 0 (" in str(first.link().peer) and later[0].link()


@pytest.mark.parametrize("rank", [0, 2, -1, 7])
def test_a_number_that_no_other_node_can_have_is_refused(rank):
    group = Group()
    nodes: list = []

    def meanwhile() -> None:
        error = group.node(rank).error()
        assert f"node {rank} (" in error.cause and "the other nodes are 1 to 1" in error.cause
        assert "--node-rank" in error.fix
        nodes.append(group.node(1))

    assert list(group.admitting(meanwhile)) == [1] and nodes[0].link()


def test_a_second_node_with_the_same_number_is_refused_and_the_first_stays():
    group = Group(3)
    nodes: list = []

    def meanwhile() -> None:
        first = group.node(1)
        while "waiting for node 2 of 3" not in first.phases:
            time.sleep(0.01)
        error = group.node(1).error()
        assert "node 1 has joined already, from" in error.cause and "--node-rank" in error.fix
        nodes.extend([first, group.node(2)])

    links = group.admitting(meanwhile)
    assert list(links) == [1, 2]
    links[1].send(1, b"to the first")
    message = nodes[0].link().receive(60)
    assert message is not None and message.payload == b"to the first"


def test_a_node_that_lost_its_connection_takes_its_own_place():
    group = Group(3)
    kept: list = []

    def meanwhile() -> None:
        kept.append(group.known(hello(1, 3, start="one")))
        assert kept[0].receive(60).kind == WAITING
        kept.append(group.known(hello(1, 3, start="one")))
        with pytest.raises(LinkLostError, match="hung up"):
            while True:
                kept[0].receive(60)
        kept.append(group.node(2))

    links = group.admitting(meanwhile)
    links[1].send(1, b"again")
    while (message := kept[1].receive(60)).kind != 1:
        assert message.kind in (WAITING, GO)
    assert message.payload == b"again"


@pytest.mark.parametrize("leave", ["hangs up", "speaks", "is garbled"])
def test_a_node_that_leaves_while_others_are_awaited_may_come_again(leave, caplog):
    group = Group(3)
    nodes: list = []

    def meanwhile() -> None:
        first = group.known(hello(1, 3))
        assert first.receive(60).kind == WAITING
        if leave == "speaks":
            first.send(1, b"too early")
        elif leave == "is garbled":
            first._socket.send(bytes(30))
        else:
            first.close()
        while "it may join again" not in caplog.text:
            time.sleep(0.01)
        nodes.extend([group.node(1), group.node(2)])

    links = group.admitting(meanwhile)
    assert list(links) == [1, 2] and all(node.link() for node in nodes)
    assert "node 1 (host-1, 127.0.0.1)" in caplog.text


def test_another_number_of_nodes_is_a_difference():
    group = Group(2)
    node = group.node(1, nnodes=3)
    with pytest.raises(StartupError) as raised:
        group.admit()
    assert "number of nodes: 2 on node 0 (" in raised.value.cause and ", 3 on node 1 (" in raised.value.cause
    assert node.error().cause == raised.value.cause


def test_a_node_that_never_comes_is_named_to_all_with_those_who_were_turned_away():
    group = Group(3, timeout_s=5.0)
    node = group.node(1, timeout_s=60.0)
    with group.connect() as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        with pytest.raises(StartupError) as raised:
            group.admit()
    assert "Within 5 s node 2 of 3 did not join node 0 (" in raised.value.cause
    assert "the last one from 127.0.0.1: it does not speak the protocol" in raised.value.cause
    assert "--node-timeout" in raised.value.fix
    assert node.error().cause == raised.value.cause


def test_what_ends_the_waiting_is_told_to_those_who_wait():
    group = Group(3)
    node = group.node(1)

    def stop(text: str) -> None:
        if text == "waiting for node 2 of 3":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        group.admit(on_waiting=stop)
    assert "Node 0 ended while it waited" in node.error().cause


def test_once_all_are_there_nobody_listens():
    group = Group()
    node = group.node(1)
    group.admit()
    node.link()
    with pytest.raises(ConnectionRefusedError):
        group.connect()


def test_a_port_that_is_taken_is_named():
    group = Group()
    with pytest.raises(StartupError, match=f"port {group.config.port}") as raised:
        listen(group.config)
    assert "--master-port" in raised.value.fix


@pytest.mark.parametrize(
    "changes, cause",
    [
        ({"address": "192.0.2.1"}, "192.0.2.1"),
        ({"interface": "no-such-interface"}, "no-such-interface"),
        ({"address": "no-such-host.invalid", "timeout_s": 0.1}, "no-such-host.invalid"),
    ],
)
def test_an_address_that_is_not_this_hosts_is_named(changes, cause):
    with pytest.raises(StartupError, match=cause) as raised:
        listen(replace(NodesConfig(0, 2, "127.0.0.1", 0, None, SECRET), **changes))
    assert raised.value.fix
