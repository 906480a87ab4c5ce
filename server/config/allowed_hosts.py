"""The names that are allowed in a request's Host header, against DNS rebinding.

A foreign web page may point a name of its own at this machine; the browser then sends that name in the Host header.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable

# Endings that no public name server may answer for (RFC 6761, 6762, 8375; ICANN's reservation of .internal).
_PRIVATE_ENDINGS = (".localhost", ".local", ".internal", ".home.arpa")
_PATTERN = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    address = _address(host)
    return address is not None and address.is_loopback


def is_pattern(pattern: str) -> bool:
    """Whether it is a valid pattern: a name or an address, `*.` and a domain, or `*`."""
    return _PATTERN.fullmatch(pattern.lower()) is not None or _address(pattern.strip("[]")) is not None


class AllowedHosts:
    """The names of one server.

    Always: `localhost`, every numeric address (which cannot be rebound), and the host it listens on. Where the network
    can reach it also this machine's own name, names without a dot, as containers have, and those that only a local
    network can resolve. On loopback the last would allow rebinding by other machines of the local network.
    """

    def __init__(self, host: str, allowed: Iterable[str] = ()) -> None:
        """`host`: what the server listens on. `allowed`: more names, `*.example.org` for all below one, `*` for any."""
        patterns = {pattern.lower().strip("[]").rstrip(".") for pattern in allowed}
        self._any = "*" in patterns
        self._endings = tuple(pattern[1:] for pattern in patterns if pattern.startswith("*."))
        self._names = patterns | {"localhost", host.lower()}
        self._is_wide = not is_loopback(host)
        if self._is_wide:
            self._names.add(socket.gethostname().lower())
            self._endings += _PRIVATE_ENDINGS

    def __contains__(self, header: bytes) -> bool:
        """Whether this Host header is allowed. HTTP/1.0 probes send none; browsers always do."""
        text = header.decode("latin-1").strip().lower()
        if self._any or not text:
            return True
        name = text[1 : text.index("]")] if text.startswith("[") and "]" in text else text.rpartition(":")[0] or text
        name = name.removesuffix(".")
        if name in self._names or name.endswith(self._endings) or _address(name) is not None:
            return True
        return self._is_wide and re.fullmatch("[a-z0-9_-]+", name) is not None


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
