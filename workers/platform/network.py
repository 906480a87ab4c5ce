"""The network interfaces of this host, and which of them leads to another host.

Addresses are numeric, in text, of IPv4 or IPv6. Does not know the content of the traffic.
"""

import ipaddress
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

from oarlock.base.errors import StartupError

_RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface, and the address of this host on it that is to be used."""

    name: str
    address: str


def interface_called(text: str) -> Interface:
    """Return the interface with this name or address. Raises `StartupError`, which lists the existing interfaces."""
    there = interfaces()
    if text in there:
        numbers = there[text]
        if not numbers:
            raise StartupError(
                f"--node-interface {text} has no address.", f"Give it one, or use another: {_listed(there)}."
            )
        return Interface(text, str(numbers[0].ip))
    if _is_number(text) and _is_own(text):
        return Interface(_name_of(text, there), text)
    raise StartupError(
        f"--node-interface {text} is neither an interface nor an address of this host.",
        f"Use one of {_listed(there)}.",
    )


def interface_towards(address: str) -> Interface:
    """Return the interface through which packets leave to `address`, which is numeric. For an address of this host,
    return the interface that has it.

    Raises `StartupError` without a route.
    """
    if _is_own(address):
        return interface_with(address)
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))  # sends nothing
        except OSError as error:
            raise StartupError(
                f"No network of this host leads to the head node's address {address}: {error.strerror}.",
                "Check --master-addr and this host's routes, or name an interface with --node-interface.",
            ) from None
        return interface_with(probe.getsockname()[0])


def interface_with(address: str) -> Interface:
    """Return the interface that has `address`, an address of this host. If several do, the smallest network decides.
    Raises `StartupError` if there is none."""
    return Interface(_name_of(address, interfaces()), address)


def interfaces() -> dict[str, list[ipaddress.IPv4Interface | ipaddress.IPv6Interface]]:
    """Return the addresses of every interface of this host, with their networks: IPv4 first, then IPv6 without
    link-local addresses."""
    import psutil  # only needed if ranks or hosts look for each other

    found: dict[str, list] = {}
    for name, addresses in psutil.net_if_addrs().items():
        of_ipv4 = [(own.address, own.netmask) for own in addresses if own.family == socket.AF_INET]
        of_ipv6 = [(own.address, own.netmask) for own in addresses if own.family == socket.AF_INET6]
        networks = [ipaddress.IPv6Interface(f"{address}/{_prefix(mask)}") for address, mask in of_ipv6]
        found[name] = [ipaddress.IPv4Interface(f"{address}/{mask or 32}") for address, mask in of_ipv4]
        found[name] += [network for network in networks if not network.is_link_local]
    return found


def _prefix(mask: str | None) -> int:
    """Return the prefix length of an IPv6 mask."""
    return 128 if mask is None else int(ipaddress.IPv6Address(mask)).bit_count()


def resolved(name: str, wait_s: float, on_wait: Callable[[], object] = lambda: None) -> str:
    """Return the numeric address of a host. A name may take a while to become known; until then `on_wait` is called.

    Raises `StartupError` after `wait_s`.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
        except (OSError, UnicodeError) as error:
            cause = error.strerror if isinstance(error, OSError) else "it is not a host name"
        if time.monotonic() + _RETRY_S > deadline:
            raise StartupError(
                f"The head node's address {name} is not known here: {cause}.",
                "Check --master-addr (or MASTER_ADDR, LWS_LEADER_ADDRESS) and this host's name service.",
            )
        on_wait()
        time.sleep(_RETRY_S)


def check_port_is_free(address: str, port: int) -> None:
    """Check that a port is free. Raises `StartupError` if a program listens there, or if `address` is another
    host's."""
    with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            probe.bind((address, port))
        except OSError as error:
            raise StartupError(
                f"The head node cannot listen on {address} port {port}: {error.strerror}.",
                "Use another --master-port on all hosts, or end the program that uses it (`ss -ltnp` lists them).",
            ) from None


def is_loopback(address: str) -> bool:
    """Return whether `address` is `localhost` or a numeric loopback address, which only this host can reach. Looks no
    name up."""
    return address == "localhost" or (_is_number(address) and ipaddress.ip_address(address).is_loopback)


def _name_of(address: str, there: dict) -> str:
    """Return the interface with the smallest network that contains `address`."""
    number = ipaddress.ip_address(address)
    holding = [
        (held.network.prefixlen, name) for name, numbers in there.items() for held in numbers if number in held.network
    ]
    if not holding:
        raise StartupError(f"No interface has the address {address}.", f"Use one of {_listed(there)}.")
    return max(holding)[1]


def _is_own(address: str) -> bool:
    with socket.socket(_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def _is_number(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _listed(there: dict) -> str:
    """Return for example `eth0 (10.0.0.1), lo (127.0.0.1, ::1)`."""
    return ", ".join(
        f"{name} ({', '.join(str(held.ip) for held in numbers)})" for name, numbers in sorted(there.items()) if numbers
    )
