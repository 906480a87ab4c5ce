"""Options by which this host finds the others that serve the same model, checked together."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from oarlock.engine.config import NodesConfig
from oarlock.engine.errors import StartupError
from oarlock.server.config.groups.nodes import RAY
from oarlock.server.config.launchers import launcher_store
from oarlock.server.config.settings import Settings


def nodes_config(settings: Settings, environment: Mapping[str, str]) -> NodesConfig | None:
    """Configuration of the hosts; None where this host serves alone, or Ray finds the others. Raises `StartupError`."""
    nnodes, rank = settings.nnodes, settings.node_rank
    if settings.distributed_executor_backend == RAY:
        _check_ray(settings)
        return None
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


def ray_resources(settings: Settings) -> dict[str, float]:
    """Resources that Ray reserves on each host: a GPU for each rank there, or the cores of its threads."""
    ranks = settings.tensor_parallel_size * settings.pipeline_parallel_size // settings.nnodes
    if settings.device == "cpu":
        return {"CPU": float(ranks * (settings.num_threads or 1))}
    return {"CPU": float(ranks), "GPU": float(ranks)}


def _check_ray(settings: Settings) -> None:
    flag, ranks = "--distributed-executor-backend ray", settings.tensor_parallel_size * settings.pipeline_parallel_size
    given = [
        f"--{name}" for name in ("node-rank", "master-addr") if getattr(settings, name.replace("-", "_")) is not None
    ]
    if given:
        raise StartupError(
            f"{given[0]} is given beside {flag}, which numbers and finds the hosts itself.",
            f"Leave {given[0]} out, and start the command on one host alone.",
        )
    if settings.data_parallel_size > 1:
        raise StartupError(
            f"--data-parallel-size {settings.data_parallel_size} beside {flag}: replicas share one host.",
            "Have Ray Serve start the replicas (docs/replicas.md).",
        )
    if settings.device == "auto":
        raise StartupError(f"{flag} must know what a rank takes of a host.", "Add --device cuda or --device cpu.")
    if ranks % settings.nnodes:
        raise StartupError(
            f"{ranks} ranks cannot be dealt to {settings.nnodes} hosts in equal parts.",
            "Choose --nnodes so that it divides --tensor-parallel-size times --pipeline-parallel-size.",
        )
    if importlib.util.find_spec("ray") is None:
        raise StartupError(
            f"{flag} needs the Python package ray, which is missing.",
            "Run: pip install 'oarlock[ray]' (in a checkout: pip install --editable '.[ray]')",
        )
