"""Several hosts on one machine: network namespaces with a link between them that can be slow, or cut.

    with Hosts("relay") as hosts:
        hosts.emulate(delay_s=0.001, bytes_per_s=125e6)
        with hosts.node.inside():
            ...  # sockets made here, and processes started here, are the second host's
        hosts.cut()

Three kinds:

* `relay`: two, by TUN devices with a process between them (`relay.py`), for delay, bandwidth, loss and partitions.
* `switch`: any number, each joined to a bridge of the kernel; quick, emulates nothing.
* `loopback`: 127.0.0.1 and those after it without namespaces, where the system permits nothing else.

A namespace exists as long as a process is in it or holds its descriptor, and has no name: when the tests' process ends,
however it ends, namespaces, devices and the relay end with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["relay", "switch", "loopback"]
Direction = Literal["both", "to_node", "to_head"]

INTERFACE = "oar0"  # its name on both hosts
_CLONE_NEWNET, _CLONE_NEWUTS = 0x40000000, 0x04000000
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _open_namespaces() -> tuple[int, int]:
    """Descriptors of this thread's network and host name."""
    net, uts = (os.open(f"/proc/thread-self/ns/{kind}", os.O_RDONLY | os.O_CLOEXEC) for kind in ("net", "uts"))
    return net, uts


def _enter(namespaces: tuple[int, int]) -> None:
    for descriptor in namespaces:
        _checked(_libc.setns(descriptor, 0), "setns")


def _ip(*arguments: str | int, keep: tuple[int, ...] = ()) -> None:
    words = ["ip", *map(str, arguments)]
    result = subprocess.run(words, capture_output=True, text=True, pass_fds=keep)
    if result.returncode:
        raise OSError(f"{' '.join(words)}: {result.stderr.strip()}")


@dataclass
class Host:
    """One host: its name, its address, the interface that has it, and its namespaces (none: this machine's)."""

    name: str
    address: str
    interface: str
    namespaces: tuple[int, int] | None = None

    @contextlib.contextmanager
    def inside(self) -> Generator[None]:
        """Put this thread on the host: sockets that it makes and processes that it starts are there."""
        if self.namespaces is None:
            yield
            return
        before = _open_namespaces()
        try:
            _enter(self.namespaces)
            yield
        finally:
            _enter(before)
            for descriptor in before:
                os.close(descriptor)

    def close(self) -> None:
        for descriptor in self.namespaces or ():
            os.close(descriptor)


def _new_host(name: str, address: str) -> Host:
    """A host without any network but its own loopback."""
    before = _open_namespaces()
    try:
        _checked(_libc.unshare(_CLONE_NEWNET | _CLONE_NEWUTS), "unshare")
        try:
            host = Host(name, address, INTERFACE, _open_namespaces())
            socket.sethostname(name)
            _ip("link", "set", "lo", "up")
        finally:
            _enter(before)
    finally:
        for descriptor in before:
            os.close(descriptor)
    return host


def _new_tun() -> int:
    """A TUN device on the host that this thread is on. It takes packets of 64 KB and divides them itself."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
    flags = _IFF_TUN | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", INTERFACE.encode(), flags))
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return descriptor


class Hosts:
    """A context manager. `head` is the first of `hosts`, `node` the second."""

    def __init__(self, kind: Kind, count: int = 2) -> None:
        self.kind = kind
        self.hosts: tuple[Host, ...] = ()
        self._count = count
        self._control: socket.socket | None = None
        self._cleanup = contextlib.ExitStack()

    @property
    def head(self) -> Host:
        return self.hosts[0]

    @property
    def node(self) -> Host:
        return self.hosts[1]

    def __enter__(self) -> Hosts:
        names = ["head", *(f"node{number}" for number in range(1, self._count))]
        with contextlib.ExitStack() as cleanup:
            for number, name in enumerate(names, 1):
                if self.kind == "loopback":
                    self.hosts += (Host(name, f"127.0.0.{number}", "lo"),)
                else:
                    self.hosts += (_new_host(name, f"10.83.0.{number}"),)
                    cleanup.callback(self.hosts[-1].close)
            if self.kind == "relay":
                self._lay_relay(cleanup)
            elif self.kind == "switch":
                self._lay_switch(cleanup)
            for host in self.hosts if self.kind != "loopback" else ():
                with host.inside():
                    _ip("address", "add", f"{host.address}/24", "dev", INTERFACE)
                    _ip("link", "set", INTERFACE, "txqueuelen", 10_000, "up")
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._cleanup.close()

    def _lay_switch(self, cleanup: contextlib.ExitStack) -> None:
        switch = _new_host("switch", "")
        cleanup.callback(switch.close)
        assert switch.namespaces is not None
        self._switch = switch
        net = switch.namespaces[0]
        with switch.inside():
            _ip("link", "add", "bridge0", "type", "bridge")
            _ip("link", "set", "bridge0", "up")
        for number, host in enumerate(self.hosts):
            port = f"port{number}"
            with host.inside():
                peer = ("peer", "name", port, "netns", f"/proc/self/fd/{net}")
                _ip("link", "add", INTERFACE, "type", "veth", *peer, keep=(net,))
            with switch.inside():
                _ip("link", "set", port, "master", "bridge0", "up")

    def unplug(self, host: Host) -> None:
        """Cut the host off: nothing reaches it or comes from it any more, and nobody is told."""
        self._set_port(host, "nomaster")

    def plug_in(self, host: Host) -> None:
        self._set_port(host, "master", "bridge0")

    def _set_port(self, host: Host, *words: str) -> None:
        with self._switch.inside():
            _ip("link", "set", f"port{self.hosts.index(host)}", *words)

    def _lay_relay(self, cleanup: contextlib.ExitStack) -> None:
        ours, theirs = socket.socketpair()
        cleanup.callback(ours.close)
        with theirs, contextlib.ExitStack() as devices:
            keep = []
            for host in self.hosts:
                with host.inside():
                    keep.append(_new_tun())
                devices.callback(os.close, keep[-1])
            keep.append(theirs.fileno())
            command = [sys.executable, "-I", str(Path(__file__).with_name("relay.py")), *map(str, keep)]
            process = subprocess.Popen(command, pass_fds=keep)
        cleanup.callback(process.wait)
        cleanup.callback(process.kill)
        self._control = ours

    # ------------------------------------------------------------------ the cable
    def _set(self, **settings: Any) -> None:
        """Changes the cable, at once for packets that come from now on."""
        assert self._control is not None, f"a cable of kind {self.kind} emulates nothing"
        self._control.sendall(json.dumps(settings).encode() + b"\n")
        assert self._control.recv(1) == b"\n", "the relay has ended"

    def emulate(self, *, delay_s: float = 0.0, bytes_per_s: float | None = None, loss: float = 0.0) -> None:
        """A cable with this delay one way, bandwidth in each direction, and share of packets that get lost."""
        self._set(delay_s=delay_s, bytes_per_s=bytes_per_s, loss=loss)

    def cut(self, direction: Direction = "both") -> None:
        """Cut the cable: nothing arrives any more, and neither side sees a connection end."""
        self._set(open=[direction == "to_head", direction == "to_node"])


@functools.cache
def why_not(kind: Kind) -> str | None:
    """Reason why this machine cannot emulate hosts of this kind; None when it can."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    try:
        with Hosts(kind):
            return None
    except OSError as error:
        return f"hosts joined by {kind} are not permitted here: {error}"


def hosts_for_test(kind: Kind, count: int = 2) -> Hosts:
    """Skips the test where they cannot be had."""
    if reason := why_not(kind):
        import pytest  # not in the environment of Ray, which has hosts as well

        pytest.skip(reason)
    return Hosts(kind, count)
