"""A Ray cluster of two nodes on one machine, each in a network namespace of its own, and an Oarlock that has Ray.

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
from tests.multihost.hosts import TwoHosts, why_not
from tests.ray.cluster import HEAD_PORT, Cluster, Replica, command

SIZE = 4  # cores of each node, so Ray is told
LAYERS_ON_TWO = command("--max-num-seqs", 8, "--pipeline-parallel-size", 2, "--nnodes", 2)


class NodeCluster(Cluster):
    """Use as a context manager, as `Cluster`."""

    def __init__(self) -> None:
        reason = why_not("veth")
        assert reason is None, reason
        self.hosts = TwoHosts("veth")
        self._cleanup = contextlib.ExitStack()

    def __enter__(self) -> NodeCluster:
        with contextlib.ExitStack() as cleanup:
            cleanup.enter_context(self.hosts)
            cleanup.enter_context(self.hosts.head.inside())
            super().__init__(SIZE, 0, self.hosts.head.address)
            super().__enter__()
            cleanup.callback(super().__exit__)
            with self.hosts.node.inside():
                head = f"--address={self.hosts.head.address}:{HEAD_PORT}"
                self.ray("ray", "start", head, f"--node-ip-address={self.hosts.node.address}", *self._size)
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._cleanup.close()

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
