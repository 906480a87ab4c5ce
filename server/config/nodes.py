"""How this host finds the others that serve the same model: the options that say so, checked together."""

from __future__ import annotations

from collections.abc import Mapping

from engine.config import NodesConfig
from engine.errors import StartupError
from server.config.launchers import launcher_store
from server.config.settings import Settings


def nodes_config(settings: Settings, environment: Mapping[str, str]) -> NodesConfig | None:
    """None where the model is served by this host alone. Raises `StartupError`."""
    nnodes, rank = settings.nnodes, settings.node_rank
    if nnodes == 1 and not rank:
        return None
    if nnodes == 1:
        raise StartupError(f"--node-rank is {rank}, but --nnodes is 1.", "Give every host the same --nnodes.")
    if settings.data_parallel_size > 1:
        raise StartupError(
            f"--data-parallel-size {settings.data_parallel_size} with --nnodes {nnodes}: replicas share one host.",
            "Start one server for each group of hosts, without --data-parallel-size, behind a proxy.",
        )
    if rank is None:
        raise StartupError(
            f"--nnodes is {nnodes}, but which of them this host is, is not known.",
            f"Give each host its own --node-rank, from 0 to {nnodes - 1}; 0 serves HTTP.",
        )
    if rank >= nnodes:
        raise StartupError(
            f"--node-rank is {rank}, but of {nnodes} hosts the last is {nnodes - 1}.",
            f"Use a number from 0 to {nnodes - 1}, another one on each host, or raise --nnodes.",
        )
    if settings.master_addr is None:
        raise StartupError(
            f"--nnodes is {nnodes}, but the address of the head node is not known.",
            "Give --master-addr the name or address of the host with --node-rank 0, the same on every host.",
        )
    return NodesConfig(
        node_rank=rank,
        nnodes=nnodes,
        address=settings.master_addr,
        port=settings.master_port,
        interface=settings.node_interface,
        timeout_s=settings.node_timeout,
        launcher_store=launcher_store(environment, settings.master_addr, settings.master_port),
    )
