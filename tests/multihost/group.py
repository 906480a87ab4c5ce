"""`oarlock serve` on each of two hosts, as a user starts it there: one model, the same flags but for the host's number.

with Hosts("relay") as hosts, Group(hosts, DEMO, "-tp", 2) as group:
    group.head.text("import ")
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.e2e.running import READY_WITHIN_S, RunningServer, alive, eventually, free_port
from tests.multihost.hosts import Host, Hosts

Flags = tuple[str | int | Path, ...]

_PR_SET_PDEATHSIG = 1


def _end_with_the_tests() -> None:
    """A test run that is killed leaves no servers; it must not be called from a thread that ends earlier."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Inside(httpx.HTTPTransport):
    """Transport whose connections are made on a host."""

    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        with self._host.inside():
            return super().handle_request(request)


class HostServer(RunningServer):
    """A server on one host, asked from there. `torchrun`: its options, where that starts the server."""

    def __init__(
        self,
        host: Host,
        model: str | Path,
        *flags: str | int | Path,
        env: dict[str, str] | None = None,
        torchrun: Sequence[str | int] | None = None,
    ) -> None:
        self.host = host
        with host.inside():
            super().__init__(model, *flags, env=env, at_start=_end_with_the_tests, torchrun=torchrun)
        self.client = httpx.Client(base_url=self.url, timeout=60, transport=Inside(host))

    def main(self) -> psutil.Process:
        """The process of `oarlock serve`, of several on this host the one that serves."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                serves = "serve" in process.cmdline() and "torch.distributed.run" not in process.cmdline()
                if serves and process.environ().get("LOCAL_RANK", "0") == "0":
                    return process
        raise AssertionError(f"nothing serves:\n{self.log}")

    def ranks(self) -> list[psutil.Process]:
        """Processes of the ranks, in order."""
        found = [
            process for process in self.processes() if "oarlock.workers.runner.worker_process" in _command(process)
        ]
        return sorted(found, key=lambda process: process.create_time())

    def engine(self) -> psutil.Process:
        """The engine's process, which only the head has."""
        (found,) = (process for process in self.processes() if "oarlock.engine.core" in _command(process))
        return found


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def _words(options: Mapping[str, Any], given: Flags) -> list[Any]:
    """`options` as a command line, but for those that are given."""
    return [word for name, value in options.items() if name not in given for word in (name, value)]


def ranks_of(flags: Flags) -> int:
    """Counts the ranks that a command line asks for."""
    sizes = ("-tp", "--tensor-parallel-size", "-pp", "--pipeline-parallel-size")
    return math.prod(int(str(value)) for name, value in itertools.pairwise(flags) if name in sizes)


class Group:
    """Use as a context manager, which waits until the head is ready; leaving it ends whatever still runs.

    `head_flags` and `head_env` are for the head only; `node_flags`, `node_env` and `node_model`, where it is another
    one, for the other nodes. A variable of value None is left out. `launcher`: who is where is said by `flags`, by the
    variables of `LeaderWorkerSet`, or by torchrun, with one process on each host (`torchrun`) or with one for each rank
    (`torchrun per rank`).
    """

    def __init__(
        self,
        hosts: Hosts,
        model: str | Path,
        *flags: str | int | Path,
        head_flags: Flags = (),
        node_flags: Flags = (),
        head_env: dict[str, Any] | None = None,
        node_env: dict[str, Any] | None = None,
        node_model: str | Path | None = None,
        launcher: str = "flags",
    ) -> None:
        self.hosts = hosts
        with hosts.head.inside():
            self.port = free_port()
        self._starts: dict[str, Callable[[], HostServer]] = {}
        of_head, of_node = (model, head_flags, head_env), (node_model or model, node_flags, node_env)
        for number, host in enumerate(hosts.hosts):
            own_model, own_flags, own_env = of_node if number else of_head
            where: dict[str, Any] = {"--nnodes": len(hosts.hosts), "--node-rank": number}
            where |= {"--master-addr": hosts.head.address, "--master-port": self.port}
            usual: dict[str, Any] = {"--cpu-affinity": "none"}
            if hosts.kind == "loopback":
                usual |= {"--node-interface": host.address}
            torchrun, env = None, dict(own_env or {})
            if launcher == "flags":
                usual |= where
            elif launcher == "LeaderWorkerSet":
                usual |= {"--master-port": self.port}
                env |= {"LWS_LEADER_ADDRESS": hosts.head.address, "LWS_WORKER_INDEX": str(number)}
                env |= {"LWS_GROUP_SIZE": str(len(hosts.hosts))}
            else:
                each = ranks_of(flags) // len(hosts.hosts) if launcher == "torchrun per rank" else 1
                torchrun = _words(where | {"--nproc-per-node": each}, ())
            given = (*flags, *own_flags)
            env = {name: value for name, value in env.items() if value is not None}
            self._starts[host.name] = functools.partial(
                HostServer, host, own_model, *_words(usual, given), *given, env=env, torchrun=torchrun
            )
        self.servers: list[HostServer] = []

    def start_head(self) -> HostServer:
        self.head = self._start("head")
        return self.head

    def start_node(self) -> HostServer:
        self.node = self._start("node1")
        return self.node

    def on(self, name: str) -> HostServer:
        """The server of a host."""
        (server,) = (server for server in self.servers if server.host.name == name)
        return server

    def _start(self, name: str) -> HostServer:
        server = self._starts[name]()
        self.servers.append(server)
        return server

    def __enter__(self) -> Group:
        try:
            self.start_head()
            self.start_node()
            for host in self.hosts.hosts[2:]:
                self._start(host.name)
            return self.wait_ready()
        except BaseException:
            self.kill_all()
            raise

    def __exit__(self, *error: object) -> None:
        self.kill_all()

    def wait_ready(self, within_s: float = READY_WITHIN_S) -> Group:
        """Wait until the head's /health says 200; fail with the logs when either ends instead."""
        try:
            self.head.wait_ready(within_s)
            for server in self.servers:
                server.processes()
                assert server.process.poll() is None, f"{server.host.name} has left"
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.logs}") from None
        return self

    @property
    def logs(self) -> str:
        return "\n".join(f"--- {server.host.name}\n{server.log}" for server in self.servers)

    def statuses(self, within_s: float) -> list[int]:
        """Exit statuses of head and nodes; fails when one of them, or a process below it, runs after `within_s`."""
        for server in self.servers:
            server.processes()

        def ended() -> bool:
            polled = [server.process.poll() for server in self.servers]
            return None not in polled and not any(server.left_behind() for server in self.servers)

        try:
            eventually(ended, within_s, "everything has ended on all hosts")
        except AssertionError as error:
            left = [f"{process.pid} {_command(process)}" for process in self._living()]
            raise AssertionError(f"{error}; left: {left}\n{self.logs}") from None
        return [server.process.returncode for server in self.servers]

    def _living(self) -> list[psutil.Process]:
        return [process for server in self.servers for process in server.processes() if alive(process)]

    def kill_all(self) -> None:
        for server in self.servers:
            server.kill_all()
