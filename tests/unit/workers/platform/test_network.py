"""The interfaces of this host: found by name, by address and by where they lead; what is wrong is said with a fix."""

import ipaddress
import socket
from types import SimpleNamespace

import psutil
import pytest

from oarlock.base.errors import StartupError
from oarlock.workers.platform import network
from oarlock.workers.platform.network import Interface

OUTSIDE = "192.0.2.1"  # TEST-NET-1 (RFC 5737): no host has it


def test_an_interface_is_found_by_its_name_and_by_its_addresses() -> None:
    assert network.interface_called("lo") == Interface("lo", "127.0.0.1")
    assert network.interface_called("127.0.0.1") == Interface("lo", "127.0.0.1")
    assert network.interface_called("127.0.0.2") == Interface("lo", "127.0.0.2"), "of the same network"


def test_every_interface_is_known_with_its_addresses() -> None:
    there = network.interfaces()
    assert set(there) == {name for _, name in socket.if_nameindex()}
    assert ipaddress.IPv4Interface("127.0.0.1/8") in there["lo"]


def has(address: str, mask: str | None = None) -> SimpleNamespace:
    """Make an address as psutil lists it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return SimpleNamespace(family=family, address=address, netmask=mask)


def test_addresses_that_are_valid_on_one_link_alone_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    link = SimpleNamespace(family=socket.AF_UNIX, address="02:fc:00:00:00:01", netmask=None)  # no address of IP
    own = [link, has("fe80::20c%eth0", "ffff:ffff:ffff:ffff::"), has("2001:db8::7", "ffff:ffff:ffff:ffff::")]
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [*own, has("10.0.0.2", "255.255.0.0")], "tun0": []})
    there = {name: [str(address) for address in addresses] for name, addresses in network.interfaces().items()}
    assert there == {"eth0": ["10.0.0.2/16", "2001:db8::7/64"], "tun0": []}


@pytest.mark.parametrize(
    ("found", "name"),
    [
        ({"en0": [has("192.168.1.4")], "lo0": [has("::1"), has("127.0.0.1", "255.0.0.0")]}, "lo0"),
        ({"lo": [has("127.0.0.1", "255.0.0.0")], "eth0": [has("10.0.0.2")]}, "lo"),
    ],
    ids=["macOS", "Linux"],
)
def test_the_loopback_interface_is_found_whatever_it_is_called(
    monkeypatch: pytest.MonkeyPatch, found: dict, name: str
) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    assert network.interface_with("127.0.0.1") == Interface(name, "127.0.0.1")


def test_an_address_that_no_interface_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [has("10.0.0.2")]})
    with pytest.raises(StartupError, match=r"No interface has the address 127\.0\.0\.1") as caught:
        network.interface_with("127.0.0.1")
    assert "eth0 (10.0.0.2)" in caught.value.fix


@pytest.mark.parametrize("text", ["nosuch0", OUTSIDE, "", "2001:db8::1"])
def test_a_wrong_interface_is_named_with_those_there_are(text: str) -> None:
    with pytest.raises(StartupError, match=rf"--node-interface {text} is neither") as caught:
        network.interface_called(text)
    assert "lo (127.0.0.1" in caught.value.fix


def test_an_interface_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lo = ipaddress.IPv4Interface("127.0.0.1/8")
    monkeypatch.setattr(network, "interfaces", lambda: {"lo": [lo], "eth7": []})
    with pytest.raises(StartupError, match="eth7 has no address") as caught:
        network.interface_called("eth7")
    assert "lo (127.0.0.1)" in caught.value.fix


def test_the_smallest_network_that_holds_an_address_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {"wide": "10.0.0.1/8", "narrow": "10.9.0.1/16", "other": "172.16.0.1/12"}
    made = {name: [ipaddress.ip_interface(text)] for name, text in there.items()}
    monkeypatch.setattr(network, "interfaces", lambda: made)
    monkeypatch.setattr(network, "_is_own", lambda address: True)
    assert network.interface_called("10.9.0.5").name == "narrow"
    assert network.interface_called("10.8.0.5").name == "wide"
    with pytest.raises(StartupError, match=r"No interface has the address 11\.0\.0\.1"):
        network.interface_called("11.0.0.1")


def test_the_way_to_another_host_is_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    assert network.interface_towards("127.0.0.2") == Interface("lo", "127.0.0.2"), "an address of this host"
    monkeypatch.setattr(network, "_is_own", lambda address: False)
    assert network.interface_towards("127.0.0.2") == Interface("lo", "127.0.0.1")


def test_an_address_without_a_route_is_named() -> None:
    with pytest.raises(StartupError, match=r"No network of this host leads to .*ff02") as caught:
        network.interface_towards("ff02::1%nosuch0")
    assert "--node-interface" in caught.value.fix


def test_names_are_resolved_and_numbers_kept() -> None:
    assert network.resolved("127.0.0.3", 0.0) == "127.0.0.3"
    assert network.resolved("localhost", 0.0) in ("127.0.0.1", "::1")


def test_a_name_may_become_known_while_the_start_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [socket.gaierror(socket.EAI_NONAME, "Name or service not known")] * 2 + [[(0, 0, 0, "", ("10.0.0.9", 0))]]
    waits: list[None] = []

    def getaddrinfo(*_: object, **__: object) -> list:
        answer = answers.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(network.socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(network, "_RETRY_S", 0.001)
    assert network.resolved("head", 60.0, lambda: waits.append(None)) == "10.0.0.9"
    assert len(waits) == 2


@pytest.mark.parametrize("name", ["no-such-host.invalid", "a" * 300, ".."])
def test_a_name_that_stays_unknown_is_named(name: str) -> None:
    with pytest.raises(StartupError, match="is not known here") as caught:
        network.resolved(name, 0.0)
    assert name in caught.value.cause and "--master-addr" in caught.value.fix


def test_a_port_that_is_taken_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(StartupError, match=rf"cannot listen on 127.0.0.1 port {port}: .*in use") as caught:
            network.check_port_is_free("127.0.0.1", port)
    assert "--master-port" in caught.value.fix
    with pytest.raises(StartupError, match=rf"cannot listen on {OUTSIDE}"):
        network.check_port_is_free(OUTSIDE, port)


def test_a_port_that_has_just_been_given_up_is_free() -> None:
    """A group that is started again must not wait a minute for the connections of the one before."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        accepted = server.accept()[0]
        accepted.close()  # closed first, so this side keeps the port in TIME_WAIT
        client.close()
    network.check_port_is_free("127.0.0.1", port)
