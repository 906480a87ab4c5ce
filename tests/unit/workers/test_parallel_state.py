"""How ranks find the loopback interface, whatever a system calls it."""

import socket
from types import SimpleNamespace

import psutil
import pytest

from workers.distributed.parallel_state import loopback_interface
from workers.errors import StartupError


def interface(address: str, family: int = socket.AF_INET) -> list[SimpleNamespace]:
    return [SimpleNamespace(family=family, address=address)]


@pytest.mark.parametrize(
    ("found", "name"),
    [
        ({"en0": interface("192.168.1.4"), "lo0": interface("::1", socket.AF_INET6) + interface("127.0.0.1")}, "lo0"),
        ({"lo": interface("127.0.0.1"), "eth0": interface("10.0.0.2")}, "lo"),
    ],
    ids=["macOS", "Linux"],
)
def test_the_interface_with_the_loopback_address(monkeypatch: pytest.MonkeyPatch, found: dict, name: str) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: found)
    assert loopback_interface() == name


def test_a_host_without_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": interface("10.0.0.2")})
    with pytest.raises(StartupError, match=r"127\.0\.0\.1"):
        loopback_interface()
