"""Checks of this host as one of several: what `serve` would check before it waits for the others."""

from oarlock.workers.config import NodesConfig
from oarlock.workers.doctor.finding import ERROR, Finding
from oarlock.workers.errors import StartupError
from oarlock.workers.node import check_network
from oarlock.workers.ranks.nodes import own_interface


def reachable(nodes: NodesConfig) -> Finding:
    """The interface towards the other hosts; on the head, whether it can listen there."""
    try:
        check_network(nodes, lambda *progress: None)
        own = own_interface(nodes)
    except StartupError as error:
        return wrong(error.cause, error.fix)
    role = "the head" if nodes.node_rank == 0 else f"which joins {nodes.address}, port {nodes.port}"
    text = f"node {nodes.node_rank} of {nodes.nnodes}, {role}, through {own.name} ({own.address})"
    facts = {"node_rank": nodes.node_rank, "nnodes": nodes.nnodes, "interface": own.name, "address": own.address}
    return Finding("hosts", text, facts=facts)


def wrong(cause: str, fix: str) -> Finding:
    """The settings of several hosts are not complete, or do not fit this one."""
    return Finding("hosts", cause, ERROR, fix)
