"""Network check of a node before anything else: the head must be reachable by others."""

import socket

import pytest

from oarlock.base.errors import StartupError
from oarlock.workers.config import NodesConfig
from oarlock.workers.node import check_network
from oarlock.workers.platform import network
from tests.e2e.running import free_port


def _nodes(rank: int, address: str, **changes: object) -> NodesConfig:
    given = {"port": free_port(), "interface": None, "timeout_s": 1.0} | changes
    return NodesConfig(node_rank=rank, nnodes=2, address=address, **given)  # ty: ignore[invalid-argument-type]


def _silent(phase: str, fraction: float, detail: str = "", /) -> None:
    """Ignore the progress."""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.2", "localhost"])
def test_addresses_of_this_host_are_right_for_both(rank: int, address: str) -> None:
    check_network(_nodes(rank, address), _silent)


def test_a_head_that_only_itself_can_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian gives a host's own name the address 127.0.1.1, in /etc/hosts."""
    monkeypatch.setattr(network.socket, "getaddrinfo", lambda *_, **__: [(0, 0, 0, "", ("127.0.1.1", 0))])
    with pytest.raises(StartupError, match=r"Here head is 127\.0\.1\.1, which no other host can reach") as caught:
        check_network(_nodes(0, "head"), _silent)
    assert "--node-interface" in caught.value.fix
    check_network(_nodes(0, "head", interface="lo"), _silent)


def test_a_head_on_another_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    there = network.Interface("eth0", "10.0.0.2")
    monkeypatch.setattr("oarlock.workers.ranks.nodes.interface_towards", lambda address: there)
    with pytest.raises(StartupError, match=r"10\.0\.0\.1.* is not one of this host, which is node 0"):
        check_network(_nodes(0, "10.0.0.1"), _silent)
    check_network(_nodes(1, "10.0.0.1"), _silent)


def test_only_the_head_needs_the_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        check_network(_nodes(1, "127.0.0.1", port=port), _silent)
        with pytest.raises(StartupError, match="in use"):
            check_network(_nodes(0, "127.0.0.1", port=port), _silent)
