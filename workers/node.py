"""What one of several hosts, a node, does for the others. Torch-free, and light to import.

The head node serves HTTP and starts an executor (`workers/executor.py`); the others run `run_node`.
"""

from workers.config import NodesConfig, OnProgress, WorkerConfig
from workers.distributed.nodes.interface import own_interface
from workers.errors import StartupError
from workers.platform.network import check_port_is_free, is_loopback
from workers.rank_processes import end_ranks, start_ranks_ahead


def check_network(nodes: NodesConfig, on_phase: OnProgress) -> None:
    """Whether this host has a way to the head node, or can listen as the head. Raises `StartupError`.

    Takes no time, but for a name that is not known yet.
    """
    own = own_interface(nodes, lambda: on_phase(f"waiting for the name {nodes.address}", 0.0))
    if nodes.node_rank == 0:
        if nodes.interface is None and is_loopback(own.address) and not is_loopback(nodes.address):
            raise StartupError(
                f"Here {nodes.address} is {own.address}, which no other host can reach: so it stands in /etc/hosts.",
                "Give --master-addr the number of this host's address, or name its --node-interface.",
            )
        check_port_is_free(own.address, nodes.port)


def run_node(config: WorkerConfig, nodes: NodesConfig, on_phase: OnProgress, *, stop_fd: int) -> int:
    """Run this node's ranks for the head node until it ends them. Returns the exit code, as of a server.

    `config` still has its "auto"s. `on_phase` gets what this node is doing, and the share of it that is done. When
    `stop_fd` becomes readable the operator has asked this node to stop, which ends the whole group in order. Raises
    `StartupError`.
    """
    ahead = start_ranks_ahead(config.ranks_per_node)  # they import side by side with this
    try:
        from workers.fingerprint import node_facts
        from workers.preflight import preflight
        from workers.worker.nodes.gather import take_part

        resolved = preflight(config)
        facts = node_facts(resolved)
    except BaseException:
        end_ranks(ahead)
        raise
    return take_part(resolved, nodes, facts, on_phase, ahead, stop_fd)
