"""The emulated hosts themselves: who reaches whom, how late, how fast, and what stays when their process is killed."""

import os
import signal
import socket
import subprocess
import sys
import threading

import psutil
import pytest

from tests.e2e.running import ROOT, eventually, free_port
from tests.multihost import probe
from tests.multihost.hosts import INTERFACE, TwoHosts, why_not

KINDS = ("relay", "veth", "loopback")


def two_hosts(kind):
    if reason := why_not(kind):
        pytest.skip(reason)
    return TwoHosts(kind)


@pytest.fixture(scope="module")
def hosts():
    """With a cable, and the probe answering on the node."""
    with two_hosts("relay") as hosts:
        with hosts.node.inside():
            hosts.port = free_port()
            answering = probe.answering(hosts.port)
            answering.__enter__()
        yield hosts
        answering.__exit__(None, None, None)


@pytest.fixture
def cable(hosts):
    yield hosts
    hosts.heal()
    hosts.emulate()


def reached(hosts, timeout_s=0.3):
    """Whether a connection from the head to the node can be made."""
    with hosts.head.inside():
        try:
            probe.connect(hosts.node.address, hosts.port, timeout_s).close()
        except TimeoutError:
            return False
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_each_host_reaches_the_other(kind):
    with two_hosts(kind) as hosts:
        for here, there in (hosts.hosts, hosts.hosts[::-1]):
            with there.inside():
                listener = socket.create_server((there.address, 0))
            with here.inside(), listener, probe.connect(there.address, listener.getsockname()[1]) as connection:
                accepted, address = listener.accept()
                with accepted:
                    connection.sendall(b"hello")
                    assert accepted.recv(5) == b"hello"
                if kind != "loopback":
                    assert address[0] == here.address


@pytest.mark.parametrize("kind", ["relay", "veth"])
def test_a_host_has_its_own_name_network_and_processes_and_the_thread_comes_back(kind):
    before = socket.gethostname(), socket.if_nameindex()
    with two_hosts(kind) as hosts:
        for host in hosts.hosts:
            with host.inside():
                assert socket.gethostname() == host.name
                assert {name for _, name in socket.if_nameindex()} >= {"lo", INTERFACE}
                child = subprocess.run([sys.executable, "-c", "import socket; print(socket.gethostname())"], stdout=-1)
                assert child.stdout.decode().strip() == host.name
            assert (socket.gethostname(), socket.if_nameindex()) == before
        other = []
        with hosts.node.inside():
            thread = threading.Thread(target=lambda: other.append(os.readlink("/proc/thread-self/ns/net")))
            inside = os.readlink("/proc/thread-self/ns/net")
            thread.start()  # a thread begins where the one is that starts it
            thread.join()
        assert other == [inside] != [os.readlink("/proc/thread-self/ns/net")]


@pytest.mark.parametrize("direction", ["both", "to_node", "to_head"])
def test_nothing_passes_a_cut_and_it_heals(cable, direction):
    assert reached(cable, 60)
    cable.cut(direction)
    before = cable.carried()["dropped"]
    assert not reached(cable)
    at = 1 if direction == "to_head" else 0
    eventually(lambda: cable.carried()["dropped"][at] > before[at], 60, "what was sent is dropped")
    cable.heal()
    assert reached(cable, 60)


def test_nothing_is_left_when_the_process_is_killed(tmp_path):
    if reason := why_not("relay"):
        pytest.skip(reason)
    code = (
        "import os, subprocess, sys, time\nfrom tests.multihost.hosts import TwoHosts\n"
        "with TwoHosts('relay') as hosts:\n"
        "    with hosts.node.inside():\n        name = os.readlink('/proc/thread-self/ns/net')\n"
        "    print(hosts.relay_pid, name, flush=True)\n    time.sleep(60)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    relay, namespace = process.stdout.readline().split()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    eventually(lambda: not psutil.pid_exists(int(relay)), 60, "the relay ends")
    inside = [entry for entry in os.scandir("/proc") if entry.name.isdigit() and network(entry.path) == namespace]
    assert inside == []


def network(process):
    try:
        return os.readlink(f"{process}/ns/net")
    except OSError:  # it has ended, or is not ours
        return None


def test_where_it_is_not_permitted_the_reason_says_so():
    code = (
        "import os\nfrom tests.multihost.hosts import why_not\nos.setgid(65534); os.setuid(65534)\n"
        "print(why_not('relay')); print(why_not('veth')); print(why_not('loopback'))"
    )
    if os.getuid() != 0:
        pytest.skip("only root can become nobody")
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    relay, veth, loopback = result.stdout.splitlines()
    assert "not permitted" in relay and "not permitted" in veth
    assert loopback == "None"
