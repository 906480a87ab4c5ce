"""Ranks on a host that is not the head, run for the head node. Light to import, and torch-free until they start.

The head node serves HTTP and starts an executor (`workers/executor.py`); the others run `run_node`.
"""

import atexit
import os
import select
import sys
import time
from collections.abc import Callable

from oarlock.base.errors import EXIT_OK, StartupError
from oarlock.workers.config import NodesConfig, OnProgress, WorkerConfig
from oarlock.workers.platform.network import check_port_is_free, is_loopback
from oarlock.workers.rank_processes import end_ranks, start_ranks_ahead
from oarlock.workers.ranks.nodes import own_interface


def check_network(nodes: NodesConfig, on_phase: OnProgress) -> None:
    """Check that this host has a route to the head node, or can listen as the head. Raises `StartupError`.

    Takes no time, unless a name cannot be resolved yet.
    """
    own = own_interface(nodes, lambda: on_phase(f"waiting until the name {nodes.address} resolves", 0.0))
    if nodes.node_rank == 0:
        if nodes.interface is None and is_loopback(own.address) and not is_loopback(nodes.address):
            raise StartupError(
                f"Here {nodes.address} is {own.address}, which no other host can reach (see /etc/hosts).",
                "Give --master-addr this host's IP address, or set --node-interface.",
            )
        if nodes.launcher_store is None:
            check_port_is_free(own.address, nodes.port)


class _StoppedError(Exception):
    """The operator wants this node to stop while it waits for the others."""


def run_node(config: WorkerConfig, nodes: NodesConfig, on_phase: OnProgress, *, stop_fd: int) -> int:
    """Run this node's ranks for the head node until it ends them. Returns the exit code, as of a server.

    `config` still contains "auto" values. `on_phase` gets the current phase of this node, and the fraction that is
    done. When `stop_fd` becomes readable, the operator has asked this node to stop, which ends the whole group in
    order. Raises `StartupError`.
    """
    ahead = start_ranks_ahead(config.ranks_per_node)  # they import in parallel with this process
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        from oarlock.workers.fingerprint import node_facts
        from oarlock.workers.preflight import preflight

        resolved = preflight(config)
        facts = node_facts(resolved)
        from oarlock.workers.ranks.membership import join
        from oarlock.workers.ranks.node_process import NodeProcess

        membership = join(nodes, facts, _waiting(on_phase, nodes, stop_fd))
        process = NodeProcess(resolved, membership, ahead, on_phase, stop_fd)
    except _StoppedError:
        end_ranks(ahead)
        return EXIT_OK
    except BaseException:
        end_ranks(ahead)
        raise
    ending = process.run()
    atexit.register(_exit_at_once, ending.exit_code)
    if ending.fix:
        raise StartupError(ending.cause, ending.fix, ending.exit_code)
    return ending.exit_code


def _exit_at_once(status: int) -> None:
    """Exit without Python's finalization, which would abort if a thread waits in gloo for a lost node."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _waiting(on_phase: OnProgress, nodes: NodesConfig, stop_fd: int) -> Callable[[str], None]:
    """Return a callback that shows which nodes this node waits for, and ends the waiting if the operator wants it."""
    deadline = time.monotonic() + nodes.timeout_s

    def on_waiting(text: str) -> None:
        if select.select([stop_fd], [], [], 0)[0]:
            raise _StoppedError
        left = max(0.0, deadline - time.monotonic())
        on_phase("waiting for nodes", 0.0, f"{text}, {left:.0f} s left")

    return on_waiting
