"""A Ray cluster of several nodes on one machine, each in a separate network namespace, and an Oarlock that has Ray.

The thread that enters the cluster is on the head's host until it leaves it, as is what it starts.
"""

from __future__ import annotations

import contextlib
import os
import sys
import venv
from pathlib import Path

import psutil

from tests.e2e.running import ROOT
from tests.multihost.hosts import Host, Hosts, why_not
from tests.ray.cluster import HEAD_PORT, Cluster, Replica, command, eventually

HEAD_CORES, CORES = 4, 2  # of the head and of each other node, so Ray is told
LAYERS_ON_TWO = command("--max-num-seqs", 8, "--pipeline-parallel-size", 2, "--nnodes", 2)


class NodeCluster(Cluster):
    """Use as a context manager, as `Cluster`. It begins with the head and one node; a third host is there."""

    def __init__(self) -> None:
        reason = why_not("switch")
        assert reason is None, reason
        self.hosts = Hosts("switch", 3)
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> NodeCluster:
        with contextlib.ExitStack() as cleanup:
            cleanup.enter_context(self.hosts)
            cleanup.enter_context(self.hosts.head.inside())
            super().__init__(HEAD_CORES, 0, self.hosts.head.address)
            super().__enter__()
            cleanup.callback(super().__exit__)
            self.join(self.hosts.node)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._cleanup.close()

    def join(self, host: Host, cores: int = CORES) -> None:
        """Make the host a node."""
        where = (f"--address={self.hosts.head.address}:{HEAD_PORT}", f"--node-ip-address={host.address}")
        with host.inside():
            self.ray("ray", "start", *where, "--num-cpus", str(cores), "--object-store-memory=100000000")

    def kill_raylet(self, host: Host) -> None:
        """Kill what makes the host a node, and nothing else."""
        next(one for one in self._processes(host) if Path(one.cmdline()[0]).name == "raylet").kill()

    def switch_off(self, host: Host) -> None:
        """End every process on the host."""

        def nothing_runs() -> bool:
            running = self._processes(host)
            for process in running:
                process.kill()
            return not running

        eventually(nothing_runs, f"all processes of {host.name} have ended", 30)

    def _processes(self, host: Host) -> list[psutil.Process]:
        with host.inside():
            here = os.stat("/proc/thread-self/ns/net").st_ino
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(OSError):
                if os.stat(f"/proc/{process.pid}/ns/net").st_ino == here:
                    found.append(process)
        return found

    def inside(self, address: str) -> contextlib.AbstractContextManager[None]:
        return next(host for host in self.hosts.hosts if host.address == address).inside()


def part_of(replica: Replica) -> psutil.Process:
    """The process of `oarlock serve` on the other node that belongs to this replica's server."""
    port = next(word for word in replica.server.cmdline() if word.startswith("--master-port="))
    return next(part for part in parts() if port in part.cmdline())


def parts() -> list[psutil.Process]:
    """Every process of `oarlock serve` that is not the first of its group."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if "serve" in words and "--node-rank=1" in words:
                found.append(process)
    return found


def oarlock_with_ray(directory: Path) -> str:
    """The interpreter of an environment in which `pip install oarlock[ray]` might have been run: ours, and behind it
    that of Ray. It is made in `directory` once."""
    if directory.exists():
        return str(directory / "bin" / "python")
    venv.EnvBuilder(with_pip=False).create(directory)
    packages = Path("lib", f"python{sys.version_info.major}.{sys.version_info.minor}", "site-packages")
    paths = [ROOT / ".venv" / packages, Path(sys.prefix) / packages]
    lines = [f"import site; site.addsitedir({os.fspath(path)!r})\n" for path in paths]
    (directory / packages / "both.pth").write_text("".join(lines))
    return str(directory / "bin" / "python")
